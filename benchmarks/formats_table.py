"""The tables of docs/ampere-multigpu/formats.md, made from the records named formats-*.json."""

from __future__ import annotations

from benchmarks.markdown import table
from benchmarks.record import FOLDER, beside, read

CPU = FOLDER / "formats-cpu.json"
#: Any number of cards; each is a record of its own.
KERNELS = "formats-kernels*.json"

#: recipe of demo/checkpoint/formats -> what it stands for
FORMATS = {
    "gptq-g32": "GPTQ INT4 g32 (gptqmodel)",
    "gptq-g128": "GPTQ INT4 g128 (gptqmodel)",
    "gptq": "GPTQ, g128 experts by a `dynamic` rule, g32 elsewhere",
    "int6": "compressed-tensors, INT4 g128 experts, INT6 g64 attention, delta net, shared expert",
    "int8": "the same with INT8 g64",
    "mix": "the mix: INT6 attention and shared expert, INT8 delta net, hyper-connections, embedding and head",
    "nvfp4": "NVFP4 (ModelOpt): experts, shared expert, delta net, attention output",
    "nvfp4-packed": "NVFP4 (compressed-tensors), weight-only, q, k and v too",
}


def cpu_table() -> str:
    """format x stages x tokens x log-probability differences, with the floor beside them."""
    record = read(CPU)
    where = record["hardware"]
    by: dict[tuple[str, int], list[dict]] = {}
    for sample in record["samples"]:
        by.setdefault((sample["recipe"], sample["stages"]), []).append(sample)
    rows = []
    for recipe, said in FORMATS.items():
        runs = {stages: samples for (name, stages), samples in by.items() if name == recipe}
        every = [sample for samples in runs.values() for sample in samples]
        if not every:
            continue
        equal, tokens = (sum(sample[key] for sample in every) for key in ("tokens_equal", "tokens"))
        rows.append(
            [
                said,
                ", ".join(map(str, sorted(runs))),
                f"{equal} of {tokens}",
                f"{max(sample['largest_answer'] for sample in every):.3f}",
                f"{max(sample['prompt_median'] for sample in every):.3f}",
                f"{max(sample['prompt_largest'] for sample in every):.3f}",
                f"{max(sample['floor_median'] for sample in every):.3f}",
                f"{max(sample['floor_largest'] for sample in every):.3f}",
            ]
        )
    head = [
        "format",
        "stages",
        "tokens equal",
        "answer, largest",
        "prompt, median",
        "prompt, largest",
        "floor, median",
        "floor, largest",
    ]
    return f"Measured on {where['cpu']}, {where['cores']} cores ({record['upstream']}, commit {record['commit']}).\n\n{table(head, rows)}"


def kernel_table() -> str:
    """format x module x kernel on each card that was measured."""
    parts = [_card(read(path)) for path in sorted(FOLDER.glob(KERNELS))]
    return "\n".join(parts) if parts else "No GPU has been measured yet.\n"


def _card(record: dict) -> str:
    settings, where = record["settings"], record["hardware"]
    rate = settings["copy_bytes_per_second"]
    by: dict[tuple[str, str, str], dict[int, dict]] = {}
    refused: dict[tuple[str, str], list[str]] = {}
    for sample in record["samples"]:
        key = (sample["format"], sample["module"])
        if "error" in sample:
            refused.setdefault(key, []).append(sample["backend"])
        else:
            by.setdefault((*key, sample["kernel"]), {})[sample["tokens"]] = sample
    rows = []
    for (said, module, kernel), samples in by.items():
        worst = max(sample["relative"] for sample in samples.values())
        largest = max(sample["largest"] for sample in samples.values())
        rows.append(
            [said, module, _short(kernel), f"{worst:.4f}", f"{largest:.3f}", *(_time(samples, n) for n in (1, 8, 2048))]
        )
    head = ["format", "module", "kernel", "relative error", "largest error", "1 token", "8 tokens", "2048 tokens"]
    capability = settings["capability"]
    copy = f", {rate / 1e9:.0f} GB/s in a copy" if rate else ""
    text = (
        f"Measured on {where.get('gpus', where['cpu'])}, kernels of compute capability {capability}{copy} "
        f"({record['upstream']}, commit {record['commit']})" + f"{beside(record)}.\n\n{table(head, rows)}"
    )
    if refused:
        left = "; ".join(f"{module} in {said}: {', '.join(names)}" for (said, module), names in refused.items())
        text += f"\nDid not run: {left}.\n"
    return text


def _short(kernel: str) -> str:
    for word in ("LinearKernel", "Experts"):
        kernel = kernel.removesuffix(word)
    return {"CompressedTensorsEmbeddingWNA16Int": "Triton gather"}.get(kernel, kernel)


def _time(samples: dict[int, dict], tokens: int) -> str:
    if (sample := samples.get(tokens)) is None:
        return "–"
    cell = f"{sample['microseconds']:,.0f} µs"
    return cell + (f" (floor {sample['floor_microseconds']:,.0f})" if "floor_microseconds" in sample else "")


PAGE = {"formats on the CPU": cpu_table, "kernels on GPUs": kernel_table}
