# SPDX-License-Identifier: Apache-2.0
"""One exception per way K/V in host memory can be refused."""


class KVOffloadRefused(ValueError):
    """A setting that K/V in host memory cannot be combined with.

    Attributes:
        setting: as the user writes it
        value: its value
    """

    def __init__(self, setting: str, value: object, why: str, remedy: str) -> None:
        # All arguments go to ``args``: the exception travels from a worker to the engine.
        super().__init__(setting, value, why, remedy)
        self.setting, self.value = setting, value
        self._sentence = f"--qsa-config kv_offload=true does not go with {setting} ({value!r}), which {why} {remedy}"

    def __str__(self) -> str:
        return self._sentence


class HostKVDoesNotFit(ValueError):
    """Host memory, or the KV cache on a GPU, is too small for one request. Carries the table of both."""


class HostMemoryRefused(RuntimeError):
    """The system gave no host memory, or would not lock it. Says how much was asked for and what limits there are."""
