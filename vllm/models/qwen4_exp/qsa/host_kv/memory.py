# SPDX-License-Identifier: Apache-2.0
"""Host memory of an exact size, page-locked where a GPU reads it.

``torch.empty(pin_memory=True)`` rounds every request up to a power of two: 4.03 GiB of rows
became 8 GiB, 96 GiB for twelve layers. So the memory is mapped here and registered with
CUDA afterwards, to the page.
"""

import mmap
import os
import resource
from concurrent.futures import ThreadPoolExecutor

import torch
from tqdm.auto import tqdm

from vllm.utils.free_memory import available_bytes

from .errors import HostMemoryRefused

GIB = 1 << 30
# cudaHostRegisterMapped: kernels read and write it. Implied on today's systems, and said for others.
_MAPPED = 2
# What one thread fills at a time, and how many do.
_PART = 256 << 20
_THREADS = 8


class HostMemory:
    """Anonymous memory of this process; freed with the object, so views must not outlive it.

    Attributes:
        cpu: ``[size]`` uint8 on the CPU.
        view: the same bytes as the device reads and writes them; ``cpu`` itself without one.

    """

    def __init__(self, size: int, device: torch.device, name: str) -> None:
        """Map ``size`` bytes and lock them for ``device``.

        Args:
            size: bytes.
            device: where kernels run that read it.
            name: of the layer, for messages.

        Raises:
            HostMemoryRefused: the system has not that much, or does not lock it.

        """
        self._registered = False
        free = available_bytes()
        if size > free:
            raise HostMemoryRefused(_refusal(size, free, name, "there is not enough free memory"))
        try:
            self._map: mmap.mmap | None = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise HostMemoryRefused(_refusal(size, free, name, str(error))) from error
        # Fewer and larger pages: rows are read at random over many GiB. Best effort, as the kernel may not offer them.
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass
        self.cpu = torch.frombuffer(self._map, dtype=torch.uint8)
        self.view = self.cpu if device.type == "cpu" else self._lock(device, name)

    def _lock(self, device: torch.device, name: str) -> torch.Tensor:
        from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

        fill(self.cpu, name)
        with torch.cuda.device(device):
            error = torch.cuda.cudart().cudaHostRegister(self.cpu.data_ptr(), self.cpu.nbytes, _MAPPED)
            # The check of is_pinned: the view of memory that is not pinned would be a pinned copy of it.
            if int(error) or not self.cpu.is_pinned():
                raise HostMemoryRefused(
                    _refusal(self.cpu.nbytes, available_bytes(), name, f"CUDA does not lock it ({error})")
                )
            self._registered = True
            return get_accelerator_view_from_cpu_tensor(self.cpu)

    def release(self) -> None:
        """Unlock and free. Nothing may use ``cpu`` or ``view`` afterwards, kernels in flight included."""
        if self._registered:
            torch.cuda.synchronize(self.view.device)
            torch.cuda.cudart().cudaHostUnregister(self.cpu.data_ptr())
            self._registered = False
        self.cpu = self.view = torch.empty(0, dtype=torch.uint8)
        # Its pages go with the last tensor over them.
        self._map = None


def fill(memory: torch.Tensor, name: str) -> None:
    """Give every page of ``memory`` (``[size]`` uint8) to this process, zeroed, by several threads.

    CUDA's registering would do it with one thread and show nothing. Eight fill 2 to 5 GB/s on the host of an H200.
    """
    parts = memory.split(_PART)
    with ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0)))) as pool, tqdm(
        total=memory.nbytes, desc=f"Host memory for K/V of {name}", unit="B", unit_scale=True, unit_divisor=1024,
        disable=memory.nbytes < GIB,
    ) as bar:  # fmt: skip
        for done in pool.map(torch.Tensor.zero_, parts):
            bar.update(done.nbytes)


def _refusal(size: int, free: int, name: str, why: str) -> str:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    locked = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / GIB:.2f} GiB"
    return (
        f"Host memory for the K/V of {name}: {why}.\n"
        f"  {'needed':<28}{size / GIB:>8.2f} GiB\n"
        f"  {'free host memory':<28}{free / GIB:>8.2f} GiB\n"
        f"  {'limit of locked memory':<28}{locked:>12}  (ulimit -l; NVIDIA's driver does not count it, WSL and others may)\n"
        "Lower --qsa-config kv_offload_max_gib or the KV cache on the GPUs (--kv-cache-memory); in a container, raise "
        "its memory limit, and `--ulimit memlock=-1` where locking is what fails."
    )
