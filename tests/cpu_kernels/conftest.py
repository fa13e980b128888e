"""Run a Triton kernel in the interpreter and its numpy twin, and compare what both wrote.

A test gives the kernel's name, its grid and a function that builds the arguments from a
random generator.  It is called once for each of the two, so that each has memory of its
own.  Outputs are filled beforehand: what must not be written keeps the fill.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import vllm  # noqa: F401  first: it switches the interpreter on, which Triton's first import asks for

FILL = -7777


@dataclass
class Case:
    """Arguments of one launch: ``args`` by position, ``constants`` by name.

    ``watched`` are tensors that are not arguments but lie behind addresses among them.
    """

    args: list[Any]
    constants: dict[str, Any]
    watched: list[torch.Tensor] = field(default_factory=list)
    addresses: list[torch.Tensor] = field(default_factory=list)

    def tensors(self) -> list[torch.Tensor]:
        held = [a for a in self.args if isinstance(a, torch.Tensor)]
        # Addresses differ between the two copies, and are not outputs.
        held = [a for a in held if not any(a is b for b in self.addresses)]
        return held + self.watched

    def snapshot(self) -> list[bytes]:
        """Every byte, so that NaN equals NaN and -0.0 differs from 0.0."""
        return [t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in self.tensors()]


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> None:
    """Interpreted kernels, proven on a known product: bfloat16 is wrong in Triton's own."""
    from triton import knobs

    import vllm.v1.worker.cpu.shm  # noqa: F401  before the runner's modules
    from vllm.triton_interpreter import repair

    if not knobs.runtime.interpret:
        pytest.skip("kernels are compiled here, not interpreted")
    repair()


@pytest.fixture
def compare() -> Callable[..., Case]:
    """``compare(kernel, grid, build, writes=True)``: equal bytes, or the index of the tensor."""
    from vllm.v1.worker.cpu.kernels.registry import TWINS, TWINS_WITH_GRID

    def run(
        name: str,
        grid: tuple[int, ...],
        build: Callable[[np.random.Generator], Case],
        writes: bool = True,
        seed: int = 0,
    ) -> Case:
        names = [n for n in TWINS | TWINS_WITH_GRID if n.endswith("." + name)]
        assert len(names) == 1, names
        module, attribute = names[0].rsplit(".", 1)
        kernel = getattr(importlib.import_module(module), attribute)
        interpreted, twin = build(np.random.default_rng(seed)), build(np.random.default_rng(seed))
        before = interpreted.snapshot()
        assert before == twin.snapshot(), "build() must depend on its generator alone"

        kernel[grid](*interpreted.args, **interpreted.constants)
        expected = interpreted.snapshot()
        # Else a twin that does nothing would pass.
        assert (expected != before) == writes

        if names[0] in TWINS:
            TWINS[names[0]](*twin.args, **twin.constants)
        else:
            TWINS_WITH_GRID[names[0]](grid, *twin.args, **twin.constants)
        for index, (want, got) in enumerate(zip(expected, twin.snapshot(), strict=True)):
            assert want == got, (
                f"tensor {index}:\n{interpreted.tensors()[index]}\nby the kernel, but\n{twin.tensors()[index]}"
            )
        return twin

    return run


@pytest.fixture
def make_case() -> type[Case]:
    return Case


@pytest.fixture
def filled() -> Callable[..., torch.Tensor]:
    """``filled(3, 4, dtype=...)``: the fill, or NaN for floats."""

    def make(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, float("nan") if dtype.is_floating_point else FILL, dtype=dtype)

    return make


@pytest.fixture
def addresses() -> Callable[..., torch.Tensor]:
    """Addresses of tensors; ``kind`` as the kernel wants them."""

    def make(tensors: list[torch.Tensor], kind: torch.dtype = torch.uint64) -> torch.Tensor:
        return torch.tensor([t.data_ptr() for t in tensors], dtype=kind)

    return make
