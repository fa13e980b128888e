"""Counters of a worker, in another process's `/metrics`."""

import os
import subprocess
import sys
from dataclasses import fields
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from vllm.models.qwen4_exp.ple_store.counters import Counters
from vllm.v1.metrics import ngram_table

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


def show(gather: bool = True) -> None:
    ngram_table.show(
        SimpleNamespace(
            engram_config=SimpleNamespace(host_file_gather=gather),
            model_config=SimpleNamespace(served_model_name="model"),
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
    import time

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
