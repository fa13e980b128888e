"""Stages over time as an SVG: a panel for each run, a row for each stage, a box for each micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .engine import Trace
from .results import idle_share

WIDTH, LEFT, ROW, GAP = 900, 70, 18, 4
HEAD, FOOT = 26, 26
#: distinguishable with the usual colour blindnesses, on white
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
PREFILL = "#333333"


@dataclass(frozen=True)
class Panel:
    """A run, what is written above it, and the milliseconds of it that are drawn."""

    title: str
    trace: Trace
    begin: float
    end: float


def draw(panels: Sequence[Panel]) -> str:
    """An SVG document. Micro-batches with the same users have one colour; prefill is dark."""
    heights = [HEAD + panel.trace.stages * (ROW + GAP) + FOOT for panel in panels]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {sum(heights)}" '
        f'width="{WIDTH}" height="{sum(heights)}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{sum(heights)}" fill="#ffffff"/>',
    ]
    top = 0
    for panel, height in zip(panels, heights):
        parts += [f'<g transform="translate(0 {top})">', *_panel(panel), "</g>"]
        top += height
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel) -> list[str]:
    trace = panel.trace
    scale = (WIDTH - LEFT - 60) / (panel.end - panel.begin)
    parts = [f'<text x="{LEFT}" y="17" font-weight="bold">{escape(panel.title)}</text>']
    idle = idle_share(trace, panel.begin, panel.end)
    for stage in range(trace.stages):
        y = HEAD + stage * (ROW + GAP)
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">stage {stage}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{(panel.end - panel.begin) * scale:.1f}" height="{ROW}" fill="#eeeeee"/>',
            f'<text x="{WIDTH - 52}" y="{y + 13}">{100 * idle[stage]:.0f}% idle</text>',
        ]
    colours: dict[tuple[str, ...], str] = {}
    for span in trace.gpu:
        begin, end = max(span.begin, panel.begin), min(span.end, panel.end)
        if begin >= end:
            continue
        users = tuple(sorted(span.requests))
        colour = PREFILL if span.prefill_tokens else colours.setdefault(users, COLOURS[len(colours) % len(COLOURS)])
        label = f"{', '.join(users)}: {span.begin:.1f} to {span.end:.1f} ms"
        parts.append(
            f'<rect x="{LEFT + (begin - panel.begin) * scale:.1f}" y="{HEAD + span.stage * (ROW + GAP)}" '
            f'width="{max((end - begin) * scale - 0.5, 0.5):.1f}" height="{ROW}" fill="{colour}">'
            f"<title>{escape(label)}</title></rect>"
        )
    y = HEAD + trace.stages * (ROW + GAP) + 12
    for tenth in range(0, 11, 2):
        at = (panel.end - panel.begin) * tenth / 10
        parts.append(f'<text x="{LEFT + at * scale:.1f}" y="{y}" text-anchor="middle">{at:.0f} ms</text>')
    return parts
