"""What must import, and what must not be needed, on a machine without a GPU."""

import subprocess
import sys

import pytest

from vllm.models.qwen4_exp import kernels


@pytest.mark.parametrize("name", sorted(kernels.SOURCES))
def test_the_cpu_gets_its_own_kernels(name):
    assert getattr(kernels, name).__module__.startswith("vllm.models.qwen4_exp.cpu")


@pytest.mark.parametrize("name", sorted(set(kernels.SOURCES) - {"gemma_rmsnorm"}))
def test_a_gpu_gets_upstreams_but_for_the_selection_and_rows(name, monkeypatch):
    monkeypatch.setattr(type(kernels.current_platform), "is_cpu", lambda self: False)
    module = getattr(kernels, name).__module__
    ours = {"qsa_select_paged_decode": "select", "qsa_select_paged_prefill": "select"}
    ours["qsa_store_cache_rows"] = "index_keys"
    if name in ours:
        assert module == f"vllm.models.qwen4_exp.qsa.{ours[name]}"
    else:
        assert ".ops." in module


def test_a_twin_has_its_kernels_signature(monkeypatch):
    import inspect

    monkeypatch.setattr(type(kernels.current_platform), "is_cpu", lambda self: True)
    twins = {name: getattr(kernels, name) for name in kernels.SOURCES}
    monkeypatch.setattr(type(kernels.current_platform), "is_cpu", lambda self: False)
    for name in sorted(set(kernels.SOURCES) - {"gemma_rmsnorm"}):
        theirs = list(inspect.signature(getattr(kernels, name)).parameters)
        assert list(inspect.signature(twins[name]).parameters) == theirs, name


def test_an_unknown_kernel_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'hc_melt'"):
        kernels.hc_melt  # noqa: B018


def test_text_serving_needs_no_torchvision():
    """The model, its config and the server's entry point, with the three media packages barred."""
    script = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['torchvision', 'torchaudio', 'torchcodec']))\n"
        "import vllm.models.qwen4_exp.nvidia.model, vllm.entrypoints.openai.api_server\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_images_are_sized_alike_without_torchvision():
    """The function taken from the PIL processor keeps the pixel bounds and the factor."""
    from vllm.model_executor.models.qwen3_vl import image_smart_resize

    height, width = image_smart_resize(1000, 3000, factor=32, min_pixels=4096, max_pixels=262144)
    assert height % 32 == 0 and width % 32 == 0
    assert 4096 <= height * width <= 262144
    assert abs(width / height - 3) < 0.35
