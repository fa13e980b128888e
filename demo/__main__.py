"""`make demo`: does the fork serve this model on several stages, and are its tokens transformers'?

Writes a small random checkpoint in the published layout, starts `vllm serve` over pipeline stages, streams one chat
completion through the `openai` client and compares it with transformers' `Qwen4ExpForCausalLM`.

Exit status: 0 tokens agree, 1 they do not, 2 the server failed, 3 the checkpoint or the request did.
"""

import argparse
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from demo import run

PORT_ANY = 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--serve", action="store_true", help="leave the server running until Ctrl-C")
    p.add_argument("--stages", type=int, default=3, help="pipeline stages (default 3)")
    p.add_argument("--partition", help="layers per stage, e.g. 3,5,4 (default: vLLM's own division)")
    p.add_argument("--port", type=int, default=PORT_ANY, help="default: a free one; 8000 with --serve")
    p.add_argument("--checkpoint", type=Path, help="use or create the checkpoint here (default: a temporary directory)")
    p.add_argument("--keep", action="store_true", help="keep the temporary directory")
    p.add_argument("--tokens", type=int, default=64, help="length of the answer (default 64)")
    p.add_argument("--ready-within", type=float, default=120.0, metavar="S", help="limit of the start (default 120)")
    p.add_argument(
        "--measure-resident",
        action="store_true",
        help="start the server a second time with the n-gram table in memory, instead of computing what that would take",
    )
    p.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as a measurement record")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.serve and args.port == PORT_ANY:
        args.port = 8000
    # `kill` must end the server as Ctrl-C does.
    signal.signal(signal.SIGTERM, _interrupt)
    scratch = Path(tempfile.mkdtemp(prefix="qwen4-exp-demo-"))
    try:
        return run.serve(args, scratch) if args.serve else run.demo(args, scratch)
    except KeyboardInterrupt:
        print("\nstopped")
        return 130
    except run.DemoFailed as failure:
        print(f"\n{failure}", file=sys.stderr)
        return failure.status
    finally:
        if args.keep:
            print(f"kept         {scratch}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)


def _interrupt(_signal, _frame) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
