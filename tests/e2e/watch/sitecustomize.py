"""Note who opens safetensors files, and how many bytes of tensors are taken out of them.

Python imports this module by its name at the start of every process that has its folder in PYTHONPATH; it does
nothing unless WATCH_FILES names a file, to which it adds lines `process, path, bytes taken`.
"""

import multiprocessing
import os
import sys

if notes := os.environ.get("WATCH_FILES"):
    import safetensors

    def note(path: object, taken: int) -> None:
        with open(notes, "a") as file:
            file.write(f"{multiprocessing.current_process().name},{os.path.basename(str(path))},{taken}\n")

    def audit(event: str, arguments: tuple) -> None:
        """Files opened from Python: headers, and rows of a table that stays in its files."""
        if event == "open" and str(arguments[0]).endswith(".safetensors"):
            note(arguments[0], 0)

    class Watched:
        """`safe_open`, which opens its file outside Python."""

        _open = safetensors.safe_open

        def __init__(self, path: str, *arguments: object, **named: object) -> None:
            self._path, self._taken = path, 0
            self._file = Watched._open(path, *arguments, **named)

        def __enter__(self) -> "Watched":
            self._file.__enter__()
            return self

        def __exit__(self, *error: object) -> object:
            note(self._path, self._taken)
            return self._file.__exit__(*error)

        def __getattr__(self, name: str) -> object:
            return getattr(self._file, name)

        def get_tensor(self, name: str):
            tensor = self._file.get_tensor(name)
            self._taken += tensor.nbytes
            return tensor

    safetensors.safe_open = Watched
    sys.addaudithook(audit)
