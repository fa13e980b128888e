"""`vllm serve` over two Ray nodes of this machine, a stage on each: transformers' tokens, and the death of a stage."""

import os
import socket
import subprocess
import sys
import time

import pytest

from benchmarks.faults import leftovers
from benchmarks.faults.stream import Stream
from benchmarks.ray_stages.cluster import RayCluster
from benchmarks.record import ROOT
from demo.checkpoint.geometry import geometry
from demo.checkpoint.write import build
from demo.reference import load
from demo.run import ENGINE
from demo.server import Server, free_port
from tests.e2e.compare import check_completion
from tests.e2e.metrics import table_reads
from tests.e2e.prompts import decisive

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

READY_LIMIT = 500
#: Seconds after the death of a stage.  Measured: 1 and 6; the machine of a test run does other things besides.
CLIENT_WITHIN = 10
END_WITHIN = 60
ANSWER = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("ray") / "checkpoint"
    build(path, geometry("tiny"))
    return path


@pytest.fixture(scope="module")
def cluster():
    with RayCluster(nodes=2, env={1: {"VLLM_PP_LAYER_PARTITION": "6,2"}}) as running:
        yield running
    assert not running.folder.exists()
    assert not [node for node in running.nodes if node.processes()]


@pytest.fixture(scope="module")
def server(cluster, checkpoint, tmp_path_factory):
    with Server(
        checkpoint,
        stages=2,
        port=free_port(),
        log=tmp_path_factory.mktemp("server") / "serve.log",
        arguments=[*ENGINE, "--distributed-executor-backend", "ray", "--max-num-batched-tokens", "64"],
        env={"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_PP_LAYER_PARTITION": "3,5", **cluster.env},
    ) as running:
        running.wait_until_healthy(READY_LIMIT, lambda seconds, milestone: None)
        yield running


def test_a_stage_is_on_each_node(cluster, server):
    assert [[node.stage(stage) is not None for stage in (0, 1)] for node in cluster.nodes] == [
        [True, False],
        [False, True],
    ]
    ids = [node.node_id() for node in cluster.nodes]
    assert ids[0] != ids[1]
    log = server.log.read_text(errors="replace")
    assert f"stage 0 on {socket.gethostname()} " in log and f"Ray node {ids[1][:8]})" in log


def test_stages_of_one_machine_have_different_cores(cluster, server):
    """Each is alone on its Ray node, and would take all of them."""
    first, last = (set(cluster.nodes[number].stage(number).cpu_affinity()) for number in (0, 1))
    assert len(os.sched_getaffinity(0)) < 2 or not first & last


def test_a_machine_without_the_checkpoint_is_refused_by_name(cluster):
    """The question as the executor asks it, of the real nodes, about a directory that neither has."""
    # The module alone, since it needs no more of vLLM and importing the rest takes longer than the question.
    code = (
        f"import sys; sys.path.append({str(ROOT / 'vllm/v1/executor')!r})"
        + """
import ray
from ray_machines import Machine, Seat, check, here, survey
ray.init(log_to_driver=False)
seats = [Seat(i, node["NodeID"], node["NodeManagerAddress"]) for i, node in enumerate(ray.nodes())]
machines = survey(seats, "/nowhere/flash")
assert [machine.node for machine in machines] == [seat.node for seat in seats]
ours = Machine("", "", "", here("").vllm, {"config.json": 1})
check(machines, ours, "/nowhere/flash")
"""
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | cluster.env, capture_output=True, text=True, timeout=300
    )
    said = done.stderr.splitlines()[-1]
    assert "CheckpointMissing" in said and "--model /nowhere/flash does not exist" in said, done.stderr
    assert f"on {socket.gethostname()} (" in said


def test_stages_exchange_over_the_network(server):
    """Else shared memory would carry what a network has to between real machines."""
    assert "CPU SHM communicator disabled for group pp:0" in server.log.read_text(errors="replace")


def test_the_servers_partition_holds_on_every_node(server):
    """The second node was started with another one, which would have it load other layers."""
    log = server.log.read_text(errors="replace")
    assert "stage 0: layers 0-2" in log
    assert "VLLM_PP_LAYER_PARTITION=6,2 of this machine is not used" in log


def test_tokens_are_transformers(server, checkpoint):
    from openai import OpenAI

    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)
    prompt, expected = decisive(load(checkpoint), 150, ANSWER, seed=31)
    before = table_reads(server.url)
    check_completion(client, "qwen4-exp-demo", prompt, expected)
    # Over the engine core's relay, on which it makes no difference whose machine a stage is on.
    after = table_reads(server.url)
    assert list(before) == list(after) == ["0"] and not any(before["0"].values())
    assert 0 < after["0"]["unique_rows"] <= after["0"]["rows"] <= 16 * (150 + ANSWER)


def test_the_death_of_a_stage_ends_the_server(cluster, server):
    """Last: the server is gone afterwards."""
    stages = [cluster.nodes[number].stage(number) for number in (0, 1)]
    names = leftovers.shared_memory(server.process.pid)
    stream = Stream(server.port, [7 + n for n in range(40)], length=1500).start()
    assert stream.wait_for_tokens(5, 60), stream.detail
    struck = time.monotonic()
    stages[1].kill()
    assert stream.ended.wait(CLIENT_WITHIN), "the client waits for a stage that is gone"
    assert stream.end == "error", stream.detail
    assert server.process.wait(END_WITHIN - (time.monotonic() - struck)) == 1
    deadline = struck + END_WITHIN
    while stages[0].is_running() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not stages[0].is_running(), "the other stage stayed behind"
    left = leftovers.after(server.process.pid, names, server.port)
    assert not any(left.values()), left
