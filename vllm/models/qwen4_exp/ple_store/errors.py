# SPDX-License-Identifier: Apache-2.0
"""One exception per way the table's files, or the settings, can be wrong."""

import os
from typing import NamedTuple


class PLEStoreError(RuntimeError):
    """Base of everything that can be wrong with a table in files.

    Attributes:
        path: the file (or model directory) at fault
        expected: what had to be there
        actual: what was there
    """

    what = "The n-gram table cannot be used"
    remedy = ""

    def __init__(self, path: object, expected: object, actual: object) -> None:
        # All arguments go to ``args``, so that the exception survives the pickling
        # between a worker and the engine.
        super().__init__(str(path), str(expected), str(actual))
        self.path, self.expected, self.actual = self.args[:3]

    def __str__(self) -> str:
        return f"{self.what}: {self.path}: expected {self.expected}, found {self.actual}. {self.remedy}"


class TableNotFound(PLEStoreError):
    what = "No n-gram table in the model directory"
    remedy = (
        "host_file_gather reads the table from safetensors files in the model's own "
        "directory, under every load format (dummy included): give a directory that "
        "holds them, or set --engram-config "
        '\'{"host_file_gather": false, "cpu_offload": false}\'.'
    )


class MissingShard(PLEStoreError):
    what = "A shard of the n-gram table is missing"
    remedy = "Download the checkpoint again; its index and files must be complete."


class DuplicateShard(PLEStoreError):
    what = "A shard of the n-gram table is there more than once"
    remedy = "Keep one copy; a stale file beside a new checkpoint is the usual cause."


class WrongShape(PLEStoreError):
    what = "A shard of the n-gram table has the wrong shape"
    remedy = "The config and the weights are not of the same model."


class WrongDtype(PLEStoreError):
    what = "The shards of the n-gram table differ in dtype"
    remedy = "They are of different checkpoints; download the one that is meant again."


class UnknownRowFormat(PLEStoreError):
    what = "The n-gram table is stored in a way that is not known here"
    remedy = "Known are plain rows, fp8 and int8 rows with a scale for the table or for each row, and ModelOpt's NVFP4."


class BadScale(PLEStoreError):
    what = "The n-gram table's scale is missing or no scale"
    remedy = "Without it every row would be wrong; take the scale from the checkpoint that the rows are from."


class BadHeader(PLEStoreError):
    what = "Not a readable safetensors file"
    remedy = "Download the file again."


class TruncatedFile(PLEStoreError):
    what = "A file of the n-gram table is too short"
    remedy = "Download the file again; it was cut off."


class UnreadableFile(PLEStoreError):
    what = "A file of the n-gram table cannot be opened"
    remedy = "Check that the file exists and that the serving user may read it."


class BadFlatHeader(PLEStoreError):
    what = "Not a flat n-gram table"
    remedy = "Write it with vllm ampere flatten-ple CHECKPOINT FILE."


class UnfinishedFlatTable(PLEStoreError):
    what = "A flat n-gram table is not finished"
    remedy = "Run vllm ampere flatten-ple CHECKPOINT FILE again: it goes on where it stopped."


class WrongFlatTable(PLEStoreError):
    what = "A flat n-gram table does not fit the model"
    remedy = (
        "It was written from another checkpoint; give the one of this model, or write it with vllm ampere flatten-ple."
    )


class FlatTableOfOther(PLEStoreError):
    what = "A flat n-gram table and the checkpoint disagree"
    remedy = "It was written from another checkpoint, or replaced; write it again with vllm ampere flatten-ple."


class DamagedFlatTable(PLEStoreError):
    what = "A flat n-gram table is damaged"
    remedy = "Its disk or a copy changed it; write it again with vllm ampere flatten-ple."


class NoRoomForFlatTable(PLEStoreError):
    what = "The disk has no room for a flat n-gram table"
    remedy = "Make room or name a file on another disk; what is written so far stays, and is gone on with."


class FlatTableNotWritten(PLEStoreError):
    what = "A flat n-gram table cannot be written"
    remedy = "Check the folder and its permissions; what is written so far stays, and is gone on with."


class LostRow(NamedTuple):
    """A row that could not be read.

    Attributes:
        row: its number
        path, offset, size: where its bytes are
        found: what was there instead of them, for people
    """

    row: int
    path: str
    offset: int
    size: int
    found: str

    def __str__(self) -> str:
        """For the client whose request needed the row.

        The file's name stands by itself, because API servers replace whole paths in what they send by ``<path>``.
        """
        return (
            f"Row {self.row} of the n-gram table could not be read from {os.path.basename(self.path)} ({self.path}): "
            f"expected {self.size} bytes at offset {self.offset}, found {self.found}."
        )


class RowReadFailed(PLEStoreError):
    """Rows could not be read.

    Attributes:
        lost: which, each once; the sentence has the place of the first
        gone: whether the file itself is lost, so that no other row of it can be read either
        requests: those that needed the rows, each with the first that it needed, once that is known
    """

    what = "Reading a row of the n-gram table failed"
    cause = (
        "The file changed or its disk failed while it was being served; nothing is computed from other rows instead."
    )

    def __init__(
        self,
        path: object,
        expected: object,
        actual: object,
        lost: list[LostRow] | None = None,
        gone: bool = False,
        requests: dict[str, LostRow] | None = None,
    ) -> None:
        super().__init__(path, expected, actual)
        self.args += (lost or [], gone, requests or {})
        self.lost, self.gone, self.requests = self.args[3:]

    @classmethod
    def of(cls, lost: list[LostRow], gone: bool) -> "RowReadFailed":
        first = lost[0]
        return cls(first.path, f"{first.size} bytes at offset {first.offset}", first.found, lost, gone)

    @property
    def rows(self) -> list[int]:
        return [one.row for one in self.lost]

    def named(self, requests: dict[str, LostRow]) -> "RowReadFailed":
        """The same, with the requests that it concerns."""
        return type(self)(self.path, self.expected, self.actual, self.lost, self.gone, requests)

    def joined(self, other: "RowReadFailed") -> "RowReadFailed":
        """Both; the sentence stays that of the first."""
        return type(self)(self.path, self.expected, self.actual, self.lost + other.lost, self.gone or other.gone)

    def __str__(self) -> str:
        more = f" and {len(self.lost) - 1} more" if len(self.lost) > 1 else ""
        lost = f" Row {self.lost[0].row}{more}" if self.lost else ""
        whose = f", needed by {', '.join(self.requests)}." if self.requests else "." * bool(lost)
        rest = "No row of that file can be read any more." if self.gone else "Other rows can still be read."
        return (
            f"{self.what}: {self.path}: expected {self.expected}, found {self.actual}.{lost}{whose} {rest} {self.cause}"
        )


class RowOutOfRange(RowReadFailed):
    """Rows that the table does not have."""

    what = "A row id lies outside the n-gram table"
    cause = (
        "A defect of the server, or of the checkpoint's numbers for hashing (ngram_heads_offsets, sizes), not of the "
        "request; please report it."
    )


class TableNotLoadable(PLEStoreError):
    what = "Weights were sent for an n-gram table that is served from files"
    remedy = (
        "Its rows cannot be replaced in memory. To update weights in place set "
        "--engram-config '{\"host_file_gather\": false}'."
    )


class TableNotPinned(PLEStoreError):
    what = "The n-gram table cannot be pinned in host memory"
    remedy = (
        "Leave it on the disk, --engram-config '{\"host_file_gather\": true}', which needs none of that memory; or add "
        "memory, or raise the limit of locked memory (ulimit -l, LimitMEMLOCK, docker --ulimit memlock=-1)."
    )


class HostFileGatherRefused(ValueError):
    """A combination of settings that reading rows from files does not support.

    Attributes:
        setting: the setting that stands in the way, as the user writes it
        value: its value
    """

    def __init__(self, setting: str, value: object, why: str, remedy: str) -> None:
        super().__init__(setting, value, why, remedy)
        self.setting, self.value = setting, value
        self._sentence = f"{setting}={value!r} {why} {remedy}"

    def __str__(self) -> str:
        return self._sentence
