"""Rows in host memory: their size, how a layer binds them, and that generic code treats them as what they are."""

from __future__ import annotations

import gc
import itertools
import resource
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from vllm.models.qwen4_exp.qsa.formats import BF16, INT8, views
from vllm.models.qwen4_exp.qsa.host_kv import memory
from vllm.models.qwen4_exp.qsa.host_kv.copies import copy_host_blocks
from vllm.models.qwen4_exp.qsa.host_kv.errors import HostMemoryRefused
from vllm.models.qwen4_exp.qsa.host_kv.layer import HostKVLayer
from vllm.models.qwen4_exp.qsa.host_kv.memory import HostMemory
from vllm.models.qwen4_exp.qsa.host_kv.spec import HostRows
from vllm.utils import free_memory
from vllm.v1.worker.host_rows import pages_to_zero
from vllm.v1.worker.utils import KVBlockZeroer

from .planning import rows

CPU = torch.device("cpu")


class Plain:
    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        self.kv_cache = kv_cache


class Layer(HostKVLayer, Plain):
    layer_name = "model.layers.3.self_attn.attn"
    impl = None
    kv_cache_dtype = "auto"
    indexer = SimpleNamespace(compress_ratio=4)


def bound(blocks: int, spec=None) -> Layer:
    layer = Layer()
    layer.host_rows = HostRows(spec or rows(), 1 << 20)
    layer.bind_kv_cache(torch.zeros(blocks, 1, 1, 8, dtype=torch.bfloat16))
    return layer


def test_a_layer_without_rows_here_binds_the_gpus_cache():
    layer = Layer()
    cache = torch.zeros(3, 2, 64, 16)
    layer.bind_kv_cache(cache)
    assert layer.kv_cache is cache
    assert pages_to_zero(layer) is cache


def test_a_layer_binds_rows_for_every_block_of_its_place():
    layer = bound(5)
    assert layer.kv_cache.shape == (5, 2, 64, 32) and layer.kv_cache.dtype == torch.bfloat16
    # To the byte, and with the heads of a token side by side: one run of memory for each row.
    assert layer.host_memory.cpu.nbytes == 5 * 64 * 2 * 32 * 2
    assert layer.kv_cache.transpose(1, 2).is_contiguous()
    layer.kv_cache[4, 1, 63, 31] = 7
    assert layer.host_memory.cpu.view(torch.bfloat16)[-1] == 7


def test_binding_again_frees_the_rows_before():
    """Profiling binds a small cache first."""
    layer = bound(2)
    first = layer.host_memory
    layer.bind_kv_cache(torch.zeros(3, 1, 1, 8, dtype=torch.bfloat16))
    assert first.cpu.numel() == 0
    assert layer.kv_cache.shape[0] == 3


def test_memory_goes_back_to_the_system():
    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()

    before = resident()
    some = HostMemory(64 << 20, CPU, "a layer")
    some.cpu.fill_(1)
    assert resident() - before > 60 << 20
    some.release()
    gc.collect()
    # Released without anyone asking for the object's end.
    assert resident() - before < 8 << 20


def test_all_of_it_is_taken_before_it_is_locked(monkeypatch, capsys):
    """Shown where it takes long, in parts that end where the memory does."""
    monkeypatch.setattr(memory, "_PART", 1000)
    some = torch.full((3500,), 7, dtype=torch.uint8)
    memory.fill(some, "layer 3")
    assert not some.any() and not capsys.readouterr().err
    monkeypatch.setattr(memory, "GIB", 3000)
    memory.fill(some, "layer 3")
    assert "layer 3" in (shown := capsys.readouterr().err) and "100%" in shown


@pytest.fixture
def driver(monkeypatch):
    """CUDA's part, in order; ``answer`` is what locking returns, ``pinned`` what torch says of the memory then."""
    asked = SimpleNamespace(log=[], answer=0, pinned=True)
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: asked.log.append(("lock", address, size, flags)) or asked.answer,
        cudaHostUnregister=lambda address: asked.log.append(("unlock", address)),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: asked.log.append(("wait",)))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: asked.pinned)
    monkeypatch.setattr("vllm.utils.torch_utils.get_accelerator_view_from_cpu_tensor", lambda tensor: tensor.view(-1))
    return asked


def test_memory_is_locked_whole_and_unlocked_once_nothing_uses_it(driver):
    some = HostMemory(3 * 4096 + 1, torch.device("cuda"), "layer 3")
    address = some.cpu.data_ptr()
    mapped = 2  # cudaHostRegisterMapped: for kernels to read
    assert driver.log == [("lock", address, 3 * 4096 + 1, mapped)] and some.view.data_ptr() == address
    some.release()
    assert driver.log[1:] == [("wait",), ("unlock", address)]
    some.release()
    assert len(driver.log) == 3


@pytest.mark.parametrize(("answer", "pinned"), [(2, True), (0, False)])
def test_memory_that_is_not_locked_is_refused(driver, answer, pinned):
    """Where torch does not see it as pinned either: a view of such memory would be one of a copy."""
    driver.answer, driver.pinned = answer, pinned
    with pytest.raises(HostMemoryRefused, match=rf"layer 3: CUDA does not lock it \({answer}\)"):
        HostMemory(4096, torch.device("cuda"), "layer 3")


def test_more_than_there_is_is_refused_with_the_figures(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 3 << 30)
    with pytest.raises(HostMemoryRefused) as caught:
        HostMemory(5 << 30, CPU, "layer 3")
    text = str(caught.value)
    assert "layer 3" in text and "5.00 GiB" in text and "3.00 GiB" in text and "ulimit -l" in text


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    limit, used, stat = (tmp_path / name for name in ("max", "current", "stat"))
    limit.write_text("1000000\n"), used.write_text("400000\n"), stat.write_text("anon 1\ninactive_file 100000\n")
    monkeypatch.setattr(free_memory, "_CGROUPS", [(limit, used, stat)])
    assert memory.available_bytes() == 700_000
    limit.write_text("max\n")
    assert memory.available_bytes() > 1_000_000


def test_new_blocks_are_not_zeroed_in_host_memory():
    layer = bound(4)
    layer.kv_cache.fill_(1)
    plain = Plain()
    plain.bind_kv_cache(torch.ones(4, 2, 64, 32, dtype=torch.bfloat16))
    zeroer = KVBlockZeroer(
        CPU,
        [SimpleNamespace(kv_cache_spec=rows(), kv_cache_group_id=0, layer_names=["a", "b"], kernel_block_stride=None)],
        [64],
        {"a": layer, "b": plain},
        4,
    )
    zeroer.zero_block_ids([2])
    assert layer.kv_cache.min() == 1
    assert plain.kv_cache[2].max() == 0 and plain.kv_cache[1].min() == 1


def step(pairs, new=(), resumed=()) -> SimpleNamespace:
    """A SchedulerOutput: pairs of blocks to copy, and what blocks requests got in each of two groups."""
    return SimpleNamespace(
        kv_cache_block_copies=pairs,
        scheduled_new_reqs=[SimpleNamespace(block_ids=blocks) for blocks in new],
        scheduled_cached_reqs=SimpleNamespace(new_block_ids=[None, *resumed]),
    )


@pytest.mark.parametrize("form", [BF16, INT8], ids=lambda form: form.name)
@pytest.mark.parametrize("how", ["new", "resumed"])
def test_rows_of_a_shared_block_are_copied_with_it(how, form):
    layer, other = bound(6, rows(form=form)), bound(6, rows(form=form))
    for number in range(6):
        layer.kv_cache[number] = number
        other.kv_cache[number] = 10 + number
    config = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(layer_names=["state"]), SimpleNamespace(layer_names=["a", "b", "a.keys"])]
    )
    context = {"a": layer, "b": other, "state": Plain(), "a.keys": Plain()}
    # Block 4 is of the states' group: its rows hold nothing, and copying them would cost as much as those of block 5.
    copy_host_blocks(context, config, step([(1, 4), (2, 5)], **{how: [([4], [3, 5])]}))
    assert [int(layer.kv_cache[n].unique()) for n in range(6)] == [0, 1, 2, 3, 4, 2]
    assert [int(other.kv_cache[n].unique()) for n in range(6)] == [10, 11, 12, 13, 14, 12]


@pytest.mark.parametrize(
    ("heads", "form", "row_bytes"), [(2, INT8, 1152), (1, INT8, 640), (2, BF16, 2048), (1, BF16, 1024)]
)
def test_rows_at_the_published_width_are_whole_lines(heads, form, row_bytes):
    """Keys and values begin where lines do: a row is read in as few as its bytes fill. bf16 needs no padding for that."""
    layer = bound(3, rows(block=32, heads=heads, width=256, form=form))
    assert layer.kv_cache.shape == (3, heads, 32, form.content(256)) and layer.kv_cache.dtype == form.dtype
    assert layer.host_rows.row_bytes == row_bytes
    assert layer.host_memory.cpu.nbytes == 3 * 32 * row_bytes
    stored = views(layer.kv_cache, form, 256)
    for part in stored[:2]:
        distances = {
            part[at].data_ptr() - part.data_ptr() for at in itertools.product(range(3), range(32), range(heads))
        }
        assert len(distances) == 3 * 32 * heads
        assert part.data_ptr() % 128 == 0 and all(distance % 128 == 0 for distance in distances)


def test_scales_of_a_row_are_in_one_line():
    """Of all heads, behind the numbers, and inside the row."""
    layer = bound(3, rows(block=32, heads=2, width=256, form=INT8))
    stored, base = views(layer.kv_cache, INT8, 256), layer.host_memory.cpu.data_ptr()
    for block, token in itertools.product(range(3), range(32)):
        row = base + (block * 32 + token) * 1152
        found = [scales[block, token, head].data_ptr() for head in range(2) for scales in stored[2:]]
        assert found == [row + 1024 + 4 * n for n in range(4)]
