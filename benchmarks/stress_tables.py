"""Tables of stress runs over stages, and of the noise that they compare under. Imports no vLLM."""

from __future__ import annotations

from benchmarks.markdown import table
from benchmarks.record import FOLDER, every, read

CUTS = FOLDER / "pipeline-cpu-cuts.json"
#: answer position that one stage and two stages differed at
CHOICE = 17


def noise() -> str:
    """How far cuts move choices, over all answers of the pool."""
    pool = read(CUTS)["samples"][0]["pool"]
    return (
        f"Of {pool['choices']:,} choices under three other cuts half moved by less than {pool['50 % below']:.2f} nats, one in "
        f"a hundred by more than {pool['99 % below']:.2f}, one in a thousand by more than {pool['99.9 % below']:.2f}, the "
        f"furthest by {pool['largest']:.2f}. {pool['answers that a cut turns']} of {pool['answers']} answers have a token that "
        f"some cut turns; the best was ahead by up to {pool['turned when ahead by at most']:.2f} there.\n"
    )


def cuts() -> str:
    """One prompt in chunks of several sizes."""
    _, theirs, *rows = read(CUTS)["samples"]
    layers = list(rows[0]["layers"])
    lines = [
        [
            str(row["chunk"]),
            *(f"{row['layers'][layer]['otherwise']:,} of {row['layers'][layer]['queries']:,}" for layer in layers),
            f"{row['gaps'][CHOICE]:.3f}",
            f"{row['usual']['gaps'][CHOICE]:.3f}",
        ]
        for row in rows
    ]
    for dtype, ahead in theirs["transformers, ahead by"].items():
        lines.append([f"transformers, {dtype}", *("–" for _ in layers), f"{ahead[CHOICE]:.3f}", "–"])
    heads = [f"queries of layer {layer} that select otherwise" for layer in layers]
    return table(["tokens of a chunk", *heads, "token 59 ahead by, nats", "with the first line's selections"], lines)


def runs() -> str:
    lines = []
    for found in every("pipeline-*-stress*.json"):
        for run in found["samples"]:
            again = run.get("asked again under the same cuts", {})
            lines.append(
                [
                    found["hardware"].get("gpus") or f"CPU, {found['hardware']['cores']} cores",
                    f"{run['seconds']:.0f} s",
                    f"{run['finished']:,} and {run['aborted']:,}",
                    f"{run['tokens compared']:,} of {run['tokens served']:,}",
                    str(run["answers that differ"]),
                    str(run.get("answers that differ anywhere", "–")),
                    f"{again['same tokens']} of {again['answers']}" if again else "–",
                    str(run.get("unexplained", "–")),
                ]
            )
    heads = ["on", "under load", "finished and aborted", "tokens compared", "differ where decided", "differ anywhere"]
    return table([*heads, "same again under their cuts", "unexplained"], lines)


#: the tables of docs/ampere-multigpu/pipeline.md, by the words of their markers
PAGE = {"stress runs": runs, "noise of cuts": noise, "one prompt under cuts": cuts}
