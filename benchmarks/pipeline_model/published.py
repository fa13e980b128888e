"""Rates that two machines with RTX 3090s were published with, and the model's parameters from two of them.

Only the two single-user rates and one prefill time are used to set parameters.  Everything else is predicted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import model, results, workloads
from .configs import Serving
from .cost import Roofline, Row
from .pipeline import Overheads

BANDWIDTH_GBS = 936.0
CONTEXT = 250_000
#: GB/s over PCIe 4.0 x16, as the three-card machine's author counts: 25 GiB/s
PCIE_GBS = 25 * 2**30 / 1e9


@dataclass(frozen=True)
class Machine:
    """A published machine: cards with a stage each.

    Attributes:
        single: tokens/s of one user, which parameters are set from.
        rates: users -> lowest and highest published tokens/s for each of them.
        host_rows_gbs: rate at which K/V rows come from host memory, where they lie there.
    """

    name: str
    serving: Serving
    weights: model.Checkpoint
    single: float
    rates: dict[int, tuple[float, float]]
    host_rows_gbs: float | None = None


SIX = Machine(
    "six RTX 3090",
    Serving(stages=6, max_num_seqs=7, max_num_batched_tokens=2048, pool_tokens=1_920_000),
    model.GPTQ_BF16,
    57.0,
    {3: (44.0, 44.0), 5: (38.0, 38.0), 7: (29.0, 29.0)},
)
THREE = Machine(
    "three RTX 3090",
    Serving(stages=3, max_num_seqs=4, max_num_batched_tokens=512, pool_tokens=1_215_172),
    model.INT4_INT8,
    80.0,
    {4: (146.0 / 4, 156.0 / 4)},
    PCIE_GBS,
)
MACHINES = (SIX, THREE)
#: tokens, and seconds until the first token, of a prompt alone on the six cards
SIX_PREFILL = (230_000, 42.0)


@dataclass(frozen=True)
class Calibration:
    """Parameters common to both machines, and what they were set with.

    Attributes:
        own_bytes: each machine with its own checkpoint's bytes, and K/V rows over PCIe where they lie in host memory;
            otherwise both with the counted checkpoint and K/V on the card.
    """

    own_bytes: bool
    efficiency: float
    fixed_ms: float
    tflops: float

    def cost(self, machine: Machine) -> Roofline:
        return Roofline(
            (48 // machine.serving.stages,) * machine.serving.stages,
            machine.weights if self.own_bytes else model.INT4_INT8,
            BANDWIDTH_GBS,
            self.efficiency,
            self.tflops,
            self.fixed_ms,
            machine.host_rows_gbs if self.own_bytes else None,
        )

    def single(self, machine: Machine) -> float:
        """Tokens/s of one user: its token visits the stages one after the other."""
        cost = self.cost(machine)
        return 1e3 / sum(cost.gpu_ms(stage, [Row(1, CONTEXT)]) for stage in range(cost.stages))


def calibrate(own_bytes: bool) -> Calibration:
    """Efficiency and fixed time with the smallest worst error on both single-user rates, then the prefill rate."""

    def worst(found: Calibration) -> float:
        return max(abs(found.single(machine) / machine.single - 1) for machine in MACHINES)

    grid = (
        Calibration(own_bytes, efficiency / 200, fixed / 50, float("inf"))
        for efficiency in range(60, 201)
        for fixed in range(0, 151)
    )
    return _with_prefill(min(grid, key=worst))


def _with_prefill(found: Calibration) -> Calibration:
    slow, fast = 1.0, 100.0
    for _ in range(16):
        middle = (slow * fast) ** 0.5
        cost = replace(found, tflops=middle).cost(SIX)
        trace = workloads.prompts(SIX.serving, cost, Overheads(), [SIX_PREFILL[0]], [0.0])
        late = results.first_token_s(trace.served["user-0"]) > SIX_PREFILL[1]
        slow, fast = (middle, fast) if late else (slow, middle)
    return replace(found, tflops=fast)
