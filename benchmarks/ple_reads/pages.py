"""What a token has to read from a disk, by arithmetic: the kernel reads pages, and rows cross them.

Rows of ``size`` bytes follow each other, so the places in a page where they begin repeat after ``PAGE / gcd(size, PAGE)``
rows.  How many of these cross the page's end depends on where the first row begins: the shard's offset in its file, which
safetensors makes a multiple of 8 and of nothing larger.  The rows of a token are hashes: no two share a page.
"""

from __future__ import annotations

from math import gcd

PAGE = 4096
#: Rows of a token.
HEADS = 16
#: Bytes of a row of 160 values, and of the scale that lies in a tensor of its own, by what the rows are.
FORMS = {"bf16": (320, 0), "fp8": (160, 0), "fp8, scaled by row": (160, 2)}


def crossing(size: int, begin: int) -> float:
    """The share of rows that lie on two pages; ``size`` bytes each, at most a page, the first at byte ``begin``."""
    cycle = PAGE // gcd(size, PAGE)
    return sum((begin + row * size) % PAGE + size > PAGE for row in range(cycle)) / cycle


def crossings(size: int) -> tuple[float, float]:
    """The smallest and the largest share, over all offsets that a shard may have."""
    shares = [crossing(size, begin) for begin in range(0, PAGE, 8)]
    return min(shares), max(shares)


def kib_per_token(form: str, store: str) -> tuple[float, float]:
    """The least that a token reads when nothing of it is cached, at the best and the worst offset of the shards.

    A flat file begins no row that does not end on its page, and has scales in the row's record.
    """
    size, scale = FORMS[form]
    if store == "flat":
        return (HEADS * PAGE / 1024,) * 2
    best, worst = crossings(size)
    # A scale is aligned to its own size: it crosses nothing, and is a page of its own.
    beside = HEADS * bool(scale)
    return tuple((HEADS * (1 + share) + beside) * PAGE / 1024 for share in (best, worst))
