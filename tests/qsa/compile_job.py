"""Compiles kernels for cards that are not there; a process of its own, because the tests' interprets Triton.

Reads a JSON list of requests on standard input and writes one of results: shared memory in bytes, registers and
spilled bytes as ptxas reports them, instructions that multiply matrices, and how many neighbours of their operands'
sums a thread holds.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"

from vllm import triton_interpreter  # noqa: E402

# No driver is needed to compile; vllm.triton_utils replaces triton.jit where it finds none.
triton_interpreter.cpu_drivers = lambda backends, active: (["none"], True)


def compile_one(module: str, kernel: str, types: dict, constants: dict, arch: int, warps: int, stages: int) -> dict:
    """Compile ``module.kernel`` for ``sm_<arch>``; pointers and strides count as multiples of 16."""
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(module), kernel)
    names = list(function.arg_names)
    # Pointers, and what upper case says is a multiple of 16.
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types.get(name, "-")[0] in "*I"}
    signature = {n: types[n].lower() if n in types else "constexpr" for n in names}
    source = ASTSource(function, signature, {(names.index(n),): v for n, v in constants.items()}, aligned)
    compiled = triton.compile(source, GPUTarget("cuda", arch, 32), {"num_warps": warps, "num_stages": stages})
    instruction = sorted(set(re.findall(r"(?:wgmma|mma)\.\S+", compiled.asm["ptx"])))
    packed = sorted(set(re.findall(r"kWidth = (\d+)", compiled.asm["ttgir"])))
    found = {"shared": compiled.metadata.shared, "instructions": instruction, "packed": packed}
    return {**found, **assembled(compiled.asm["ptx"], arch)}


def assembled(ptx: str, arch: int) -> dict:
    """Registers and spills of every function in ``ptx``, the worst of them."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "kernel.ptx")
        text.write_text(ptx)
        name = sm_arch_from_capability(arch)
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={name}", text, "-o", Path(folder, "kernel.cubin")]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    report = done.stderr
    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", report))),
        "spills": max(map(int, re.findall(r"(\d+) bytes spill stores", report))),
    }


if __name__ == "__main__":
    json.dump([compile_one(**request) for request in json.load(sys.stdin)], sys.stdout)
