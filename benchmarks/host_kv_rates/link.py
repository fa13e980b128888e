"""The host link: what it carries, by copy engine and by our kernel, and what passed over it meanwhile."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from statistics import mean

import torch

ROW = 8192


def bandwidth(size: int = 1 << 29) -> list[dict]:
    """GB/s from pinned memory to the device by copy engine, and by the kernel that copies listed rows."""
    from vllm.models.qwen4_exp.qsa.host_kv.copy_rows import copy_rows
    from vllm.models.qwen4_exp.qsa.host_kv.memory import HostMemory

    device = torch.device("cuda", torch.cuda.current_device())
    host = HostMemory(size, device, "the link's measurement")
    target = torch.empty(size, dtype=torch.uint8, device=device)
    rows = host.view.view(-1, ROW)
    count = torch.tensor(len(rows), dtype=torch.int32, device=device)
    listed = torch.randperm(len(rows), device=device).int()
    ways = {
        "copy engine": lambda: target.copy_(host.cpu, non_blocking=True),
        "rows of 8 KiB in random order": lambda: copy_rows(rows, listed, count, 0, target.view(-1, ROW)),
    }
    samples = []
    for way, copy in ways.items():
        copy()
        times = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            copy()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        samples.append({"kind": "link", "way": way, "gb_per_s": [round(size / ms / 1e6, 2) for ms in times]})
    # The views above die with this frame; the memory is not touched after it.
    host.release()
    return samples


@contextmanager
def traffic(found: dict):
    """Fill `found` with GB/s received over PCIe while the block runs, by NVML's counter; nothing without a GPU."""
    if not torch.cuda.is_available():
        yield
        return
    import vllm.third_party.pynvml as nvml
    from vllm.platforms import current_platform

    nvml.nvmlInit()
    # NVML counts all GPUs of the host, CUDA those that this process may see.
    handle = nvml.nvmlDeviceGetHandleByIndex(
        current_platform.visible_device_id_to_physical_device_id(torch.cuda.current_device())
    )
    seen: list[float] = []
    stop = threading.Event()

    def sample() -> None:
        while not stop.is_set():
            # KiB/s over the last 20 ms.
            seen.append(nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES) * 1024 / 1e9)
            time.sleep(0.02)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        found["pcie_rx_gb_per_s"] = round(mean(seen), 3) if seen else None
