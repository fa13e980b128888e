"""The cases: which fault strikes which stage, and in which phase of the server's life."""

from dataclasses import dataclass

FAULTS = ("SIGKILL", "SIGSTOP", "MemoryError")
#: In place of a stage: the process that schedules for all of them.
ENGINE = -1
PHASES = ("load", "warm-up", "idle", "prefill", "decode")


@dataclass(frozen=True)
class Case:
    fault: str
    phase: str
    stage: int

    def __post_init__(self) -> None:
        if self.fault not in FAULTS or self.phase not in PHASES:
            raise ValueError(f"no case {self.name!r}: faults are {FAULTS}, phases {PHASES}")

    @property
    def name(self) -> str:
        return f"{self.fault}-{self.phase}-{'engine' if self.stage == ENGINE else self.stage}"

    @property
    def raising_call(self) -> str | None:
        """The worker's method that runs out of memory, for the fault that is raised rather than sent."""
        if self.fault != "MemoryError":
            return None
        return {"load": "load_model", "warm-up": "sample_tokens"}.get(self.phase, "execute_model")


def cases(stages: int) -> list[Case]:
    """Signals to the last stage, which everyone waits for; MemoryError also in the first, whose answers nobody reads.

    A warm-up fails in the last stage's sampler, for which the first stage waits.  An idle server executes nothing that
    could run out of memory.  The engine's process is struck during decode.
    """
    last = stages - 1
    return [
        *(
            Case(fault, phase, last)
            for fault in ("SIGKILL", "SIGSTOP")
            for phase in ("load", "idle", "prefill", "decode")
        ),
        Case("MemoryError", "load", last),
        Case("MemoryError", "warm-up", last),
        *(Case("MemoryError", phase, stage) for phase in ("prefill", "decode") for stage in (0, last)),
        *(Case(fault, "decode", ENGINE) for fault in ("SIGKILL", "SIGSTOP")),
    ]
