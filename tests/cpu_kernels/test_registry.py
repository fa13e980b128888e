"""Registration: in a process of its own, for it replaces kernels for good."""

import subprocess
import sys

import pytest

PROGRAM = """
import vllm.v1.worker.gpu.model_states.mamba_hybrid as importer  # holds a kernel by name
from vllm.platforms import current_platform
current_platform.register_triton_kernel_overrides()
current_platform.register_triton_kernel_overrides()
from vllm.triton_utils.dispatcher import KernelOverride
from vllm.v1.worker.cpu.kernels.registry import LAUNCHERS, TWINS, TWINS_WITH_GRID, _find
for name, twin in (TWINS | LAUNCHERS | TWINS_WITH_GRID).items():
    override = _find(name)[1]
    assert isinstance(override, KernelOverride) and override._impl is twin, name
assert isinstance(importer.preprocess_mamba_align_fused_kernel, KernelOverride)
from vllm.v1.sample.ops import topk_topp_sampler
import torch
kept = topk_topp_sampler.apply_top_k_top_p(torch.tensor([[1., 3., 2.]]), torch.tensor([2]), None)
assert kept.tolist() == [[float("-inf"), 3.0, 2.0]]
import vllm.v1.worker.gpu.block_table as tables
rows = tables.BlockTables([4, 4], 3, 8, [2, 2], torch.device("cpu"))
rows.append_block_ids(2, ([5, 6], [7]), overwrite=True)
rows.apply_staged_writes()
rows.input_block_tables[0].fill_(9)
gathered = rows.gather_block_tables(torch.tensor([2], dtype=torch.int32), 2)
assert [t.tolist() for t in gathered] == [[[5, 6], [0, 0]], [[7, 0], [0, 0]]], gathered
print("replaced")
"""


def test_platform_registers_every_twin():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip().endswith("replaced"), done.stderr[-2000:]
    assert "already registered" not in done.stdout + done.stderr


def test_twins_take_what_their_kernels_take():
    from vllm.v1.worker.cpu.kernels.registry import TWINS, TWINS_WITH_GRID, check_parameters

    for name, twin in (TWINS | TWINS_WITH_GRID).items():
        check_parameters(name, twin)


@pytest.mark.parametrize("wrong", [lambda a, b: None, lambda a, b, c, d: None, lambda a, b, *, BLOCK: None])
def test_changed_kernel_is_refused(wrong):
    from vllm.v1.worker.cpu.kernels.registry import check_parameters

    name = "vllm.v1.worker.gpu.model_states.mamba_hybrid._scatter_num_accepted_kernel"
    with pytest.raises(TypeError, match=r"cannot stand in for .*_scatter_num_accepted_kernel: .*Adapt"):
        check_parameters(name, wrong)
