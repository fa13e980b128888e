# SPDX-License-Identifier: Apache-2.0
"""A refusal ends a command with a sentence instead of a traceback."""

import argparse
import sys
from collections.abc import Callable

from vllm.ampere.finding import Finding


def in_a_sentence(command: Callable[[argparse.Namespace], object]) -> Callable[[argparse.Namespace], None]:
    """``command``, ending with status 1 and the messages of a refused checkpoint where there are any.

    Only what was found before a process was started comes here; the place in our code that
    found it says nothing to whoever has to fetch a file again.
    """

    def run(args: argparse.Namespace) -> None:
        try:
            command(args)
        except Finding as finding:
            for message in (str(finding), *getattr(finding, "__notes__", ())):
                print(f"refused: {message}", file=sys.stderr)
            sys.exit(1)

    return run
