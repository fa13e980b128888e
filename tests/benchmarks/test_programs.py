"""Every program under benchmarks/ starts: the ones for GPUs are run here by nobody else."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import benchmarks

#: What has to be imported before anything else has imported Triton (its own tests start a process).
ALONE = {"benchmarks.qsa_kernels.compiled"}
MODULES = sorted(
    found.name for found in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.") if found.name not in ALONE
)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_imports(name):
    assert importlib.import_module(name)
