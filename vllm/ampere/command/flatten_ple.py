# SPDX-License-Identifier: Apache-2.0
"""Write a checkpoint's n-gram table into one file of its own, or verify such a file.

The file is for `--engram-config '{"host_file_path": FILE}'`: rows do not cross pages in it, and it can lie on a faster
disk than the checkpoint. It takes the space of the table and at most a fifteenth more, 109 GB for the published one.
A run that was stopped goes on where it stopped when it is started again. Exit status: 0 when the file is complete, 1
when it could not be written or is damaged, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from vllm.ampere.finding import Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a directory, or a hub id that is downloaded already")
    parser.add_argument("file", metavar="FILE", type=Path, help="the file to write")
    parser.add_argument(
        "--layer",
        type=int,
        metavar="N",
        help="which layer's table, one-based as in ple_layer_ids (needed where there are several)",
    )
    parser.add_argument(
        "--verify", action="store_true", help="compare every byte of FILE with its checksums, once it is complete"
    )


def run(args: argparse.Namespace) -> int:
    """Returns the exit status; progress goes to stderr, the result to stdout."""
    # Not above: these import torch, and `vllm ampere --help` should not wait for it.
    from vllm.models.qwen4_exp.ple_store.errors import PLEStoreError

    try:
        return _run(args)
    except (Finding, PLEStoreError) as error:
        print(f"vllm ampere flatten-ple: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    from vllm.ampere.checkpoint import read
    from vllm.models.qwen4_exp.ple_store.flat.verify import verify
    from vllm.models.qwen4_exp.ple_store.flat.writer import flatten
    from vllm.models.qwen4_exp.ple_store.formats import locate_table
    from vllm.models.qwen4_exp.ple_store.locate import tables_of

    checkpoint = read(args.checkpoint)
    text = checkpoint.text
    layers = list(text.ple_layer_ids)
    if args.layer is None and len(layers) != 1:
        print(f"vllm ampere flatten-ple: --layer must be one of {layers}", file=sys.stderr)
        return 2
    number = layers[0] if args.layer is None else args.layer
    if number not in layers:
        print(f"vllm ampere flatten-ple: --layer {number}: the model has {layers}", file=sys.stderr)
        return 2
    _, name, shape = list(tables_of(text))[layers.index(number)]
    table = locate_table(checkpoint.path, name, shape)
    with _Bar("written") as bar:
        made = flatten(table, name, shape.dim, args.file, bar)
    if args.verify:
        with _Bar("verified") as bar:
            verify(args.file, bar)
    print(
        f"{args.file}: {made.count} rows of {made.dim} values, {made}, {made.size / 1e9:.2f} GB"
        f"{', verified' if args.verify else ''}. "
        f"""Serve it with --engram-config '{{"host_file_path": "{args.file}"}}'"""
    )
    return 0


class _Bar:
    """A progress bar on a terminal, nothing elsewhere."""

    def __init__(self, what: str) -> None:
        self._what, self._bar = what, None

    def __enter__(self) -> _Bar:
        return self

    def __call__(self, done: int, total: int) -> None:
        from tqdm import tqdm

        if self._bar is None:
            # What an earlier run has done is no speed of this one.
            self._bar = tqdm(
                total=total, initial=done, desc=self._what, unit="B", unit_scale=True, disable=None, file=sys.stderr
            )
        self._bar.update(done - self._bar.n)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
