"""A process that is a whole world of one, which vLLM's linear layers ask about."""

import pytest
import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    store = tmp_path_factory.mktemp("world") / "store"
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


@pytest.fixture
def bf16():
    """Layers take their dtype from torch's default; every test starts from the same numbers."""
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(default)
