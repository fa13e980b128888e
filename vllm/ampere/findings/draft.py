# SPDX-License-Identifier: Apache-2.0
"""What speculative decoding with the checkpoint's own draft module needs; asked only where that is configured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vllm.ampere.checkpoint import Checkpoint
from vllm.ampere.checkpoint.geometry import parts
from vllm.ampere.finding import Finding


class DraftModuleMissing(Finding):
    what = "The draft module that --speculative-config asks for is not in the files"
    remedy = "Serve without --speculative-config, or from a checkpoint that kept its mtp.* tensors."


def check(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Whether the files hold all of the draft module: what is missing would draft from memory that nothing filled."""
    text = checkpoint.text
    # The engine builds one layer where the config leaves the number out.
    wanted = text if text.mtp_layers else replace(text, mtp_layers=1)
    names = [name for name in parts(wanted) if name.startswith("mtp.")]
    # All experts of a layer may be one tensor; of those the loader keeps account.
    lacking = [name for name in names if name not in checkpoint.modules and ".experts." not in name]
    if lacking and checkpoint.complete:
        there = sum(name.startswith("mtp.") for name in checkpoint.modules)
        found = f"{there} modules of mtp.*, without {lacking[0]}" if there else "no tensor of mtp.*"
        yield DraftModuleMissing("mtp.*", f"{wanted.mtp_layers} layer(s) of a draft module", found)
