# SPDX-License-Identifier: Apache-2.0
"""Sampled tokens on the host, as the last pipeline stage sends them.

The rows of a step are read from files on the host, which needs the step's tokens there.  Asking the device for them
waits for everything that was launched before, the forward of the micro-batch before included: host and device then
work in turns.  With two users in two micro-batches on two H200s a stage of 22 layers waited 2.2 ms after each forward
of 3.4 ms.  But the tokens come from the last stage on a stream of their own, long before that forward ends.  Here they
are copied to the host on that stream, and only that copy is waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.pp_utils import PPHandler

_handlers: list[ReceivedTokens] = []


class Copy:
    """Tokens of one micro-batch on their way to the host; on a CPU they are there."""

    def __init__(self, tokens: torch.Tensor, stream: Any) -> None:
        self.tokens, self._arrived = tokens, None
        if tokens.is_cuda:
            with torch.cuda.stream(stream):
                self.tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
                self.tokens.copy_(tokens, non_blocking=True)
                self._arrived = torch.cuda.Event()
                self._arrived.record(stream)

    def wait(self) -> torch.Tensor:
        """int64 ``[requests, tokens of each]``."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self.tokens


class ReceivedTokens:
    """Watches the handler of a stage that is not the last one.

    Attributes:
        wanted: whether copies are made; a stage without a table in files has no use for them
    """

    def __init__(self, handler: PPHandler) -> None:
        self.wanted = False
        self._handler = handler
        self._copies: dict[int, tuple[Copy, int]] = {}
        self._receive, self._consume = handler.receive, handler.get_prev_sampled_outputs
        handler.receive, handler.get_prev_sampled_outputs = self._received, self._consumed

    def take(self, request_index: int) -> tuple[Copy, int] | None:
        """The copy, and its row, with the newest token of a request that was not taken yet."""
        return self._copies.pop(request_index, None)

    def _received(self, *args: Any, **kwargs: Any) -> bool:
        result = self._receive(*args, **kwargs)
        slot = self._handler.queue[-1]
        if self.wanted and slot is not None:
            slot.host_copy = Copy(slot.sampled_tokens, self._handler.broadcast_stream)
        return result

    def _consumed(self) -> dict[str, Any] | None:
        slot = self._handler.queue[0] if self._handler.queue else None
        result = self._consume()
        copy = getattr(slot, "host_copy", None)
        if copy is not None and result is not None:
            current = self._handler.req_idx_gen_np[slot.idx_mapping_np] == slot.gen_at_receive_np
            for row, request_index in enumerate(slot.idx_mapping_np.tolist()):
                if current[row] and slot.need_sampled_mask[row]:
                    self._copies[request_index] = copy, row
        return result


def watch(handler: PPHandler) -> None:
    """Called as the handler is built, which happens before the model is."""
    _handlers[:] = [] if handler.is_last_rank else [ReceivedTokens(handler)]


def received_tokens() -> ReceivedTokens | None:
    """Of this process's stage; None on the last one and where there is only one."""
    return _handlers[0] if _handlers else None
