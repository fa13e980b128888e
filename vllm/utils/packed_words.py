# SPDX-License-Identifier: Apache-2.0
"""Integers in 32-bit words, as compressed-tensors packs a row of a weight.

Releases from 0.18 on write one string of bits: value i occupies bits `i * bits` and up, and may lie across two words.
Releases up to 0.17 put as many whole values into a word as fit, `32 // bits`, and leave the rest empty; vLLM 0.33 pins
0.17 and allocates `ceil(inputs * bits / 32)` words, which is the other layout.  For 2, 4 and 8 bits both are the same.
"""

import torch

#: Values whose bits fill whole words, for any width.
_RUN = 32
#: Rows in a pass are bounded by this many values: they take 8 bytes each while they are moved.
_PASS = 1 << 24


def pack_rows(values: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [rows, ceil(columns * bits / 32)] of unsigned `values` [rows, columns], each below 2**bits; no gaps."""
    rows, columns = values.shape
    runs = -(-columns // _RUN)
    padded = torch.zeros(rows, runs * _RUN, dtype=torch.int64, device=values.device)
    padded[:, :columns] = values
    padded = padded.view(rows, runs, _RUN)
    words = torch.zeros(rows, runs, bits, dtype=torch.int64, device=values.device)
    for position in range(_RUN):
        word, shift = divmod(position * bits, 32)
        words[..., word] |= (padded[..., position] << shift) & 0xFFFFFFFF
        if shift + bits > 32:
            words[..., word + 1] |= padded[..., position] >> (32 - shift)
    used = words.view(rows, runs * bits)[:, : -(-columns * bits // 32)]
    # 2**31 and up are the negative int32.
    return torch.where(used >= 2**31, used - 2**32, used).to(torch.int32)


def unpack_gapped(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """int64 [rows, columns], unsigned, of int32 `words` [rows, ceil(columns / (32 // bits))] with gaps."""
    shifts = torch.arange(32 // bits, device=words.device) * bits
    values = (words.long().unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return values.flatten(1)[:, :columns]


def without_gaps(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """The values of `words`, as `unpack_gapped` takes them, packed as `pack_rows` does.

    Raises:
        ValueError: `words` has another width
    """
    width = -(-columns // (32 // bits))
    if words.dim() != 2 or words.shape[1] != width:
        raise ValueError(f"{columns} values of {bits} bits take rows of {width} words with gaps, not {[*words.shape]}")
    step = max(1, _PASS // max(columns, 1))
    return torch.cat([pack_rows(unpack_gapped(part, bits, columns), bits) for part in words.split(step)])
