# SPDX-License-Identifier: Apache-2.0
"""Find memory that a loader did not write.

Upstream knows which parameters were loaded by name, and looks for unquantized models
only. A name says little: a layer's 512 experts are one parameter, as are q, k and v, and
one of them being there makes the whole count as loaded while the rest is what
``torch.empty`` found.  Here every parameter is filled with a pattern before loading; what
still has it afterwards was not written.

The pattern is one of 8 bytes that no weight has: not a number in every float format of 2
and 4 bytes, and as packed integers as probable as any other 8 bytes: once in 10^19.
Filling and looking cost one write and one read of the weights at the memory's speed,
some 0.1 s for 20 GB on a GPU.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

_WORD = 0x7FA5_7FA5_7FA5_7FA5
#: bytes that are compared at once
_CHUNK = 1 << 26
#: what a parameter held before is kept up to this many bytes: defaults of scales, ones of norms
_KEEP = 1 << 20


@dataclass(frozen=True)
class Hole:
    """What a loader left of one parameter: ``missing`` of its ``total`` elements, the first of them at ``first``."""

    missing: int
    total: int
    first: tuple[int, ...]


class Canaries:
    """A pattern in tensors, until ``holes`` is asked."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill tensors with the pattern.

        Args:
            tensors: by name; those without memory of their own, and those that are not
                contiguous, are passed over (``watched`` says which remain)
        """
        self.watched: set[str] = set()
        self._before: dict[str, torch.Tensor] = {}
        for name, tensor in tensors:
            data = tensor.detach()
            if not _has_plain_memory(data):
                continue
            self.watched.add(name)
            if data.nbytes <= _KEEP:
                self._before[name] = data.clone()
            words, rest = _words(data)
            words.fill_(_WORD)
            rest.copy_(_pattern(rest))

    def holes(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Hole]:
        """Take the pattern out again, and say where it still was.

        What was not written gets its former value where that was kept, and zero elsewhere:
        memory that nobody wrote had no value.

        Args:
            tensors: those of before, or what a loader put in their place
        """
        found = {}
        for name, tensor in tensors:
            data = tensor.detach()
            if name in self.watched and _has_plain_memory(data) and (hole := _hole(data)):
                found[name] = hole
                self._heal(name, data)
        self._before.clear()
        return found

    def _heal(self, name: str, data: torch.Tensor) -> None:
        before = self._before.get(name)
        if before is None or before.nbytes != data.nbytes:
            words, rest = _words(data)
            for chunk in words.split(_CHUNK // 8):
                chunk.masked_fill_(chunk == _WORD, 0)
            rest.masked_fill_(rest == _pattern(rest), 0)
            return
        for now, old in zip(_words(data), _words(before), strict=True):
            left = now == (_WORD if now.dtype is torch.int64 else _pattern(now))
            now.copy_(torch.where(left, old, now))


def _has_plain_memory(data: torch.Tensor) -> bool:
    """Whether a tensor's elements are consecutive 8-byte words, and a rest, of memory that exists."""
    return not data.is_meta and data.numel() > 0 and data.is_contiguous() and data.data_ptr() % 8 == 0


def _words(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor's memory as 8-byte words, and the up to 7 bytes that remain."""
    flat = data.view(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    return flat[:whole].view(torch.int64), flat[whole:]


def _pattern(rest: torch.Tensor) -> torch.Tensor:
    """The first bytes of the pattern, as many as ``rest`` has."""
    return torch.tensor(list(_WORD.to_bytes(8, "little"))[: rest.numel()], dtype=torch.uint8, device=rest.device)


def _hole(data: torch.Tensor) -> Hole | None:
    words, rest = _words(data)
    size, missing, first = data.element_size(), 0, None
    for start, chunk in zip(range(0, words.numel(), _CHUNK // 8), words.split(_CHUNK // 8)):
        left = chunk == _WORD
        if count := int(left.sum()):
            missing += count * 8
            if first is None:
                first = (start + int(left.to(torch.uint8).argmax())) * 8
    # A rest of one byte may be a weight; one that is a whole element of more is not.
    if rest.numel() >= max(size, 2) and torch.equal(rest, _pattern(rest)):
        missing += rest.numel()
        first = words.numel() * 8 if first is None else first
    if first is None:
        return None
    index, place = first // size, []
    for extent in reversed(data.shape):
        index, at = divmod(index, extent)
        place.append(at)
    return Hole(math.ceil(missing / size), data.numel(), tuple(reversed(place)))
