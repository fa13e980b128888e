"""Requests that a server has to get rid of: clients that went away, prompts that are too long, more than it can hold.

All but the pools that are too small share one server.
"""

import http.client
import re
import signal
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from benchmarks.faults import leftovers, scene
from benchmarks.faults.stream import Stream
from demo.server import Server, ServerFailed

#: of requests that wait or run
LIMIT = 4
BURST = 24
#: Seconds within which blocks must be free again after a client went away.
FREED_WITHIN = 30.0
#: Pools that cannot hold one request of 2048 tokens.
SMALL_POOLS = {
    "pool of 1 MiB": ["--kv-cache-memory-bytes", str(1 << 20)],
    "pool of 24 blocks": ["--num-gpu-blocks-override", "24"],
}


def play(checkpoint: Path, stages: int, env: dict[str, str]) -> Iterator[dict]:
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "serve.log"
        with scene.start(checkpoint, stages, log, env, ["--max-num-queued-reqs", str(LIMIT)]) as server:
            server.wait_until_healthy(scene.READY_LIMIT, lambda seconds, milestone: None)
            yield disconnect(server, "decode", scene.PROMPT[:40], tokens=5)
            yield disconnect(server, "prefill", scene.PROMPT, tokens=0)
            yield too_long(server)
            yield too_long_with_answer(server)
            yield overload(server)
            yield recovered(server)
            yield asked_to_stop(server)
        for name, arguments in SMALL_POOLS.items():
            yield _small_pool(checkpoint, stages, log, env, name, arguments)
        yield server_killed(checkpoint, stages, log, env)
        yield stopped_while_loading(checkpoint, stages, log, env)


def disconnect(server: Server, phase: str, prompt: list[int], tokens: int) -> dict:
    stream = scene.ask(server, prompt)
    stream.need_tokens(tokens, "before the client went away")
    _wait_for(server, lambda state: state["usage"] > 0, 20)
    held = load(server)["usage"]
    stream.hang_up()
    seconds = _wait_for(server, lambda state: state["usage"] == 0 and state["running"] == 0, FREED_WITHIN)
    return {"limit": "client went away", "phase": phase, "held": round(held, 4), "freed_s": seconds}


def too_long(server: Server) -> dict:
    stream = scene.ask(server, [7] * 3000, 10)
    stream.ended.wait(60)
    return {"limit": "prompt longer than the model's", "answer": f"{stream.end}: {stream.detail}"[:400]}


def too_long_with_answer(server: Server) -> dict:
    """The prompt fits, and no answer of the length that is asked for."""
    stream = scene.ask(server, scene.PROMPT, 1000)
    stream.ended.wait(60)
    return {"limit": "prompt and max_tokens longer than the model's", "answer": f"{stream.end}: {stream.detail}"[:400]}


def overload(server: Server) -> dict:
    """As many as it holds, seen answering, and then the rest at once, while none of the first can have ended.

    The first ask for the longest answer there is room for, 74 s of it on two cores, and hang up after the rest were
    answered.  With 150 tokens, 5.6 s, a client whose cores the stages' waiting took from it came too late with some of
    the rest, which then found places that were free again.

    Raises:
        RuntimeError: the first were not all being answered, before the rest came or after.
    """
    prompt = scene.PROMPT[:60]
    first = [scene.ask(server, prompt) for _ in range(LIMIT)]
    _all_answering(first, "before the burst")
    rest = [scene.ask(server, prompt, 40) for _ in range(BURST - LIMIT)]
    for stream in rest:
        stream.ended.wait(300)
    _all_answering(first, "after the burst")
    for stream in first:
        stream.hang_up()
    ends = [stream.end if stream.end != "http" else stream.detail[:3] for stream in rest]
    said = sorted({stream.detail[:200] for stream in rest if stream.end in ("http", "error")})
    counts = {end: ends.count(end) for end in sorted(set(ends))} | {"answering": len(first)}
    refused = [stream for stream in rest if stream.end == "http"]
    return {
        "limit": "overload",
        "sent": BURST,
        "ends": counts,
        "with_retry_after": sum(stream.retry_after is not None for stream in refused),
        "said": said,
    }


def _all_answering(streams: list[Stream], when: str) -> None:
    for stream in streams:
        stream.need_tokens(stream.tokens + 1, when)
        if stream.ended.is_set():
            raise RuntimeError(f"a request ended {when}: {stream.end} {stream.detail}")


def recovered(server: Server) -> dict:
    seconds = _wait_for(server, lambda state: state["usage"] == 0 and state["running"] == 0, FREED_WITHIN)
    stream = scene.ask(server, scene.PROMPT[:40], 20)
    stream.ended.wait(60)
    return {"limit": "after the overload", "freed_s": seconds, "answer": f"{stream.end}: {stream.detail}"}


def asked_to_stop(server: Server) -> dict:
    """SIGTERM with nobody in flight."""
    assert server.process is not None
    start = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    status = server.process.wait(60)
    return {"limit": "SIGTERM", "answer": f"status {status} after {time.monotonic() - start:.1f} s"}


def _small_pool(checkpoint: Path, stages: int, log: Path, env: dict, name: str, arguments: list[str]) -> dict:
    """A pool that cannot hold one request of the model's length: refused at the start, or else per request."""
    with scene.start(checkpoint, stages, log, env, arguments) as server:
        try:
            server.wait_until_healthy(scene.READY_LIMIT, lambda seconds, milestone: None)
        except ServerFailed:
            said = re.findall(r"ValueError: (.+)", log.read_text(errors="replace"))
            return {"limit": name, "answer": f"refused at start: {said[0] if said else '?'}"[:400]}
        stream = scene.ask(server, scene.PROMPT, 400)
        ended = stream.ended.wait(60)
        state = load(server)
        answer = f"{stream.end}: {stream.detail}"[:400] if ended else f"nothing in 60 s, {stream.tokens} tokens"
        return {"limit": name, "answer": answer, "preemptions": state["preempted"]}


def server_killed(checkpoint: Path, stages: int, log: Path, env: dict) -> dict:
    """What is left when the process that clients talk to is gone without having asked anyone to end."""
    with scene.start(checkpoint, stages, log, env) as server:
        assert server.process is not None
        server.wait_until_healthy(scene.READY_LIMIT, lambda seconds, milestone: None)
        leader = server.process.pid
        names = leftovers.shared_memory(leader)
        server.process.kill()
        server.process.wait()
        start = time.monotonic()
        while (left := leftovers.of_session(leader)) and time.monotonic() - start < 30:
            time.sleep(0.2)
        seconds = time.monotonic() - start
        gone = "" if left else f"engine and workers gone after {seconds:.1f} s, "
        there = leftovers.still_there(names)
        leftovers.remove(leader, names)
    left_names = f"{len(there)} names in /dev/shm left" if there else "no names in /dev/shm left"
    return {"limit": "SIGKILL of the API server", "answer": (gone or f"{len(left)} processes left, ") + left_names}


def stopped_while_loading(checkpoint: Path, stages: int, log: Path, env: dict[str, str]) -> dict:
    """SIGTERM once the engine's process is there, and the server waits for it."""
    with scene.start(checkpoint, stages, log, env) as server:
        assert server.process is not None
        leader = server.process.pid
        while leftovers.engine(leader) is None:
            time.sleep(0.2)
        answer = asked_to_stop(server)["answer"]
        left = leftovers.of_session(leader)
    return {"limit": "SIGTERM during load", "answer": f"{answer}, {len(left)} processes left"}


METRICS = {
    "usage": "vllm:kv_cache_usage_perc",
    "running": "vllm:num_requests_running",
    "preempted": "vllm:num_preemptions_total",
}


def load(server: Server) -> dict[str, float]:
    """What /metrics says of the pool and of the requests in it; usage is a share of the pool."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        key: sum(float(v) for v in re.findall(rf"^{name}{{.*}} (\S+)$", text, re.M)) for key, name in METRICS.items()
    }


def _wait_for(server: Server, condition, limit: float) -> float | None:
    """Seconds until the server's load meets the condition; None if it does not within the limit."""
    start = time.monotonic()
    while time.monotonic() - start < limit:
        try:
            if condition(load(server)):
                return round(time.monotonic() - start, 1)
        except (OSError, http.client.HTTPException):
            return None
        time.sleep(0.2)
    return None
