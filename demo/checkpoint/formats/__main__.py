"""`python -m demo.checkpoint.formats SOURCE OUT`: quantize a checkpoint that `python -m demo.checkpoint` wrote."""

import argparse
from pathlib import Path

from demo.checkpoint.formats.recipes import RECIPES
from demo.checkpoint.formats.write import MULTIMODAL, PLAIN, quantize


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.checkpoint.formats", description=__doc__)
    parser.add_argument("source", type=Path, help="bfloat16 checkpoint")
    parser.add_argument("out", type=Path, help="gets quantized/ and dequantized/")
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="mix")
    parser.add_argument("--multimodal-names", action="store_true", help=f"tensor names begin with {MULTIMODAL}")
    parser.add_argument("--mtp", action="store_true", help="add a draft module")
    args = parser.parse_args(argv)
    prefix = MULTIMODAL if args.multimodal_names else PLAIN
    pair = quantize(args.source, args.out, RECIPES[args.recipe], prefix=prefix, with_mtp=args.mtp)
    print(f"{pair.quantized}\n{pair.dequantized}")


if __name__ == "__main__":
    main()
