"""What the place of a cut in a prompt does to an answer, on a CPU: the noise under which a stress run compares.

    python -m benchmarks.cut_noise MODEL REFERENCE [--job N] [--record FILE]

REFERENCE is what `benchmarks/pp_stress.py` wrote: every prompt of its pool alone on one stage under four cuts.  Choices that
all cuts share say how far a cut moves a choice.  Job N is answered once more under each chunk size, and the groups are
counted that the queries of each sparse layer choose otherwise than in the prompt's usual chunks.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from benchmarks import one_stage, record
from benchmarks.pp_stress import ENGINE, pool

RECORD = record.FOLDER / "pipeline-cpu-cuts.json"
#: Chunks of a multiple of 64 tokens, then others.
SIZES = (512, 256, 64, 500, 300, 97, 23)
RECURRENT = 64  # tokens that the recurrent layers compute at a time


def first_other(answer: dict, other: dict) -> int:
    """Tokens that two answers share from their beginning."""
    pairs = zip(answer["tokens"], other["tokens"])
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(answer["tokens"]))


def moved(answers: list[dict]) -> dict:
    """By how much a cut moves the distance of the best choice from the second best, in nats, over a pool's answers."""
    moves, turned, ahead = [], set(), []
    for number, answer in enumerate(answers):
        for other in answer["cuts"].values():
            same = first_other(answer, other)
            moves += [abs(answer["gaps"][at] - other["gaps"][at]) for at in range(same)]
            if same < len(answer["tokens"]):
                turned.add(number)
                ahead.append(answer["gaps"][same])
    found = torch.tensor(moves)
    return {
        "choices": len(moves),
        **{f"{share:g} % below": round(float(found.quantile(share / 100)), 3) for share in (50, 99, 99.9)},
        "largest": round(float(found.max()), 3),
        "answers": len(answers),
        "answers that a cut turns": len(turned),
        "turned when ahead by at most": max(ahead, default=0.0),
    }


class Selections:
    """Watches what the sparse layers select for one request alone, or has them select what they did before."""

    def __init__(self, layers: int) -> None:
        from vllm.models.qwen4_exp.cpu.qsa import select

        self._layers, self._inner = layers, select._select
        self._calls: list[torch.Tensor] = []
        self._fixed: list[torch.Tensor] | None = None
        select._select = self._watched

    def begin(self, fixed: list[torch.Tensor] | None = None) -> None:
        """A request comes; with `fixed`, of `chosen`, its queries read those groups, as far as they go."""
        self._calls, self._fixed = [], fixed

    def chosen(self) -> list[torch.Tensor]:
        """For each layer `[queries, groups of the budget]`."""
        # Every step calls each layer once, in order.
        return [torch.cat(self._calls[layer :: self._layers]) for layer in range(self._layers)]

    def _watched(self, q, k_cache, pages, visible, out) -> None:
        self._inner(q, k_cache, pages, visible, out)
        if self._fixed is not None:
            layer = len(self._calls) % self._layers
            done = sum(len(call) for call in self._calls[layer :: self._layers])
            rows = self._fixed[layer][done : done + len(out)]
            out[: len(rows)] = rows
        self._calls.append(out.clone())


def otherwise(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """`[queries]`: groups of `mine` that `theirs` has not; both `[queries, groups]`, -1 where there is none."""
    found = (mine.unsqueeze(2) == theirs.unsqueeze(1)).any(2)
    return (~found & (mine >= 0)).sum(1)


def under_sizes(model: str, job: dict) -> list[dict]:
    """Answers for each of SIZES beside the first's.

    `layers` counts queries, up to where the answers part, that select otherwise than in the first, and their groups;
    `usual` is the answer with the same chunks when every query reads the groups that it read in the first.
    """
    llm = one_stage.engine(model, **ENGINE)
    config = llm.vllm_config.model_config.hf_text_config
    sparse = [at for at, kind in enumerate(config.layer_types) if kind == "indexed_attention"]
    seen, rows, whole, usual = Selections(len(sparse)), [], None, None
    for size in SIZES:
        seen.begin()
        found = one_stage.answer(llm, job, lambda _, size=size: size)
        chosen = seen.chosen()
        whole, usual = whole or found, usual or chosen
        queries = len(job["prompt"]) + first_other(whole, found) - 1
        layers = {}
        for layer, mine, theirs in zip(sparse, chosen, usual):
            groups = otherwise(mine[:queries], theirs[:queries])
            layers[layer] = {"queries": queries, "otherwise": int((groups > 0).sum()), "groups": int(groups.sum())}
        seen.begin(fixed=usual)
        again = one_stage.answer(llm, job, lambda _, size=size: size)
        rows.append({"chunk": size, **found, "layers": layers, "usual": again})
    return rows


def transformers(model: str, job: dict, tokens: list[int], dtype: torch.dtype) -> list[float]:
    """For each of the tokens, by how many nats transformers has it ahead of the best other; below 0, behind."""
    from demo.reference import load

    ids = torch.tensor([job["prompt"] + tokens[:-1]])
    with torch.inference_mode():
        logits = load(Path(model), dtype)(input_ids=ids, use_cache=False).logits[0, len(job["prompt"]) - 1 :].float()
    wanted = torch.tensor(tokens).unsqueeze(1)
    return [
        round(x, 3)
        for x in (logits.gather(1, wanted) - logits.scatter(1, wanted, -torch.inf).amax(1, True))[:, 0].tolist()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("reference", type=Path)
    parser.add_argument("--job", type=int, default=35, help="of the pool, one of the long ones (default: 35)")
    parser.add_argument("--record", type=Path, default=RECORD)
    asked = parser.parse_args()
    answers = json.loads(asked.reference.read_text())
    job = pool()[asked.job]
    rows = under_sizes(asked.model, job)
    theirs = {
        str(dtype)[6:]: transformers(asked.model, job, rows[0]["tokens"], dtype)
        for dtype in (torch.float32, torch.bfloat16)
    }
    aligned = [row for row in rows if row["chunk"] % RECURRENT == 0]
    changed = sum(layer["otherwise"] for row in aligned for layer in row["layers"].values())
    record.write(
        asked.record,
        {
            "command": f"python -m benchmarks.cut_noise MODEL REFERENCE --job {asked.job}",
            "checkpoint": "python -m demo.checkpoint MODEL",
            "prompt": len(job["prompt"]),
        },
        [{"pool": moved(answers)}, {"transformers, ahead by": theirs}, *rows],
        [
            record.Claim(f"selections that cuts at multiples of {RECURRENT} change", changed, "selections", 0, "<="),
        ],
    )


if __name__ == "__main__":
    main()
