"""One division of the layers for all machines, and the interface that Ray uses for gloo."""

import pytest

from vllm.v1.executor.ray_environment import choose_interface, take_partition

PARTITION, INTERFACE = "VLLM_PP_LAYER_PARTITION", "GLOO_SOCKET_IFNAME"
HERE = {"lo": ["127.0.0.1"], "eno1": ["10.0.0.2", "fe80::1"], "docker0": ["172.17.0.1"]}


@pytest.mark.parametrize(
    "own, servers, taken",
    [
        (None, None, None),
        (None, "17,16,15", "17,16,15"),
        ("17,16,15", "17,16,15", "17,16,15"),
        ("20,20,8", "17,16,15", "17,16,15"),
        ("20,20,8", None, None),
    ],
)
def test_the_servers_division_holds(own, servers, taken):
    environ = {"HOME": "/root"} | ({PARTITION: own} if own else {})
    take_partition(environ, {PARTITION: servers} if servers else {})
    assert environ.get(PARTITION) == taken and environ["HOME"] == "/root"


@pytest.mark.parametrize(
    "own, servers, taken",
    [
        (None, None, "eno1"),
        ("docker0", "eno1", "docker0"),
        # Upstream fills in what is not set, so the server's own stays out of the environment here.
        (None, "docker0", None),
        (None, "enp5s0", "eno1"),
    ],
    ids=[
        "found by Ray's address",
        "the machine's own wins",
        "the server's, where it exists",
        "the server's is not here",
    ],
)
def test_the_interface(own, servers, taken):
    environ = {INTERFACE: own} if own else {}
    choose_interface(environ, {INTERFACE: servers} if servers else {}, "10.0.0.2", HERE)
    assert environ.get(INTERFACE) == taken


def test_an_unknown_address_changes_nothing():
    environ: dict[str, str] = {}
    choose_interface(environ, {}, "192.168.7.7", HERE)
    assert environ == {}
