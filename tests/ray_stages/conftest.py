import pytest

# `make install` brings Ray; an environment that was made before may lack it.
pytest.importorskip("ray", reason="Ray is not installed: run `make install` again")
