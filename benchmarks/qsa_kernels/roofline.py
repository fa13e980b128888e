"""Bytes, products and instructions of sparse attention against what an RTX 3090 can do: a page's tables."""

from __future__ import annotations

from benchmarks.markdown import table
from benchmarks.qsa_kernels.geometry import Geometry, published
from benchmarks.record import FOLDER, read
from vllm.models.qwen4_exp.qsa.formats import BF16, FP8, INT8, KVFormat
from vllm.models.qwen4_exp.qsa.tiles import TILES

#: NVIDIA's figures of the card: memory; multiply-adds of 16-bit operands into fp32 (71 TFLOP/s); SMs of four
#: schedulers, each with an instruction a clock.
BANDWIDTH, PRODUCTS, SMS, CLOCK = 936e9, 35.6e12, 82, 1.695e9
ISSUES = SMS * 4 * CLOCK
FORMATS = (BF16, INT8, FP8)
CONTEXTS = (8_192, 65_536, 250_000)
CHUNK = 2048
#: Numbers of an index key, in bf16 or e4m3, and the heads that score it.
INDEX_DIM, INDEX_HEADS = 128, 4
ARCH, PADDED_GROUP = 86, 16


def instructions(form: KVFormat, columns: int) -> float:
    """That one row issues in the loop over tiles, by what prefill compiles to for this card."""
    for sample in read(FOLDER / "qsa-compiled.json")["samples"]:
        if (
            sample["kernel"] == "prefill"
            and sample["in_use"]
            and (sample["format"], sample["arch"]) == (form.name, ARCH)
        ):
            each = sample["loop"]["all"] * sample["warps"] / sample["block_n"]
            return published().kv_heads * columns * each
    raise LookupError(f"no sample of prefill, {form.name}, sm_{ARCH}")


def products(form: KVFormat) -> float:
    """Of one full row, in multiply-adds of 16-bit operands into fp32, padding included.

    int8 keys are multiplied twice, with two pieces of a query, at four times the rate of those.
    """
    keys = 0.5 if form is INT8 else 1.0
    return published().products(published().width, PADDED_GROUP) * (keys + 1.0) / 2


def microseconds(amount: float, rate: float) -> str:
    return f"{amount / rate * 1e6:,.1f}"


def decode_table() -> str:
    """One layer's step, its rows full: 2051 columns each."""
    shape, rows = published(), []
    for form in FORMATS:
        for requests in (1, 8):
            kv = requests * shape.kv_bytes(form, shape.width)
            states = requests * shape.split_bytes(shape.width, TILES[ARCH, form].split)
            rest = requests * shape.row_bytes()
            rows.append(
                [
                    form.name, str(requests), f"{kv / 1e6:.2f}", f"{states / 1e6:.2f}", f"{rest / 1e3:.0f}",
                    microseconds(kv + rest, BANDWIDTH), microseconds(kv + rest + states, BANDWIDTH),
                    microseconds(requests * products(form), PRODUCTS), microseconds(requests * instructions(form, shape.width), ISSUES),
                ]
            )  # fmt: skip
    heads = [
        "K/V", "requests", "K/V, MB", "partial states, MB", "the rest, KB", "memory, µs", "with states, µs",
        "products, µs", "instructions, µs",
    ]  # fmt: skip
    return table(heads, rows)


def prefill_table() -> str:
    """One layer's chunk: every token once from memory if neighbours share it, every row's own if nothing is shared."""
    shape, rows = published(), []
    for form in FORMATS:
        once = shape.kv_bytes(form, CONTEXTS[-1]) + CHUNK * shape.row_bytes()
        each = CHUNK * (shape.kv_bytes(form, shape.width) + shape.row_bytes())
        times = {
            "memory at best": once / BANDWIDTH,
            "products": CHUNK * products(form) / PRODUCTS,
            "instructions": CHUNK * instructions(form, shape.width) / ISSUES,
        }
        limit = max(times, key=times.__getitem__)
        tokens = CHUNK / (shape.layers * times[limit])
        rows.append(
            [form.name, f"{once / 1e6:,.0f}", f"{each / 1e6:,.0f}", *(f"{t * 1e6:,.0f}" for t in times.values()),
             f"{each / times[limit] / 1e9:,.0f}", limit, f"{tokens:,.0f}"]
        )  # fmt: skip
    heads = [
        "K/V", "from memory at best, MB", "through caches, MB", "memory at best, µs", "products, µs",
        "instructions, µs", "caches must give, GB/s", "limit", f"tokens/s of {shape.layers} layers",
    ]  # fmt: skip
    return table(heads, rows)


def index_table() -> str:
    """Scoring pooled keys, which grows with the context while attention does not."""
    shape: Geometry = published()
    rows = []
    for context in CONTEXTS:
        groups = context // shape.ratio
        numbers, products = groups * INDEX_DIM, groups * INDEX_DIM * INDEX_HEADS
        attention = shape.kv_bytes(BF16, min(context, shape.width))
        rows.append(
            [f"{context:,}", f"{2 * numbers / 1e6:.2f}", microseconds(2 * numbers, BANDWIDTH),
             microseconds(numbers, BANDWIDTH), microseconds(4 * products, PRODUCTS),
             microseconds(attention, BANDWIDTH), microseconds(shape.kv_bytes(INT8, min(context, shape.width)), BANDWIDTH)]
        )  # fmt: skip
    heads = [
        "context", "bf16 index keys, MB", "reading them, µs", "in fp8, µs", "products, µs", "reading bf16 K/V, µs",
        "reading int8 K/V, µs",
    ]  # fmt: skip
    return table(heads, rows)


def write_table() -> str:
    """Writing a chunk's K/V: projected q, k, v and gate in, q, gate and rows out."""
    shape, rows = published(), []
    width = (2 * shape.heads + 2 * shape.kv_heads) * shape.dim
    for form in FORMATS:
        for tokens in (1, CHUNK):
            moved = tokens * (
                2 * width + 2 * 2 * shape.heads * shape.dim + shape.kv_heads * form.token_bytes(shape.dim)
            )
            rows.append([form.name, f"{tokens:,}", f"{moved / 1e6:.2f}", microseconds(moved, BANDWIDTH)])
    return table(["K/V", "tokens", "MB", "memory, µs"], rows)


def compiled_table() -> str:
    """Tiles in use on this card: what a program takes, and what its loop issues for a column."""
    rows = []
    for sample in read(FOLDER / "qsa-compiled.json")["samples"]:
        if sample["arch"] == ARCH and sample["in_use"] and sample["kernel"] in ("decode", "prefill", "section"):
            loop = sample["loop"]
            each = loop["all"] * sample["warps"] / 4 / sample["block_n"]
            registers = -(-sample["registers"] // 8) * 8 * 32 * sample["warps"]
            together = min(65_536 // registers, (100 << 10) // (sample["shared"] + 1024))
            rows.append(
                [sample["kernel"], sample["format"], f"{sample['shared'] / 1024:.1f}", str(sample["registers"]),
                 str(sample["spills"]), str(together), f"{each:.1f}"]
            )  # fmt: skip
    heads = ["kernel", "K/V", "shared, KiB", "registers", "spilled", "programs an SM", "clocks a column to issue"]
    return table(heads, rows)


PAGE = {
    "decode against a 3090": decode_table,
    "prefill against a 3090": prefill_table,
    "index keys against a 3090": index_table,
    "cache write against a 3090": write_table,
    "programs on sm_86": compiled_table,
}
