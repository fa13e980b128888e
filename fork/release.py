"""The one module whose text depends on our version: vllm/_version.py of the forked tree."""

from __future__ import annotations

import re

PATH = "_version.py"

_TEMPLATE = '''"""Written by the fork's build: the upstream release and the state of our series on it."""

__all__ = ["__commit_id__", "__version__", "__version_tuple__", "commit_id", "version", "version_tuple"]

__version__ = version = {version!r}
__version_tuple__ = version_tuple = {parts!r}
__commit_id__ = commit_id = None
'''


def text(version: str) -> bytes:
    """Numbers of the release first, as vllm.version compares them; our local part is one last word."""
    public, _, local = version.partition("+")
    parts: list[int | str] = [int(part) if part.isdigit() else part for part in re.split(r"[.]", public)]
    return _TEMPLATE.format(version=version, parts=(*parts, *([local] if local else []))).encode()
