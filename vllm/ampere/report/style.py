# SPDX-License-Identifier: Apache-2.0
"""Colour, numbers and columns of plain text."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import TextIO

_CODES = {"red": 31, "yellow": 33, "green": 32, "bold": 1}
WIDTH = 110

Paint = Callable[[str, str], str]


def paint(stream: TextIO = sys.stdout) -> Paint:
    """(text, colour) -> text, coloured where `stream` is a terminal and nobody asked for none (no-color.org)."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty()
    if plain:
        return lambda text, colour: text
    return lambda text, colour: f"\033[{_CODES[colour]}m{text}\033[0m"


def size(count: float) -> str:
    """Decimal units, as disks and memory bandwidths are given: "62.29 GB"."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.2f} GB"


def amount(count: int) -> str:
    """ "120.8 G" of weights."""
    for unit, scale in (("G", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count}"


def columns(rows: Sequence[Sequence[str]], aligned: str) -> list[str]:
    """Lines of a table; `aligned` has one of "<" and ">" for each column."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, aligned, widths)).rstrip() for row in rows
    ]


def wrapped(text: str, indent: str) -> list[str]:
    """A paragraph; names and paths stay whole."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
