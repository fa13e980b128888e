"""Writes wheels.

Members that we do not touch move from zip to zip in compressed form, with the hash that upstream's RECORD has for
them: the CUDA flavour is 837 MB unpacked, and compressing it again would take minutes and change nothing.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fork import disk, dist_info, requirements
from fork.base import PACKAGE
from fork.errors import BadWheel
from fork.plan import Plan, Sources

EPOCH = (2026, 1, 1, 0, 0, 0)  # a fixed time, so that equal input gives an equal wheel
_LOCAL_HEADER = 30


class Writer:
    """A wheel under construction that keeps its own RECORD."""

    def __init__(self, archive: zipfile.ZipFile, info: str) -> None:
        self.archive, self.info = archive, info
        self.record: list[tuple[str, str, str]] = []

    def add(self, path: str, content: bytes) -> None:
        entry = zipfile.ZipInfo(path, EPOCH)
        entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
        self.archive.writestr(entry, content)
        self.record.append(dist_info.record_line(path, content))

    def move(self, source: zipfile.ZipFile, member: zipfile.ZipInfo, line: tuple[str, str, str]) -> None:
        """zipfile can write a header and can read one; the bytes between are copied as they are."""
        stream, file = source.fp, self.archive.fp
        stream.seek(member.header_offset)
        header = stream.read(_LOCAL_HEADER)
        # The local header's own name and extra field; the central directory's may be of another length.
        skip = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        stream.seek(member.header_offset + _LOCAL_HEADER + skip)
        entry = zipfile.ZipInfo(member.filename, member.date_time)
        entry.compress_type, entry.external_attr = member.compress_type, member.external_attr
        entry.CRC, entry.compress_size, entry.file_size = member.CRC, member.compress_size, member.file_size
        file.seek(self.archive.start_dir)
        entry.header_offset = file.tell()
        file.write(entry.FileHeader())
        left = member.compress_size
        while left:
            block = stream.read(min(left, disk.CHUNK))
            if not block:
                raise BadWheel(f"{source.filename} ends inside {member.filename}")
            file.write(block)
            left -= len(block)
        self.archive.start_dir = file.tell()
        self.archive.filelist.append(entry)
        self.archive.NameToInfo[entry.filename] = entry
        self.archive._didModify = True  # else close() would write no central directory
        self.record.append(line)

    def finish(self, files: dict[str, bytes]) -> None:
        for name, content in files.items():
            self.add(f"{self.info}/{name}", content)
        record = f"{self.info}/RECORD"
        self.add(record, dist_info.record_text([*self.record, (record, "", "")]))


def full(plan: Plan, folder: Path, readme: Path) -> str:
    """Upstream's members, our modules, our edits."""
    with _writer(plan, folder) as (writer, name):
        contents = plan.contents()
        lines = _upstream_record(plan)
        for path, (archive, member) in plan.members().items():
            if path not in contents:
                writer.move(archive, member, lines[member.filename])
        for path, file in plan.outcome.added.items():
            contents[path] = file.read_bytes()
        for path, content in sorted(contents.items()):
            writer.add(PACKAGE + path, content)
        writer.finish(dist_info.files(plan, readme))
    return name


def editable(sources: Sources, folder: Path, tree: Path, readme: Path) -> str:
    """Metadata and one line for sys.path. No import hook: the tree is a complete package, plain imports find it,
    also from the repository root, whose vllm/ has no __init__.py and therefore gives way."""
    with _writer(sources, folder) as (writer, name):
        writer.add("__editable__.vllm.pth", f"{tree}\n".encode())
        writer.finish(dist_info.files(sources, readme))
    return name


@contextmanager
def _writer(sources: Sources, folder: Path) -> Iterator[tuple[Writer, str]]:
    """Under a temporary name; the real one appears when all is in it."""
    name = dist_info.wheel_name(sources)
    part = folder / f".{name}.part"
    with disk.watched(folder, f"writing {name}"):
        archive = zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED)
        try:
            yield Writer(archive, dist_info.folder(sources.version)), name
            archive.close()
            part.replace(folder / name)
        finally:
            with suppress(OSError):  # closing writes the directory, which a full disk refuses as well
                archive.close()
            part.unlink(missing_ok=True)


def _upstream_record(plan: Plan) -> dict[str, tuple[str, str, str]]:
    lines = {}
    for source in plan.flavour.sources:
        wheel = plan.wheels[source.wheel]
        with zipfile.ZipFile(wheel) as archive:
            text = archive.read(requirements.dist_info(archive.namelist(), wheel) + "/RECORD").decode()
        lines.update({line[0]: line for line in dist_info.record_lines(text) if source.wants(line[0])})
    return lines
