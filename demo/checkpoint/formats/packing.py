"""Integers into 32-bit words, without a gap.

Value i of a row occupies bits `i * bits` and up of the row's bit string; a value may lie across two words.  That is
what compressed-tensors writes from 0.18 on, and the only layout that vLLM 0.33 can allocate (`ceil(inputs * bits /
32)` words).  compressed-tensors 0.17, which that vLLM pins, packs 4 and 8 bits in the same way, but leaves two bits of
each word empty with 6: five values a word, another number of words, no way to read it.  Hence a packer of our own for
the widths that do not divide 32, held against theirs for those that do (tests/formats/test_layouts.py).
"""

import torch


def pack_rows(values: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [rows, ceil(columns * bits / 32)] of unsigned `values` [rows, columns], each below 2**bits."""
    rows, columns = values.shape
    # 32 values fill `bits` words exactly, so these runs can be packed side by side.
    runs = -(-columns // 32)
    padded = torch.zeros(rows, runs * 32, dtype=torch.int64, device=values.device)
    padded[:, :columns] = values
    padded = padded.view(rows, runs, 32)
    words = torch.zeros(rows, runs, bits, dtype=torch.int64, device=values.device)
    for position in range(32):
        word, shift = divmod(position * bits, 32)
        words[..., word] |= (padded[..., position] << shift) & 0xFFFFFFFF
        if shift + bits > 32:
            words[..., word + 1] |= padded[..., position] >> (32 - shift)
    used = words.view(rows, runs * bits)[:, : -(-columns * bits // 32)]
    # 2**31 and up are the negative int32.
    return torch.where(used >= 2**31, used - 2**32, used).to(torch.int32)
