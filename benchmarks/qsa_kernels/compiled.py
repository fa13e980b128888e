"""What the kernels compile to, for GPUs that are not there.

    python -m benchmarks.qsa_kernels.compiled --out docs/ampere-multigpu/benches/qsa-compiled.json
    python -m benchmarks.qsa_kernels.compiled --table --out FILE     only what tiles.py names
    python -m benchmarks.qsa_kernels.compiled --wide --table --out FILE     in pools with farther rows
    python -m benchmarks.qsa_kernels.compiled --host --table --out FILE     of rows as they lie in host memory

Triton makes code for any target; cuobjdump, which comes with it, reports registers and stack, and nvdisasm the
instructions of the loop over tiles.  Counted is the loop's one large block: instructions that a warp issues for
`block_n` columns, among them products (HMMA, of int8 IMMA), loads of matrices from shared memory (LDSM) and of single numbers (LDS),
and copies from memory (LDGSTS).  Sums of products that begin at zero are `begun`; each product of a sum waits for the one before.

Runs in a process of its own where Triton is interpreted otherwise: `TRITON_INTERPRET=0` is set before it is imported.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"
from vllm import triton_interpreter  # noqa: E402

# Compiling needs no driver; vllm.triton_utils hides Triton where there is none.
triton_interpreter.cpu_drivers = lambda backends, active: (["none"], True)

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from benchmarks import record  # noqa: E402
from benchmarks.qsa_kernels.geometry import published  # noqa: E402
from vllm.models.qwen4_exp.qsa import joining, kernels, places  # noqa: E402
from vllm.models.qwen4_exp.qsa.formats import BF16, FP8, INT8, KVFormat, views  # noqa: E402
from vllm.models.qwen4_exp.qsa.host_kv.lines import by_head, whole_lines  # noqa: E402
from vllm.models.qwen4_exp.qsa.launch import Layout, rows_of  # noqa: E402
from vllm.models.qwen4_exp.qsa.tiles import TILES, Tile  # noqa: E402

FORMATS = (BF16, FP8, INT8)
ARCHS = (80, 86, 89, 90)
#: Shared memory of a block, bytes; sm_86 and sm_89 have 99 KiB, and less is more blocks at a time.
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
#: tokens of a block where K/V are in VRAM, and where they are not (issue 7)
BLOCK_SIZE = 1568
#: Instructions: products, loads of matrices and numbers from shared memory, copies to it, loads from memory, conversions
#: of integers, bytes moved in registers, and what registers did not hold.
COUNTED = ("HMMA", "IMMA", "LDSM", "LDS", "LDGSTS", "LDG", "I2F", "I2FP", "PRMT", "LDL", "STL")
#: What runs, by the kernel that it is an instance of.
KERNELS = {"decode": kernels.split_kernel, "prefill": kernels.row_kernel, "section": kernels.row_kernel}
#: The same for every format, and warps.
ENDS = {"join": joining.join_kernel, "finish": kernels.finish_kernel, "place": places.place_kernel}
WARPS = {"join": 1, "finish": 2, "place": 4}
_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
_POINTERS = {
    "q": "*bf16", "gate": "*bf16", "out": "*bf16", "places": "*i32", "selected": "*i32", "table": "*i32", "token_to_req": "*i32",
    "accumulators": "*fp32", "maxima": "*fp32", "normalisers": "*fp32", "section": "*i32", "key_scales": "*fp32",
    "value_scales": "*fp32",
}  # fmt: skip
_FLOATS = ("score_scale", "value_scale")
#: Distances between rows and heads of activations: multiples of 16 at any width of the model.
_ROUND = ("q_row", "q_head", "gate_row", "gate_head", "out_row", "out_head")


def layout(form: KVFormat, dim: int, kv_heads: int, wide: bool, host: bool) -> Layout:
    """Of a cache with heads inside a token and blocks one after the other, as vLLM binds it.

    ``wide``: with places of farther rows; ``host``: rows padded as in host memory, and in the arena.
    """
    content = form.content(dim)
    size = kv_heads * form.token_bytes(dim)
    rows = torch.empty(2, BLOCK_SIZE, whole_lines(size) if host else size, dtype=torch.uint8)
    cache = by_head(rows, kv_heads, content, form.dtype)
    found = rows_of(*views(cache, form, dim)).layout
    return found._replace(within_bits=BLOCK_SIZE.bit_length() if wide else 0)


def arguments(
    kind: str, form: KVFormat, tile: Tile, stages: int, wide: bool, host: bool
) -> tuple[dict[str, str], dict[str, object]]:
    """Types of a kernel's arguments, and the values of those that are compiled in."""
    shape = published()
    absent = set() if form.scaled_rows else {"key_scales", "value_scales"}
    absent |= {
        "section": {"gate", "out"},
        "prefill": {"section", "accumulators", "maxima", "normalisers"},
        "place": {"section"},
    }.get(kind, set())
    sizes = {
        "FORM": form.name, "LAYOUT": layout(form, shape.dim, shape.kv_heads, wide, host), "WIDTH": shape.width,
        "GROUP": shape.group, "BLOCK_M": 16, "DIM": shape.dim, "BLOCK_N": tile.block_n, "SPLIT": tile.split,
        "STAGES": stages, "PLACES": 2208, "BLOCK": places.BLOCK, "SPLITS": -(-shape.width // tile.split),
        "LANES": 1 << (-(-shape.width // tile.split) - 1).bit_length(), "PART": joining.PART, "HEADS": shape.heads,
    }  # fmt: skip
    types: dict[str, str] = {}
    constants: dict[str, object] = {}
    for name in (KERNELS | ENDS)[kind].arg_names:
        if name.isupper():
            types[name], constants[name] = "constexpr", sizes[name]
        elif name in absent:
            types[name], constants[name] = "constexpr", None
        elif name in ("keys", "values"):
            types[name] = "*bf16" if form is BF16 else "*i32"
        else:
            types[name] = _POINTERS.get(name, "fp32" if name in _FLOATS else "i32")
    return types, constants


def measure(kind: str, form: KVFormat, arch: int, tile: Tile, wide: bool = False, host: bool = False) -> dict:
    """Compile one kernel; resources, and instructions of the loop by kind."""
    function = (KERNELS | ENDS)[kind]
    warps = WARPS.get(kind, tile.warps)
    stages = tile.decode_stages if kind == "decode" else tile.prefill_stages
    types, constants = arguments(kind, form, tile, stages, wide, host)
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(function.arg_names)
        if types[name].startswith("*") or name in _ROUND
    }
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    if kind in KERNELS:
        options["maxnreg"] = tile.registers
    made = triton.compile(ASTSource(function, types, constants, aligned), GPUTarget("cuda", arch, 32), options)
    return {
        "kernel": kind, "format": form.name, "wide": wide, "host": host, "arch": arch, "block_n": tile.block_n, "split": tile.split,
        "warps": warps, "stages": stages, "limited": kind in KERNELS and tile.registers is not None, "shared": made.metadata.shared, **_assembled(made.asm["cubin"]),
    }  # fmt: skip


def _assembled(cubin: bytes) -> dict:
    """Registers, spills and instructions of one assembled kernel.

    The stack of a kernel that declares no array holds what registers did not.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        usage, listing = _output(["cuobjdump", "--dump-resource-usage", path]), _output(["nvdisasm", "-c", path])
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return {"registers": int(registers), "spills": int(stack), "loop": loop(listing)}


def _output(command: list) -> str:
    done = subprocess.run([_TOOLS / command[0], *command[1:]], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]}: {done.stderr or done.stdout}")
    return done.stdout + done.stderr


def loop(listing: str) -> dict[str, int]:
    """Instructions of the block with the most products: all, and those that tell how it works.

    A block ends at a label or a branch: what joins states every few tiles is another one.
    """
    blocks = re.split(r"\n(?=\.L)|\bBRA\b", listing)
    block = max(blocks, key=lambda block: len(re.findall(r"\b[HI]MMA\b", block)))
    counts = Counter(re.findall(r"\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_]+)", block))
    begun = len(re.findall(r"\b[HI]MMA\b.*, RZ ;", block))
    return {"all": sum(counts.values()), "begun": begun} | {name: counts[name] for name in COUNTED}


def candidates() -> list[Tile]:
    """What a sweep on a GPU should try."""
    sizes = itertools.product((32, 64), (2, 4, 8), (1, 2, 3))
    return [Tile(block_n, 128, warps, stages, stages) for block_n, warps, stages in sizes]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.qsa_kernels.compiled", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="the tiles in use only, every kernel")
    parser.add_argument("--wide", action="store_true", help="layouts whose farthest row no int32 counts")
    parser.add_argument(
        "--host", action="store_true", help="rows as host memory and the arena have them, in whole lines"
    )
    parser.add_argument("--formats", nargs="+", choices=[form.name for form in FORMATS])
    parser.add_argument("--arch", type=int, nargs="+", choices=ARCHS, default=ARCHS)
    parser.add_argument("--kernels", nargs="+", choices=(*KERNELS, *ENDS), default=(*KERNELS, *ENDS))
    args = parser.parse_args(argv)
    some = [form for form in FORMATS if form.name in (args.formats or [form.name])]
    kinds = {**dict.fromkeys(KERNELS, some), **dict.fromkeys(ENDS, (BF16,))}
    jobs = [
        (kind, form, arch, TILES[arch, form]) for kind in args.kernels for form in kinds[kind] for arch in args.arch
    ]
    if not args.table:
        # On the card with the least room.
        jobs += [("prefill", form, 86, tile) for form in some for tile in candidates()]
    samples = []
    for job in jobs:
        samples.append(measure(*job, args.wide, args.host) | {"in_use": job[3] is TILES[job[2], job[1]]})
        print(samples[-1], flush=True)
    used = [sample for sample in samples if sample["in_use"]]
    room = max(sample["shared"] / SHARED_LIMIT[sample["arch"]] for sample in used)
    claims = [
        record.Claim(
            "spilled by kernels that may use all registers",
            float(sum(s["spills"] for s in used if not s["limited"])),
            "bytes",
            0.0,
            "<=",
        ),
        record.Claim("shared memory of kernels in use", room, "of the GPU's", 1.0, "<="),
    ]
    settings = {"command": "python -m benchmarks.qsa_kernels.compiled", "triton": triton.__version__}
    record.write(args.out, settings, samples, claims)
    return 0 if all(claim.holds for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
