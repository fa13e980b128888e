"""Ranks share memory only where they see the same /dev/shm."""

import os
from types import SimpleNamespace

import pytest

from vllm.distributed.device_communicators import shm_place
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed


@pytest.fixture
def place(monkeypatch):
    shm_place.place.cache_clear()
    yield shm_place.place
    shm_place.place.cache_clear()


def name() -> str:
    return _CPUSHMDistributed.make_group_name(SimpleNamespace(unique_name="pp:0", ranks=[0, 1]))


def elsewhere(place) -> str:
    place.cache_clear()
    return place()


def test_one_place_has_one_name(place, monkeypatch):
    monkeypatch.setenv("VLLM_DIST_IDENT", "51000")
    assert elsewhere(place) == elsewhere(place)
    assert name() == f"51000-{place()}-pp:0-[0-1]-cpushm"


def test_another_machine_is_another_place(place, monkeypatch, tmp_path):
    """The rendezvous' port, all that the name held before, is the same on every machine."""
    here = elsewhere(place)
    (tmp_path / "boot_id").write_text("another boot")
    monkeypatch.setattr(shm_place, "BOOT_ID", tmp_path / "boot_id")
    assert elsewhere(place) != here


def test_a_container_with_its_own_memory_is_another_place(place, monkeypatch):
    here = elsewhere(place)
    monkeypatch.setattr(shm_place, "SHM", "/proc")
    assert os.stat("/proc").st_dev != os.stat("/dev/shm").st_dev and elsewhere(place) != here


def test_a_ray_node_is_another_place(place, monkeypatch):
    ray = pytest.importorskip("ray")
    here = elsewhere(place)
    monkeypatch.setattr(shm_place, "is_in_ray_actor", lambda: True)
    found = []
    for node in ("a" * 56, "b" * 56):
        monkeypatch.setattr(ray, "get_runtime_context", lambda node=node: SimpleNamespace(get_node_id=lambda: node))
        found.append(elsewhere(place))
    assert len({here, *found}) == 3
