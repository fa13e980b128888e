"""Counters of a worker, in another process's `/metrics`."""

import json
import logging
import os
import socket
import subprocess
import sys
import time
from dataclasses import fields
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from vllm.models.qwen4_exp.ple_store.counters import Counters
from vllm.v1.metrics import ngram_table, ngram_table_relay

#: Loads the module by its file: importing vLLM takes seconds.
WORKER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("ngram_table", sys.argv[3])
ngram_table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ngram_table)
ngram_table.answer({"engine": "0", "stage": sys.argv[1], "rank": "0"}, lambda: dict.fromkeys(ngram_table.NAMES, int(sys.argv[2])),
    lambda: {"r" + sys.argv[1]: "row " + sys.argv[2]})
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def word(monkeypatch):
    monkeypatch.delenv(ngram_table.WORD, raising=False)
    ngram_table.prepare()
    yield os.environ[ngram_table.WORD]
    ngram_table._counters.model_name = None


@pytest.fixture
def worker(word):
    """``worker(stage, value)``: a process that answers with ``value`` for every counter."""
    made = []

    def start(stage: int, value: int) -> subprocess.Popen:
        command = [sys.executable, "-c", WORKER, str(stage), str(value), ngram_table.__file__]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        made.append(process)
        assert "ready" in process.stdout.readline()
        return process

    yield start
    for process in made:
        process.kill()
        process.communicate()


def scraped() -> dict[str, float]:
    registry = CollectorRegistry()
    ngram_table.show_in(registry)
    lines = generate_latest(registry).decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


def show(gather: bool = True, nodes: int = 1) -> None:
    ngram_table.show(
        SimpleNamespace(
            engram_config=SimpleNamespace(host_file_gather=gather),
            model_config=SimpleNamespace(served_model_name="model"),
            parallel_config=SimpleNamespace(nnodes=nodes),
        )
    )


def test_every_worker_of_this_engine_is_seen(worker):
    show()
    first, second = worker(0, 5), worker(2, 70)
    found = scraped()
    labels = 'engine="0",model_name="model",rank="0",stage="{}"'
    for name in ngram_table.NAMES:
        assert {value for key, value in found.items() if key.startswith(f"vllm:ngram_table_{name}_total")} == {5, 70}
    assert any(sorted(key.split("{")[1][:-1].split(",")) == sorted(labels.format(2).split(",")) for key in found)
    first.kill()
    first.wait()
    assert set(scraped().values()) == {70}, "one that died is no longer there"
    assert second.poll() is None


def test_why_a_request_ends(worker):
    worker(0, 5)
    worker(2, 70)
    assert ngram_table.reason("r2") == "row 70" and ngram_table.reason("r1") is None


def test_another_engine_is_not(worker, monkeypatch):
    show()
    worker(0, 5)
    monkeypatch.setenv(ngram_table.WORD, "another")
    assert scraped() == {}


def test_a_worker_that_hangs_does_not_hold_up_the_scrape(worker):
    import signal

    show()
    stuck = worker(0, 5)
    worker(1, 6)
    os.kill(stuck.pid, signal.SIGSTOP)
    while open(f"/proc/{stuck.pid}/stat").read().rsplit(")", 1)[1].split()[0] != "T":
        time.sleep(0.01)
    try:
        begun = time.monotonic()
        assert set(scraped().values()) == {6}
        assert time.monotonic() - begun < 5
    finally:
        os.kill(stuck.pid, signal.SIGCONT)


def test_nothing_is_asked_where_no_table_is_in_files(word, monkeypatch):
    show(gather=False)
    monkeypatch.setattr(ngram_table, "_sockets", lambda: pytest.fail("asked"))
    assert scraped() == {}


def test_every_counter_is_shown():
    assert list(ngram_table.NAMES) == [one.name for one in fields(Counters) if not one.name.startswith("_")]


def test_processes_inherit_the_word(word):
    ngram_table.prepare()
    assert os.environ[ngram_table.WORD] == word


@pytest.fixture
def relayed(word, monkeypatch):
    """``relayed(stage, value)``: a worker that dials, as if from another machine."""
    monkeypatch.setattr(ngram_table_relay, "_PAUSE", 0.05)
    monkeypatch.setenv(ngram_table.RELAY, "")  # removed afterwards, whatever `listen` makes of it
    ngram_table_relay.listen("127.0.0.1")

    def start(stage: int, value: int) -> None:
        labels = {"engine": "0", "stage": str(stage), "rank": "0"}
        ngram_table.answer(
            labels, lambda: dict.fromkeys(ngram_table.NAMES, value), lambda: {f"r{stage}": f"row {value}"}
        )

    return start


def soon(found) -> bool:
    deadline = time.monotonic() + 10
    while not found() and time.monotonic() < deadline:
        time.sleep(0.02)
    return found()


def test_workers_of_other_machines_are_seen_too(relayed, worker):
    show()
    relayed(1, 8)
    assert soon(lambda: set(scraped().values()) == {8})
    assert ngram_table.reason("r1") == "row 8" and ngram_table.reason("r2") is None
    assert len(ngram_table._sockets()) == 1, "it has no socket of its own beside the relay's"


def test_a_worker_is_found_again_after_its_connection_broke(relayed, monkeypatch):
    show()
    relayed(1, 8)
    assert soon(lambda: set(scraped().values()) == {8})
    # Slower than anybody waits for, once.
    slow = iter([1.0])
    monkeypatch.setattr(ngram_table_relay, "_PATIENCE", 0.2)
    dumps = json.dumps
    monkeypatch.setattr(ngram_table_relay.json, "dumps", lambda made: (time.sleep(next(slow, 0)), dumps(made))[1])
    first = scraped()
    assert set(first.values()) <= {8}
    assert soon(lambda: set(scraped().values()) == {8} and len(ngram_table._sockets()) == 1)
    assert all(value == 8 for value in scraped().values()), "never the answer to an earlier question beside it"


def test_strangers_are_not_listened_to(relayed):
    host, port = os.environ[ngram_table.RELAY].split()
    for said in (b"0123456789abcdef\n", b"x" * 100):
        with socket.create_connection((host, int(port))) as connection:
            connection.settimeout(5)
            connection.sendall(said)
            try:
                assert connection.recv(1) == b""
            except ConnectionResetError:
                pass
    assert ngram_table._sockets() == []


def test_a_server_without_the_figures_is_better_than_none(word, worker, monkeypatch):
    said = []
    monkeypatch.setattr(ngram_table_relay.logger, "warning", lambda text, *rest: said.append(text % rest))
    # Reserved for documentation: nobody's.
    ngram_table_relay.listen("192.0.2.1")
    assert "cannot listen at 192.0.2.1" in said[0] and ngram_table.RELAY not in os.environ
    show()
    worker(0, 5)
    assert set(scraped().values()) == {5}


def test_what_cannot_be_seen_is_said(word, monkeypatch):
    said = []
    monkeypatch.setattr(logging.Logger, "warning", lambda self, text, *rest: said.append(text))
    show(nodes=2)
    assert "the other machines of --nnodes" in said[0]
    show()
    assert len(said) == 1
