"""Prefill and decode rates by K/V format and kernels.

python -m benchmarks.kv_rates run OUT --config CONFIG.JSON     real widths, random weights, one GPU, under 400 s
python -m benchmarks.kv_rates run OUT --model CHECKPOINT       any checkpoint, on whatever there is
python -m benchmarks.kv_rates record RAW NAME                  docs/ampere-multigpu/benches/qsa-rates-NAME.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from benchmarks.pipeline_rates import geometry
from benchmarks.pipeline_rates.__main__ import gpus
from benchmarks.record import FOLDER, hardware
from benchmarks.side_by_side import add_options, child, part_of, run_child

from . import record
from .variants import arguments, chosen

#: A variant that has not ended by then is given up, in seconds: an engine that hangs must not take the others' time.
#: The first on a fresh machine compiles and tunes the first layer's kernels for 90 to 115 s (an H200's host).
PATIENCE = 260


def parse(words: list[str] | None = None) -> argparse.Namespace:
    top = argparse.ArgumentParser(prog="python -m benchmarks.kv_rates", description=__doc__.splitlines()[0])
    what = top.add_subparsers(dest="what", required=True)
    again = what.add_parser("record", help="make the committed record from raw results")
    again.add_argument("raw", type=Path)
    again.add_argument("name", help="of the card, in the file's name: h200")
    again.add_argument("--commit", help="what was measured, where it is not what lies here")
    for name in ("run", "one"):
        parser = what.add_parser(name, help={"run": "measure", "one": "one engine; used by run"}[name])
        add_options(
            parser,
            layers=(4, "; one in four is sparse"),
            experts=(128, ""),
            contexts=[8192, 65536, 256000],
            users=[1, 8],
        )
        parser.add_argument("--counted", type=int, default=96, help="tokens that decoding is measured over")
        parser.add_argument("--variants", type=lambda text: text.split(","), help="names, default all")
        parser.add_argument("--seconds", type=float, default=380, help="no variant begins after so many")
    return top.parse_args(words)


def one(asked: argparse.Namespace) -> None:
    """An engine of one variant; a process of its own, because formats and kernels are fixed when layers are built."""
    from vllm import LLM
    from vllm.platforms import current_platform

    from .rates import measure

    cpu = current_platform.is_cpu()
    (variant,) = chosen(asked.variants, cpu)
    settings = arguments(asked.contexts, asked.users, asked.counted, cpu) | variant.engine(cpu)
    if not asked.config:
        settings.pop("load_format", None)
    with tempfile.TemporaryDirectory() as scratch:
        model = asked.model or str(geometry.write(Path(scratch) / "m", asked.config, asked.layers, asked.experts))
        began = time.perf_counter()
        engine = LLM(model, **settings).llm_engine
        start = round(time.perf_counter() - began, 1)
        samples = [
            {"variant": variant.name} | sample for sample in measure(engine, asked.contexts, asked.users, asked.counted)
        ]
    block = engine.vllm_config.cache_config.block_size
    found = {"gpus": gpus(), "start_s": start, "block_size": block, "engine": settings, "samples": samples}
    asked.out.write_text(json.dumps(found, default=str))


def run(asked: argparse.Namespace) -> None:
    from vllm.platforms import current_platform

    began = time.perf_counter()
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(asked).items()}
    settings = {key: value for key, value in settings.items() if key not in ("what", "out")} | {"variants": {}}
    result = {"hardware": hardware(), "gpus": None, "settings": settings, "samples": []}
    for variant in chosen(asked.variants, current_platform.is_cpu()):
        if time.perf_counter() - began > asked.seconds:
            print(f"{variant.name}: left out, {asked.seconds:.0f} s are over", flush=True)
            continue
        part = part_of(asked.out, variant.name)
        words = child("benchmarks.kv_rates one", part, variant.name, asked, ("counted",))
        found, failed = run_child(words, asked.out, variant.name, PATIENCE)
        if failed or found is None:
            settings["variants"][variant.name] = "failed"
            continue
        result["gpus"] = found["gpus"]
        result["samples"] += found["samples"]
        settings["variants"][variant.name] = {key: found[key] for key in ("start_s", "block_size", "engine")}
        asked.out.write_text(json.dumps(result))
    print(f"{time.perf_counter() - began:.0f} s", flush=True)


def main() -> None:
    asked = parse()
    if asked.what == "record":
        record.write_record(asked.raw, FOLDER / f"qsa-rates-{asked.name}.json", asked.commit)
    elif asked.what == "one":
        one(asked)
    else:
        run(asked)


if __name__ == "__main__":
    main()
