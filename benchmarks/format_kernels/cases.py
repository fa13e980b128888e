"""Module classes of the published model with their widths, and the schemes that checkpoints give them."""

from __future__ import annotations

from dataclasses import dataclass

from demo.checkpoint.formats.modelopt import GROUP
from demo.checkpoint.formats.rounding import Scheme

GPTQ, COMPRESSED, MODELOPT = "gptq", "compressed-tensors", "modelopt"
#: The longest is a prefill chunk's default; the lm_head only ever sees the rows that are sampled from.
TOKENS, SAMPLED = (1, 8, 2048), (1, 8)


@dataclass(frozen=True)
class Geometry:
    """What the widths follow from; the published text config.  `narrow` divides all of them, for a run on the CPU."""

    narrow: int = 1

    def size(self, width: int) -> int:
        # A multiple of 128, so that every group still divides it.
        return width if self.narrow == 1 else max(128, width // self.narrow // 128 * 128)

    @property
    def experts(self) -> tuple[int, int]:
        """Experts and how many a token visits."""
        return (512, 10) if self.narrow == 1 else (8, 2)


@dataclass(frozen=True)
class Case:
    """One layer in one scheme.  `kind`: linear, head, embedding or experts (`outputs` is then the inner width)."""

    module: str
    kind: str
    layout: str
    scheme: Scheme
    inputs: int
    outputs: int
    tokens: tuple[int, ...] = TOKENS

    @property
    def format(self) -> str:
        if self.layout == MODELOPT:
            return "modelopt NVFP4"
        return f"{self.layout} INT{self.scheme.bits} g{self.scheme.group}"


#: module class, inputs, outputs: hidden 2560; 24 heads of 256 with a gate beside q, 2 K/V heads; indexer of 5 x 128;
#: delta net of 16 key and 48 value heads of 128; experts 640 wide; 4 streams of 2560 and rank 320
_ATTENTION = (("q, k, v", 2560, 13312), ("attention output", 6144, 2560))
_FUSED = ("q, k, v and indexer", 2560, 13952)
_DELTA_NET = (("delta net q, k, v, z", 2560, 16384), ("delta net output", 6144, 2560))
_SHARED = (("shared expert gate, up", 2560, 1280), ("shared expert down", 640, 2560))
_LOW_RANK = (("hyper-connection down", 10240, 320, 128), ("hyper-connection up", 320, 10240, 64))
_VOCABULARY = 248_320


def cases(geometry: Geometry) -> list[Case]:
    size, made = geometry.size, []

    def linear(name: str, inputs: int, outputs: int, layout: str, bits: int, group: int) -> None:
        made.append(Case(name, "linear", layout, Scheme(bits, group), size(inputs), size(outputs)))

    for group in (32, 128):
        for name, inputs, outputs in (*_ATTENTION, *_DELTA_NET, *_SHARED):
            linear(name, inputs, outputs, GPTQ, 4, group)
        made.append(Case("experts", "experts", GPTQ, Scheme(4, group), size(2560), size(640)))
    for bits, group in ((6, 64), (8, 128)):
        for name, inputs, outputs in (*_ATTENTION, *_DELTA_NET, *_SHARED):
            linear(name, inputs, outputs, COMPRESSED, bits, group)
    linear(*_FUSED, COMPRESSED, 8, 128)
    for name, inputs, outputs, group in _LOW_RANK:
        linear(name, inputs, outputs, COMPRESSED, 8, group)
    made.append(Case("experts", "experts", COMPRESSED, Scheme(4, 128), size(2560), size(640)))
    for name, inputs, outputs in (*_ATTENTION, *_DELTA_NET, *_SHARED):
        linear(name, inputs, outputs, MODELOPT, 4, GROUP)
    made.append(Case("experts", "experts", MODELOPT, Scheme(4, GROUP), size(2560), size(640)))
    scheme = Scheme(8, 128)
    made.append(Case("lm_head", "head", COMPRESSED, scheme, size(2560), size(_VOCABULARY), SAMPLED))
    made.append(Case("embed_tokens", "embedding", COMPRESSED, scheme, size(2560), size(_VOCABULARY)))
    return made
