"""The flat file: written, gone on with, opened, and every way in which it can be wrong."""

import errno
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from demo.checkpoint.table_formats import FORMS
from vllm.models.qwen4_exp.ple_store import errors
from vllm.models.qwen4_exp.ple_store.embedding import open_store
from vllm.models.qwen4_exp.ple_store.flat import layout, writer
from vllm.models.qwen4_exp.ple_store.flat.layout import PAGE, FlatLocation, FlatTable, Part, read_flat_header
from vllm.models.qwen4_exp.ple_store.flat.reader import open_flat
from vllm.models.qwen4_exp.ple_store.flat.verify import verify
from vllm.models.qwen4_exp.ple_store.flat.writer import flatten
from vllm.models.qwen4_exp.ple_store.formats import Kind, dequantize
from vllm.models.qwen4_exp.ple_store.locate import TableShape
from vllm.models.qwen4_exp.ple_store.reader import TableReader

from .conftest import LAYER

ROWS = 1000


@pytest.fixture
def small_segments(monkeypatch):
    """Two pages to a checksum, so that a small table has several."""
    for module in (layout, writer):
        monkeypatch.setattr(module, "SEGMENT_PAGES", 2)
    monkeypatch.setattr("vllm.models.qwen4_exp.ple_store.flat.verify.SEGMENT_PAGES", 2)


@pytest.fixture
def made(write_table, tmp_path, small_segments):
    """A table of 1000 rows of 32 values, and its flat file: 64 rows to a page, 16 pages."""
    written = write_table(rows=ROWS, dim=32)
    out = tmp_path / "out" / "table.flat"
    out.parent.mkdir()
    return SimpleNamespace(written=written, out=out, table=flatten(written.table(), LAYER, 32, out))


def opened(made, **changes):
    shape = TableShape(**{**made.written.shape.__dict__, **changes})
    return open_flat(made.out, str(made.written.folder), LAYER, shape)


@pytest.mark.parametrize("form", ["plain", *FORMS])
def test_every_row_in_every_format(write_table, tmp_path, form):
    written = write_table(rows=ROWS, dim=32, form=form)
    flatten(written.table(), LAYER, 32, tmp_path / "flat")
    # A model is built under its device as the default one, which rows are not read to.
    with torch.device("meta"):
        stores = [
            open_store(SimpleNamespace(host_file_path=path), str(written.folder), LAYER, written.shape)
            for path in (None, str(tmp_path / "flat"))
        ]
    ids = torch.randperm(ROWS).view(8, -1)
    shards, flat = ([part for part in store.gather(ids) if part is not None] for store in stores)
    for one, other in zip(shards, flat, strict=True):
        assert one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    got = dequantize(stores[1].table, *stores[1].gather(ids), torch.float32)
    torch.testing.assert_close(got, written.values[ids].float(), rtol=1e-6, atol=0)
    assert str(stores[0].table) == str(stores[1].table)
    verify(tmp_path / "flat")


def test_no_row_crosses_a_page():
    """Of the published geometry and 95.4 GiB: also that offsets beyond 4 GiB are right."""
    published = FlatTable(LAYER, 320_001_536, 160, Kind.PLAIN, Part(torch.bfloat16, 160), None, 1.0, {})
    location = FlatLocation("x", published)
    ids = np.concatenate((np.arange(1000), np.random.default_rng(0).integers(0, published.count, 1000), [320_001_535]))
    _, offsets = location.place(ids)
    assert (offsets // PAGE == (offsets + 319) // PAGE).all()
    assert offsets[-1] == published.data_offset + 320_001_535 // 12 * 4096 + 320_001_535 % 12 * 320
    assert 1.06 < published.size / (published.count * 320) < 1.07


def test_a_sparse_file_of_full_size(tmp_path):
    """The last row of a table of 95.4 GiB, in a file that takes no space: 64-bit offsets all the way to the kernel."""
    table = FlatTable(LAYER, 320_001_536, 160, Kind.PLAIN, Part(torch.bfloat16, 160), None, 1.0, {}, checksum=0)
    path = tmp_path / "sparse"
    rows = {0: 1, 13_000_000: 2, 200_000_000: 3, 320_001_535: 4}
    with open(path, "wb") as file:
        file.truncate(table.size)
        file.write(table.header())
        for row, value in rows.items():
            _, offset = FlatLocation(path, table).place(np.array([row]))
            file.seek(int(offset[0]))
            file.write(bytes([value]) * 320)
    store = open_flat(path, str(tmp_path), LAYER, TableShape(320_001_536, 160, 128))
    got = store.read(np.array(sorted(rows)))
    assert got[:, 0].tolist() == [1, 2, 3, 4] and (got == got[:, :1]).all()
    assert path.stat().st_blocks * 512 < 1 << 20
    store.close()


def test_written_twice_is_written_once(made):
    before = made.out.stat()
    assert flatten(made.written.table(), LAYER, 32, made.out).checksum == made.table.checksum
    assert made.out.stat().st_mtime_ns == before.st_mtime_ns
    assert sorted(os.listdir(made.out.parent)) == ["table.flat"]


@pytest.mark.parametrize("segments", range(8))
def test_a_stopped_run_goes_on(made, monkeypatch, segments):
    """Killed in the middle of a segment; the next run reads only what is missing."""
    out = made.out.with_name("again")
    read, done = writer.segment_pages, []

    def stop(*arguments):
        if len(done) == segments:
            raise KeyboardInterrupt
        done.append(arguments[-1])
        return read(*arguments)

    monkeypatch.setattr(writer, "segment_pages", stop)
    with pytest.raises(KeyboardInterrupt):
        flatten(made.written.table(), LAYER, 32, out)
    assert not out.exists()
    with pytest.raises((errors.UnfinishedFlatTable, errors.UnreadableFile)):
        open_flat(out, str(made.written.folder), LAYER, made.written.shape)
    monkeypatch.setattr(writer, "segment_pages", lambda *a: done.append(a[-1]) or read(*a))
    told = []
    flatten(made.written.table(), LAYER, 32, out, lambda at, total: told.append((at, total)))
    assert done == list(range(8))
    assert told[0] == (segments * 2 * PAGE, made.table.size) and told[-1][0] == told[-1][1]
    assert out.read_bytes() == made.out.read_bytes()
    assert sorted(os.listdir(out.parent)) == ["again", "table.flat"]


def test_a_segment_that_did_not_reach_the_disk_is_written_again(made, monkeypatch):
    out = made.out.with_name("again")
    read = writer.segment_pages
    monkeypatch.setattr(writer, "segment_pages", lambda *a: pytest.exit("x") if a[-1] == 5 else read(*a))
    with pytest.raises(pytest.exit.Exception):
        flatten(made.written.table(), LAYER, 32, out)
    with open(writer.partial(out), "r+b") as file:
        file.seek(made.table.data_offset + 4 * 2 * PAGE)
        file.write(b"power cut")
    with open(out.with_name("again.progress"), "a") as file:
        file.write("0123")  # a line that was cut
    done = []
    monkeypatch.setattr(writer, "segment_pages", lambda *a: done.append(a[-1]) or read(*a))
    flatten(made.written.table(), LAYER, 32, out)
    assert done == [4, 5, 6, 7] and out.read_bytes() == made.out.read_bytes()


def test_the_progress_of_another_table(made, write_table, monkeypatch):
    out = made.out.with_name("again")
    monkeypatch.setattr(writer, "segment_pages", lambda *a: pytest.exit("x"))
    with pytest.raises(pytest.exit.Exception):
        flatten(made.written.table(), LAYER, 32, out)
    with open(made.written.files[0], "ab") as file:
        file.write(b"grown")
    writer.partial(out).touch()
    with pytest.raises(errors.WrongFlatTable, match="again.progress"):
        flatten(made.written.table(), LAYER, 32, out)


def test_a_full_disk_is_refused_before_it_is_written_to(made, monkeypatch):
    out = made.out.with_name("again")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=made.table.size - 1))
    with pytest.raises(errors.NoRoomForFlatTable, match="GiB free in"):
        flatten(made.written.table(), LAYER, 32, out)
    assert not writer.partial(out).exists()


def test_a_stopped_run_needs_room_for_the_rest_only(made, monkeypatch):
    """Of 109 GB most are written; the disk has no room for as much again."""
    out = made.out.with_name("again")
    read = writer.segment_pages
    monkeypatch.setattr(writer, "segment_pages", lambda *a: pytest.exit("x") if a[-1] == 5 else read(*a))
    with pytest.raises(pytest.exit.Exception):
        flatten(made.written.table(), LAYER, 32, out)
    monkeypatch.setattr(writer, "segment_pages", read)
    rest = made.table.size - writer.partial(out).stat().st_blocks * 512
    assert 0 < rest < made.table.size
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=rest - 1))
    with pytest.raises(errors.NoRoomForFlatTable):
        flatten(made.written.table(), LAYER, 32, out)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=rest))
    flatten(made.written.table(), LAYER, 32, out)
    assert out.read_bytes() == made.out.read_bytes()


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, errors.NoRoomForFlatTable), (errno.EROFS, errors.FlatTableNotWritten)]
)
def test_a_disk_that_becomes_full(made, monkeypatch, number, kind):
    def fail(_):
        raise OSError(number, os.strerror(number))

    out = made.out.with_name("again")
    monkeypatch.setattr(writer, "_settle", fail)
    with pytest.raises(kind, match="is gone on with"):
        flatten(made.written.table(), LAYER, 32, out)
    assert not out.exists()


def test_a_file_of_another_table_is_not_overwritten(made, write_table):
    content = made.out.read_bytes()
    with pytest.raises(errors.WrongFlatTable, match="table.flat"):
        flatten(write_table(rows=99, dim=32).table(), LAYER, 32, made.out)
    assert made.out.read_bytes() == content


@pytest.mark.parametrize(
    ("damage", "error", "sentence"),
    [
        (lambda b: b[:-1], errors.TruncatedFile, "table.flat: expected .* bytes, found"),
        (lambda b: b + b"x", errors.TruncatedFile, "table.flat"),
        (lambda b: b[: PAGE * 3], errors.TruncatedFile, "table.flat"),
        (lambda b: b"", errors.BadFlatHeader, "found b''"),
        (lambda b: b"SAFETENS" + b[8:], errors.BadFlatHeader, "PLEFLAT1"),
        (lambda b: b[:40] + b"?" + b[41:], errors.BadFlatHeader, "checksum"),
        (lambda b: b[:8] + b"\xff\xff\xff\xff" + b[12:], errors.BadFlatHeader, "checksum"),
    ],
)
def test_damaged_files_are_refused_by_name(made, damage, error, sentence):
    made.out.write_bytes(damage(made.out.read_bytes()))
    with pytest.raises(error, match=sentence):
        opened(made)


def test_a_header_of_a_later_version(made):
    import json
    import zlib

    text = json.dumps({"layer": LAYER, "rows": 3}).encode()
    made.out.write_bytes(layout.MAGIC + len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little") + text)
    with pytest.raises(errors.BadFlatHeader, match="KeyError"):
        opened(made)


def test_missing_file(made):
    made.out.unlink()
    with pytest.raises(errors.UnreadableFile, match="table.flat: expected a file written by vllm ampere flatten-ple"):
        opened(made)


@pytest.mark.parametrize(
    ("changes", "sentence"), [({"rows": 1001}, "rows 1001, found 1000"), ({"dim": 16}, "values per row 16")]
)
def test_another_geometry(made, changes, sentence):
    with pytest.raises(errors.WrongFlatTable, match=sentence):
        opened(made, **changes)


def test_another_layer(made):
    with pytest.raises(errors.WrongFlatTable, match="layer layers.5"):
        open_flat(made.out, str(made.written.folder), LAYER.replace("layers.1", "layers.5"), made.written.shape)


def test_another_checkpoint(made, write_table):
    """The same geometry and dtype, other values: replaced by what another model's table is."""
    for path in made.written.files:
        content = bytearray(path.read_bytes())
        content[-100:] = bytes(100)
        path.write_bytes(content)
    with pytest.raises(errors.FlatTableOfOther, match=r"table.flat: expected row \d+ as .* has it"):
        opened(made)


def test_another_format(made, write_table):
    write_table(rows=ROWS, dim=32, dtype=torch.float16)
    with pytest.raises(errors.FlatTableOfOther, match="float16 rows"):
        opened(made)


def test_the_shards_may_be_gone(made):
    ids = torch.arange(ROWS)
    wanted = TableReader(made.written.table()).gather(ids)[0]
    for path in (*made.written.files, made.written.folder / "model.safetensors.index.json"):
        path.unlink()
    assert torch.equal(opened(made).gather(ids)[0], wanted)


@pytest.mark.parametrize("at", [4096 + 5, 4096 + 9 * PAGE, -2])
def test_verify_finds_one_wrong_byte(made, at):
    content = bytearray(made.out.read_bytes())
    content[at] ^= 1
    made.out.write_bytes(content)
    assert read_flat_header(made.out) == made.table  # serving does not look at every byte
    with pytest.raises(errors.DamagedFlatTable, match="CRC"):
        verify(made.out)


def test_cut_while_serving(made):
    store = opened(made)
    os.truncate(made.out, made.table.data_offset + PAGE + 10)
    store.read(np.array([0, 63]))
    with pytest.raises(errors.RowReadFailed, match=r"64 bytes at offset \d+, found 10 bytes before the end"):
        store.read(np.array([64]))


def test_replaced_while_serving(made):
    """A new file under the name is not this server's: it keeps the one it has opened."""
    store = opened(made)
    wanted = store.read(np.arange(ROWS))
    made.out.unlink()
    made.out.write_bytes(b"something else")
    assert torch.equal(store.read(np.arange(ROWS)), wanted)


def test_rows_longer_than_a_page(write_table, tmp_path):
    with pytest.raises(errors.UnknownRowFormat, match="at most 4096 bytes"):
        flatten(write_table(dim=2050).table(), LAYER, 2050, tmp_path / "flat")
