"""Which module gets which scheme.

`MIX` is the allocation of the mixed checkpoints that AutoRound and llm-compressor write (seed: INT4 experts, INT6
attention and shared experts, INT8 for the rest of what is read every token, the low-rank half of the hyper-connections
included), with the groups that fit the small model.  `GPTQ` is the module list of gptqmodel's own definition of this
model: attention, delta net, experts; the indexer, the two small delta-net projections and all of the n-gram layer stay
as they are.  One group size would be usual there; the two here are what its `dynamic` rules are for, and let one
checkpoint stand for both published ones.
"""

import re
from dataclasses import dataclass

from demo.checkpoint.formats.rounding import Scheme


@dataclass(frozen=True)
class Rule:
    """Modules whose name (without `model.language_model.` and the like) ends in `pattern`, and their scheme."""

    pattern: str
    scheme: Scheme

    @property
    def regex(self) -> re.Pattern[str]:
        return re.compile(rf"(^|.*\.){self.pattern}$")


@dataclass(frozen=True)
class Recipe:
    """A checkpoint format (`layout`: gptq, compressed-tensors, its nvfp4-pack-quantized, or modelopt) and its rules, the
    first that matches wins.
    """

    layout: str
    rules: tuple[Rule, ...]

    def scheme(self, module: str) -> Scheme | None:
        """The scheme of a module, None for one that stays in bfloat16."""
        return next((rule.scheme for rule in self.rules if rule.regex.match(module)), None)


_EXPERTS = r"mlp\.experts\.\d+\.(gate|up|down)_proj"
_ATTENTION = r"self_attn\.[qkvo]_proj"
_DELTA_NET = r"linear_attn\.(in_proj_qkv|in_proj_z|out_proj)"
_SHARED_EXPERT = r"mlp\.shared_expert\.(gate|up|down)_proj"

INT4_G128, INT6_G64, INT8_G128, INT8_G32 = Scheme(4, 128), Scheme(6, 64), Scheme(8, 128), Scheme(8, 32)

MIX = Recipe(
    "compressed-tensors",
    (
        Rule(_EXPERTS, INT4_G128),
        Rule(_ATTENTION, INT6_G64),
        Rule(_SHARED_EXPERT, INT6_G64),
        Rule(_DELTA_NET, INT8_G128),
        Rule(r"input_mix_weight_down", INT8_G128),
        # 320 inputs in the published model, 96 in the small one: neither is a multiple of 128.
        Rule(r"input_mix_weight_up", INT8_G32),
        Rule(r"embed_tokens", INT8_G128),
        Rule(r"lm_head", INT8_G128),
    ),
)

GPTQ = Recipe(
    "gptq",
    (
        Rule(_EXPERTS, INT4_G128),
        Rule(_ATTENTION, Scheme(4, 32)),
        Rule(_DELTA_NET, Scheme(4, 32)),
        Rule(_SHARED_EXPERT, Scheme(4, 32)),
    ),
)


def _body(layout: str, experts: Scheme, dense: Scheme) -> Recipe:
    """Experts in one scheme, everything else that is usually packed in another, nothing beyond."""
    return Recipe(
        layout, (Rule(_EXPERTS, experts), *(Rule(p, dense) for p in (_ATTENTION, _DELTA_NET, _SHARED_EXPERT)))
    )


RECIPES = {
    "mix": MIX,
    "gptq": GPTQ,
    # One scheme at a time, to see what each alone does.
    "gptq-g32": _body("gptq", Scheme(4, 32), Scheme(4, 32)),
    "gptq-g128": _body("gptq", INT4_G128, INT4_G128),
    "int6": _body("compressed-tensors", INT4_G128, INT6_G64),
    "int8": _body("compressed-tensors", INT4_G128, Scheme(8, 64)),
    # Four bits of a floating-point number, which only a GPU multiplies with. In ModelOpt's layout sparse attention's q, k and v stay plain:
    # upstream builds them so under this method, whatever a checkpoint says.
    "nvfp4": Recipe(
        "modelopt", tuple(Rule(p, Scheme(4, 16)) for p in (_EXPERTS, r"self_attn\.o_proj", _DELTA_NET, _SHARED_EXPERT))
    ),
    "nvfp4-packed": _body("nvfp4-pack-quantized", Scheme(4, 16), Scheme(4, 16)),
}
