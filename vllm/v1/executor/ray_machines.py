# SPDX-License-Identifier: Apache-2.0
"""What the machines of a Ray cluster hold, asked before a stage is started on any of them.

Each stage reads its weights, and the n-gram table's rows, from its own machine.  A machine without the checkpoint, or
with another vLLM, would otherwise fail minutes later in a traceback that does not say which machine it is from, and one
with a half-copied checkpoint would fail at the first missing tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

#: Seconds within which every machine must have answered.  Ray starts a Python process for it, a second or two.
ANSWER_LIMIT = 120.0


class MachineRefused(ValueError):
    """A machine cannot take its stage; the message names the machine, what it has, what was expected, what to do."""


class MachineSilent(MachineRefused):
    """It did not answer in time."""


class OtherVllm(MachineRefused):
    """It has no vLLM, or another version than the server."""


class CheckpointMissing(MachineRefused):
    """It has no checkpoint at the path of the server's."""


class CheckpointDiffers(MachineRefused):
    """A file of its checkpoint is missing or has another size."""


@dataclass(frozen=True)
class Seat:
    """A place that Ray has reserved for a worker; entry i of a list is for rank i."""

    bundle: int
    node: str
    address: str


@dataclass(frozen=True)
class Machine:
    """One Ray node's answer.

    `vllm` is the version of the installed distribution, "" for none.  `files` maps the names of the checkpoint's files
    to bytes; None where the directory does not exist, and {} where no directory was asked for.
    """

    node: str
    address: str
    host: str
    vllm: str
    files: dict[str, int] | None

    def __str__(self) -> str:
        return f"{self.host} ({self.address}, Ray node {self.node[:8]})"


def _questions() -> Callable[[str], dict[str, Any]]:
    """The function that runs on the machines.

    Made inside another one, so that Ray sends its code rather than its module's name: it needs nothing but the standard
    library there, and a machine without this vLLM can still say so.
    """

    def answer(folder: str) -> dict[str, Any]:
        import importlib.metadata
        import os
        import socket

        try:
            version = importlib.metadata.version("vllm")
        except importlib.metadata.PackageNotFoundError:
            version = ""
        files = {}
        if folder and not os.path.isdir(folder):
            files = None
        elif folder:
            wanted = (".safetensors", ".index.json", "config.json")
            files = {entry.name: entry.stat().st_size for entry in os.scandir(folder) if entry.name.endswith(wanted)}
        return {"host": socket.gethostname(), "vllm": version, "files": files}

    return answer


def survey(seats: Sequence[Seat], folder: str) -> list[Machine]:
    """Ask each node of `seats` once, in their order.

    Args:
        folder: the checkpoint's directory, "" where the model is not one (a name on a hub)

    Raises:
        MachineSilent: a node did not answer within ANSWER_LIMIT.
    """
    nodes = {seat.node: seat.address for seat in seats}
    ask = ray.remote(_questions())
    asked = {
        ask.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(folder): node
        for node in nodes
    }
    done, silent = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_LIMIT)
    if silent:
        node = asked[silent[0]]
        raise MachineSilent(
            f"{nodes[node]} (Ray node {node[:8]}) did not answer within {ANSWER_LIMIT:.0f} s; look at `ray status` and, "
            "on that machine, at /tmp/ray/session_latest/logs/raylet.out"
        )
    answers = {asked[ref]: ray.get(ref) for ref in done}
    return [Machine(node, address, **answers[node]) for node, address in nodes.items()]


def here(folder: str) -> Machine:
    """The same answer from this process, which is what the others must agree with."""
    return Machine(node="", address="", **_questions()(folder))


def check(machines: Sequence[Machine], ours: Machine, folder: str) -> None:
    """Refuse the first machine whose vLLM or checkpoint is not this server's.

    Raises:
        OtherVllm, CheckpointMissing, CheckpointDiffers: see each.
    """
    for machine in machines:
        if machine.vllm != ours.vllm:
            has = f"vllm {machine.vllm}" if machine.vllm else "no vllm"
            raise OtherVllm(
                f"{machine} has {has} and this server vllm {ours.vllm}; install the same there, in the environment that "
                "`ray start` runs in, and start that again"
            )
        if machine.files is None:
            raise CheckpointMissing(
                f"--model {folder} does not exist on {machine}; copy or mount the checkpoint at the same path there: a "
                "stage reads weights and n-gram rows from its own machine"
            )
        for name, size in sorted((ours.files or {}).items()):
            if machine.files.get(name) != size:
                there = f"{machine.files[name]} bytes" if name in machine.files else "missing"
                raise CheckpointDiffers(
                    f"{folder}/{name} is {there} on {machine} and {size} bytes here; copy the checkpoint there again"
                )


def checkpoint_folder(model: str) -> str:
    """The model's directory, "" where it is none: each machine then fetches the model for itself."""
    return os.path.abspath(model) if os.path.isdir(model) else ""


def describe(machines: Sequence[Machine], seats: Sequence[Seat], stages: int) -> str:
    """One line for the log, e.g. "stage 0 on a (10.0.0.1, …); stage 1 on b (10.0.0.2, …)"."""
    by_node = {machine.node: machine for machine in machines}
    ranks_per_stage = len(seats) // stages
    parts: list[str] = []
    for stage in range(stages):
        ranks = seats[stage * ranks_per_stage : (stage + 1) * ranks_per_stage]
        nodes = dict.fromkeys(seat.node for seat in ranks)
        parts.append(f"stage {stage} on " + " and ".join(str(by_node[node]) for node in nodes))
    return "; ".join(parts)


def by_address(address: str) -> tuple[int, ...]:
    """Sorts addresses by their numbers, so that "10.0.0.9" comes before "10.0.0.10"; host names come last."""
    try:
        return (0, *map(int, address.split(".")))
    except ValueError:
        return (1,)
