"""The demonstration's two forms: one answer compared with transformers, or a server left running."""

import argparse
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from demo import report
from demo.checkpoint.geometry import geometry
from demo.checkpoint.layout import Layout, read_layout
from demo.checkpoint.write import build
from demo.client import Answer, stream_chat
from demo.memory import resident_bytes
from demo.prompts import PROMPT
from demo.server import Server, ServerFailed, free_port

#: Seconds for everything after the server is ready; a wedged pipeline would otherwise wait for ever.
ANSWER_LIMIT = 300

#: Small on purpose: CPU vLLM would otherwise reserve half of the host's memory for K/V.
ENGINE = ["--max-model-len", "2048", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20)]

#: The n-gram table as upstream would hold it where memory cannot be pinned: loaded, in the stage that needs it.
TABLE_IN_MEMORY = ["--engram-config", '{"host_file_gather": false, "cpu_offload": false}']


class DemoFailed(RuntimeError):
    """Ends the demonstration with an exit status of its own."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


def demo(args: argparse.Namespace, scratch: Path) -> int:
    """Serve, ask once, compare; returns the exit status."""
    checkpoint, layout = _checkpoint(args, scratch)
    with _server(args, checkpoint, scratch / "serve.log") as server:
        ready = _wait(server, args.ready_within)
        print("answer       ", end="", flush=True)
        answer = _ask(server, args.tokens)
        print()
        resident = resident_bytes(server.process.pid)
        partition = report.partition(server.log)

    loaded = _resident_with_table(args, checkpoint, scratch) if args.measure_resident else None
    reference = _reference(checkpoint, answer, args.tokens)
    result = report.Result(
        layout=layout,
        stages=args.stages,
        partition=partition,
        ready=ready,
        answer=answer,
        reference=reference,
        resident=resident,
        resident_with_table=loaded,
    )
    print(report.render(result))
    if args.json:
        report.record(result, args.json, args.partition)
    return 0 if result.agrees else 1


def serve(args: argparse.Namespace, scratch: Path) -> int:
    """Leave the server running until Ctrl-C or until it ends by itself."""
    checkpoint, _ = _checkpoint(args, scratch)
    with _server(args, checkpoint, scratch / "serve.log") as server:
        _wait(server, args.ready_within)
        print(report.how_to_ask(server.url))
        assert server.process is not None
        status = server.process.wait()
        raise DemoFailed(f"vllm serve ended with status {status}.\n{server.tail()}", status=2)


def _checkpoint(args: argparse.Namespace, scratch: Path) -> tuple[Path, Layout]:
    """The directory given with --checkpoint if it holds one, else a new checkpoint there or in `scratch`."""
    path: Path = args.checkpoint or scratch / "checkpoint"
    start = time.monotonic()
    if (path / "config.json").is_file():
        layout, how = read_layout(path), "read"
    else:
        try:
            layout, how = build(path, geometry("demo")), "written"
        except (OSError, ValueError) as error:
            raise DemoFailed(f"could not write the checkpoint to {path}: {error}", status=3) from error
    print(report.checkpoint(path, layout, f"{how} in {time.monotonic() - start:.1f} s"))
    return path, layout


def _server(args: argparse.Namespace, checkpoint: Path, log: Path, extra: tuple[str, ...] | list[str] = ()) -> Server:
    env = {"VLLM_PP_LAYER_PARTITION": args.partition} if args.partition else {}
    # Nothing here may depend on a network: the checkpoint is a local directory.
    env |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    server = Server(
        checkpoint, stages=args.stages, port=args.port or free_port(), log=log, arguments=[*ENGINE, *extra], env=env
    )
    print(f"server       {report.shell(server.command)}\n             log in {log}")
    return server


def _wait(server: Server, limit: float) -> float:
    from tqdm import tqdm

    # Into a file or a CI log every redraw is a line of its own, so they come seldom there.
    every = 0.5 if sys.stderr.isatty() else 10
    look = "starting     {n:5.0f} s of at most {total:.0f} |{bar:30}| {desc}"
    with tqdm(total=limit, bar_format=look, mininterval=every, leave=False) as bar:

        def tick(seconds: float, milestone: str) -> None:
            bar.set_description_str(milestone, refresh=False)
            bar.update(min(seconds, limit) - bar.n)

        try:
            ready = server.wait_until_healthy(limit, tick)
        except ServerFailed as failure:
            raise DemoFailed(str(failure), status=2) from failure
    print(f"ready        {ready:.1f} s after the start of vllm serve")
    return ready


def _ask(server: Server, length: int) -> Answer:
    import openai

    try:
        with _limit(ANSWER_LIMIT):
            return stream_chat(server.url, PROMPT, length, on_text=lambda text: print(text, end="", flush=True))
    except (openai.OpenAIError, TimeoutError) as error:
        raise DemoFailed(f"the request failed: {error}\n{server.tail()}", status=3) from error


@contextmanager
def _limit(seconds: int):
    """Raise TimeoutError after `seconds`, whatever the code inside is waiting for."""

    def expired(_signal, _frame):
        raise TimeoutError(f"no complete answer within {seconds} s")

    previous = signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def _resident_with_table(args: argparse.Namespace, checkpoint: Path, scratch: Path) -> int:
    """Memory of a second server that loads the table; it answers once, so that both have touched the same pages."""
    with _server(args, checkpoint, scratch / "serve-table-in-memory.log", TABLE_IN_MEMORY) as server:
        _wait(server, args.ready_within)
        stream_chat(server.url, PROMPT, args.tokens)
        return resident_bytes(server.process.pid)


def _reference(checkpoint: Path, answer: Answer, length: int):
    # After the server is gone: two cores cannot do both without each slowing the other.
    from demo import reference

    print("reference    transformers, same prompt tokens ...", flush=True)
    return reference.greedy(reference.load(checkpoint), answer.prompt_tokens, length)
