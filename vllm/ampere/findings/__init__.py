# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a checkpoint.

Every way of being wrong is a class; `findings` returns one of its instances for each place, and never raises.
Checks are cheap enough for every start of a server: they look at headers that `read` has parsed already.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm.ampere.checkpoint import Checkpoint, errors
from vllm.ampere.checkpoint.read import uncollected
from vllm.ampere.finding import REFUSE, WARN, Finding
from vllm.ampere.findings import attention, config, files, ngram_table, schemes, tensors

#: in the order in which they are reported: a cut-off file explains most of what comes after it
CHECKS = (files.check, config.check, tensors.check, ngram_table.check, schemes.check, attention.check)

__all__ = ["CHECKS", "REFUSE", "WARN", "Finding", "catalogue", "findings", "refuse"]


def findings(checkpoint: Checkpoint) -> list[Finding]:
    """Everything that is wrong; refusals first, within that in the order of CHECKS."""
    with uncollected():
        found = [finding for check in CHECKS for finding in check(checkpoint)]
    return sorted(found, key=lambda finding: finding.severity != REFUSE)


def refuse(found: Iterable[Finding]) -> None:
    """Raise the first refusal of a list of findings, the other refusals' messages added to it; else return."""
    refusals = [finding for finding in found if finding.severity == REFUSE]
    if refusals:
        for other in refusals[1:]:
            refusals[0].add_note(str(other))
        raise refusals[0]


def catalogue() -> list[type[Finding]]:
    """Every class of finding, in the order of the modules and, within one, of the text."""
    modules = (errors, files, config, tensors, ngram_table, schemes, attention)
    return [
        item
        for module in modules
        for item in vars(module).values()
        if isinstance(item, type) and issubclass(item, Finding) and item.__module__ == module.__name__
    ]
