"""`python -m fork`."""

import sys

from fork.cli import main

sys.exit(main())
