"""What a cold gather reads and takes, with and without telling the kernel.

    python tests/ple_store/cold_reads.py FOLDER [--tokens 512] [--rows 657408]

Writes a table of ``rows`` rows of 160 bf16 values into FOLDER, which has to be on a real disk, and
drops it from the page cache before each run.  The figures in ``ple_store/gather.py`` are from here.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from vllm.models.qwen4_exp.ple_store.formats import locate_table
from vllm.models.qwen4_exp.ple_store.gather import TableFiles
from vllm.models.qwen4_exp.ple_store.locate import TableLocation, TableShape

LAYER = "layers.1.ple.ple_embedding.ngram_embedding"
HEADS = 16
ADVICES = {
    "both advices": {os.POSIX_FADV_RANDOM, os.POSIX_FADV_WILLNEED},
    "random only": {os.POSIX_FADV_RANDOM},
    "none": set(),
}


def bytes_from_disk() -> int:
    """What this process has caused to be read so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def measure(location: TableLocation, advices: set[int], tokens: int, seed: int) -> tuple[float, float]:
    """KiB per token and milliseconds of one cold gather."""
    advise = os.posix_fadvise
    for path in {shard.path for shard in location.shards}:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            advise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, location.rows, (tokens, HEADS), generator=generator)
    os.posix_fadvise = lambda fd, at, size, what: advise(fd, at, size, what) if what in advices else None
    try:
        with TableFiles(location) as table:
            before, start = bytes_from_disk(), time.perf_counter()
            table.gather(ids)
            seconds = time.perf_counter() - start
            return (bytes_from_disk() - before) / tokens / 1024, seconds * 1e3
    finally:
        os.posix_fadvise = advise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rows", type=int, default=657408)
    parser.add_argument("--runs", type=int, default=4)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    file = args.folder / "table.safetensors"
    save_file({f"{LAYER}.weight": torch.zeros(args.rows, 160, dtype=torch.bfloat16)}, file)
    location = locate_table(args.folder, LAYER, TableShape(args.rows, 160, 1)).rows
    for name, advices in ADVICES.items():
        for run in range(args.runs):
            kib, milliseconds = measure(location, advices, args.tokens, run)
            print(f"{name:12}  {kib:7.1f} KiB per token  {milliseconds:8.1f} ms")


if __name__ == "__main__":
    main()
