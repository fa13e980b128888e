"""Tables in the pages, made from the committed measurements.

python -m benchmarks.figures            rewrite them
python -m benchmarks.figures --check    fail where one is stale
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import checkpoint_pages, claims, kv_pages, qsa_tables, stress_tables
from benchmarks import formats_table as formats
from benchmarks import host_kv_tables as host_kv
from benchmarks import host_time_tables as host_time
from benchmarks import table_formats_tables as table_formats
from benchmarks.faults import table as faults
from benchmarks.pipeline_model import tables as pipeline
from benchmarks.pipeline_rates import record as rates
from benchmarks.ple_rates import record as ple_rates
from benchmarks.ple_reads import record as ple_reads
from benchmarks.qsa_kernels import roofline
from benchmarks.ray_stages import table as ray_stages
from benchmarks.record import FOLDER, ROOT, read
from benchmarks.server_scheduler import record as server


def demo_table() -> str:
    record = read(FOLDER / "pipeline-cpu-demo.json")
    (sample,) = record["samples"]
    where = record["hardware"]
    rows = [
        ("decode", f"{sample['decode_tokens_per_s']:.1f} tokens/s"),
        ("first token", f"{sample['first_token_s']:.2f} s"),
        ("`vllm serve` to ready", f"{sample['ready_s']:.0f} s"),
        ("tokens equal to transformers'", f"{sample['tokens_equal']} of {sample['tokens']}"),
        ("largest log-probability difference", f"{sample['largest_logprob_difference']:.3f}"),
        ("host memory, table on disk", f"{sample['resident_bytes'] / 1e6:,.0f} MB"),
        ("host memory, table loaded", f"{sample['resident_with_table_bytes'] / 1e6:,.0f} MB"),
    ]
    head = (
        f"Measured on {where['cpu']}, {where['cores']} cores, {where['ram_gib']:.0f} GiB "
        f"({record['upstream']}, commit {record['commit']}): {record['settings']['checkpoint']}.\n\n"
        f"| {record['settings']['stages']} pipeline stages, no GPU | |\n|---|---|\n"
    )
    return head + "".join(f"| {name} | {value} |\n" for name, value in rows)


#: page -> the tables in it, by the words of their markers
PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"demo figures": demo_table},
    "docs/ampere-multigpu/benchmarks.md": claims.PAGE,
    "docs/ampere-multigpu/pipeline.md": pipeline.PAGE | rates.PAGE | stress_tables.PAGE | server.PAGE,
    "docs/ampere-multigpu/faults.md": faults.PAGE,
    "docs/ampere-multigpu/ray.md": ray_stages.PAGE,
    "docs/ampere-multigpu/check.md": checkpoint_pages.PAGE,
    "docs/ampere-multigpu/host-kv.md": host_kv.PAGE,
    "docs/ampere-multigpu/host-time.md": host_time.PAGE,
    "docs/ampere-multigpu/ngram-table.md": ple_reads.PAGE | ple_rates.PAGE,
    "docs/ampere-multigpu/loading.md": table_formats.PAGE,
    "docs/ampere-multigpu/formats.md": formats.PAGE,
    "docs/ampere-multigpu/roofline.md": roofline.PAGE,
    "docs/ampere-multigpu/kv-cache.md": kv_pages.PAGE | qsa_tables.PAGE,
}


def rendered(page: str) -> str:
    text = (ROOT / page).read_text()
    for name, table in PAGES[page].items():
        block = re.compile(rf"(<!-- {name}[^>]*-->\n).*?(<!-- end of {name} -->)", re.S)
        if not block.search(text):
            raise SystemExit(f"{page} has no '<!-- {name} … -->' and '<!-- end of {name} -->'")
        made = table()
        text = block.sub(lambda found, made=made: f"{found[1]}{made}{found[2]}", text)
    return text


def main() -> int:
    stale = [page for page in PAGES if rendered(page) != (ROOT / page).read_text()]
    if "--check" in sys.argv[1:]:
        for page in stale:
            print(f"{page} is not what its measurements say; run python -m benchmarks.figures", file=sys.stderr)
        return 1 if stale else 0
    for page in stale:
        Path(ROOT / page).write_text(rendered(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
