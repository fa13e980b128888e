"""Names in /dev/shm go once the memory is mapped, and only the rank's own."""

from vllm.distributed.device_communicators import nameless_shm
from vllm.distributed.device_communicators.nameless_shm import drop_name


def test_only_the_own_name_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(nameless_shm, "SHM", tmp_path)
    for rank in (0, 1):
        (tmp_path / f"group-pp:0-[0-1]-cpushm_{rank}").touch()
    drop_name("group-pp:0-[0-1]-cpushm", 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["group-pp:0-[0-1]-cpushm_0"]


def test_a_name_that_is_gone_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(nameless_shm, "SHM", tmp_path)
    drop_name("group", 0)
