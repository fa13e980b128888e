# SPDX-License-Identifier: Apache-2.0
"""The base of everything that can be wrong with a checkpoint.

A finding is an exception, so that the loader can raise what `vllm ampere check` prints. Each way of being wrong is
one subclass, with its sentence and its way out as class attributes: the page of all of them is made from those.
"""

from __future__ import annotations

REFUSE = "refuse"
WARN = "warn"


class Finding(ValueError):
    """Something wrong in one place.

    Attributes:
        severity: REFUSE where serving would fail or give wrong words, WARN where it would not
        what: the sentence, without the place
        remedy: what to do about it
        where: file, tensor or key
        expected, found: in words
    """

    severity = REFUSE
    what = ""
    remedy = ""

    def __init__(self, where: object, expected: object, found: object) -> None:
        # All arguments go to `args`: a worker's exception is pickled on its way to the engine.
        super().__init__(str(where), str(expected), str(found))
        self.where, self.expected, self.found = self.args

    def __str__(self) -> str:
        return f"{self.what}: {self.where}: expected {self.expected}, found {self.found}. {self.remedy}"

    @property
    def name(self) -> str:
        return type(self).__name__
