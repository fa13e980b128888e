"""`python -m demo.checkpoint OUT`: write a small random Qwen4Exp checkpoint."""

import argparse
from pathlib import Path

from demo.checkpoint.geometry import PRESETS, geometry
from demo.checkpoint.write import build


def _ids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.checkpoint", description=__doc__)
    parser.add_argument("out", type=Path, help="directory to write")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    parser.add_argument("--layers", type=int, dest="num_hidden_layers", help="number of decoder layers")
    parser.add_argument("--ple-layers", type=_ids, dest="ple_layer_ids", help="one-based, e.g. 2 or 2,6")
    parser.add_argument("--budget", type=int, dest="indexer_budget", help="indexer budget in tokens")
    parser.add_argument("--table-base", type=int, dest="ngram_vocab_size_base", help="table rows per hashed head")
    parser.add_argument("--shards", type=int, dest="split_ngram_parts", help="shards of the n-gram table")
    parser.add_argument("--seed", type=int, default=0)
    args = vars(parser.parse_args(argv))
    out, preset, seed = args.pop("out"), args.pop("preset"), args.pop("seed")
    layout = build(out, geometry(preset, **args), seed=seed)
    print(
        f"{out}: {layout.total_bytes / 1e6:.1f} MB in {layout.files} files, {layout.tensors} tensors "
        f"({layout.expert_tensors} of experts); n-gram table of {layout.table_rows} rows, "
        f"{layout.table_bytes / 1e6:.1f} MB in {layout.table_shards} shards"
    )


if __name__ == "__main__":
    main()
