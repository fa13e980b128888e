"""Scores and the best groups of each row: times beside upstream's, and whether ours are exact and always the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch

from benchmarks.qsa_write_select import tried
from benchmarks.qsa_write_select.timing import timed
from vllm.models.qwen4_exp import qsa_workspace
from vllm.models.qwen4_exp.nvidia.ops import qsa_indexer as upstream
from vllm.models.qwen4_exp.qsa import score, select, unpaged
from vllm.models.qwen4_exp.qsa.index_keys import rounded

HEADS, WIDTH, RATIO = 4, 128, 4
#: Index keys by the name that rows carry.  e4m3 is measured at the longest contexts only, where keys are what is read.
KEYS = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
LONGEST = 2


@dataclass
class Scene:
    """Requests with `context` tokens each, of which the last `rows` are this step's.

    With `kinds`, keys are copies of so many: most scores are equal then. `dtype` is of keys and queries.
    """

    requests: int
    rows: int
    context: int
    longest: int
    budget: int
    page: int
    device: str
    kinds: int | None = None
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        pages = -(-self.context // RATIO // self.page)
        width = -(-self.longest // RATIO // self.page)
        keys = torch.randn(self.kinds or self.requests * pages * self.page, WIDTH, device=self.device).bfloat16()
        if self.kinds:
            keys = keys[torch.randint(self.kinds, (self.requests * pages * self.page,), device=self.device)]
        self.cache = rounded(keys, self.dtype).view(-1, self.page, 1, WIDTH)
        order = torch.randperm(self.requests * pages, device=self.device).int().view(self.requests, pages)
        self.table = torch.zeros(self.requests, width, dtype=torch.int32, device=self.device)
        self.table[:, :pages] = order
        count = self.requests * self.rows
        self.q = rounded(torch.randn(count, HEADS, WIDTH, device=self.device), self.dtype)
        positions = torch.arange(self.context - self.rows, self.context, device=self.device).repeat(self.requests)
        self.visible = ((positions + 1) // RATIO).int()
        self.starts = (torch.arange(self.requests + 1, device=self.device) * self.rows).int()
        self.out = torch.full((count, self.budget // RATIO), -7, dtype=torch.int32, device=self.device)

    def call(self, module, as_prompt: bool) -> Callable[[], None]:
        head = (self.q, self.cache, self.table)
        if as_prompt:
            prefill = module.qsa_select_paged_prefill
            return partial(
                prefill, *head, self.starts, self.visible, self.budget, RATIO, self.rows, self.out, self.context
            )
        return partial(module.qsa_select_paged_decode, *head, self.visible, self.budget, RATIO, self.rows, self.out)

    def result(self, module, as_prompt: bool) -> torch.Tensor:
        self.out.fill_(-7)
        self.call(module, as_prompt)()
        return self.out.clone()

    def bytes_moved(self) -> int:
        """Each request's keys once, each row's scores and tops written, and what the selection reads of them."""
        columns = self.visible.long().sum().item()
        kept, run = self.budget // RATIO, score.RUN
        keys = self.requests * (self.context // RATIO) * WIDTH * self.cache.element_size()
        return (
            keys + columns * 4 * 2 // run + columns * 4 + self.q.nbytes + self.out.nbytes + len(self.q) * kept * run * 4
        )

    def multiplications(self) -> int:
        return self.visible.long().sum().item() * HEADS * WIDTH


def scores(scene: Scene, as_prompt: bool) -> torch.Tensor:
    """The integers of every row, as the kernel leaves them; -1 where a row sees nothing."""
    columns = -(-scene.context // RATIO // score.BLOCK_N) * score.BLOCK_N
    budget = scene.budget // RATIO
    keys = torch.full((len(scene.q), columns), -1, dtype=torch.int32, device=scene.device)
    tops = torch.full((len(scene.q), columns // score.RUN), -1, dtype=torch.int32, device=scene.device)
    starts, query_len = (scene.starts, 0) if as_prompt else (None, scene.rows)
    score.score_groups(
        scene.q, scene.cache, scene.table, starts, query_len, scene.rows, scene.visible, budget, 0, keys, tops
    )
    return keys


def checks(scene: Scene, repeats: int = 5) -> dict:
    """Rows of ours that are not what the kernel's own scores rank, change between runs, or differ as a prompt or decode."""
    budget = scene.budget // RATIO
    first = scene.result(select, as_prompt=True)
    ordered = scores(scene, as_prompt=True)
    rank = ordered.long() * ordered.shape[1] + torch.arange(ordered.shape[1] - 1, -1, -1, device=scene.device)
    want = rank.topk(budget, dim=-1).indices.sort(-1).values.int()
    ranked = scene.visible > budget
    wrong = (first != want).any(-1) & ranked
    unsteady = sum((scene.result(select, True) != first).any(-1).sum().item() for _ in range(repeats))
    row = {
        "rows_not_exact": wrong.sum().item(),
        "rows_that_change_in_repeats": unsteady,
    }
    if scene.rows <= 4:
        row["scores_that_differ_as_decode"] = (scores(scene, False) != ordered).sum().item()
        row["rows_that_differ_as_decode"] = (scene.result(select, False) != first).any(-1).sum().item()
    return row


def upstream_checks(scene: Scene, repeats: int = 5) -> dict:
    """How upstream's operator does: rows whose set of groups changes between runs, or is not ours."""
    decode = scene.rows <= 4
    first = scene.result(upstream, not decode).sort(-1).values
    again = [scene.result(upstream, not decode).sort(-1).values for _ in range(repeats)]
    ours = scene.result(select, not decode).sort(-1).values
    return {
        "upstream_rows_that_change_in_repeats": sum((other != first).any(-1).sum().item() for other in again),
        "upstream_rows_unlike_ours": (first != ours).any(-1).sum().item(),
    }


def upstream_reads(scene: Scene) -> bool:
    """Its top-k is a CUDA operator, and its kernels have an fp8 pointer from sm_89 on."""
    if scene.device == "cpu":
        return False
    return scene.dtype is torch.bfloat16 or torch.cuda.get_device_capability(scene.device) >= (8, 9)


class _NotLaunched:
    """Stands for a kernel that a measurement leaves out."""

    def __getitem__(self, grid) -> Callable:
        return lambda *args, **options: None


def times(scene: Scene, rate: float | None, tries: bool) -> Iterator[dict]:
    """Fields of rows: upstream's and ours, whole and the scores alone, and ours with other internal settings."""
    prompt = scene.rows > 4
    measured = partial(timed, device=scene.device, moved=scene.bytes_moved(), rate=rate)
    calls = [("ours", scene.call(select, prompt), select, "_select_kernel", _NotLaunched())]
    if upstream_reads(scene):
        calls.insert(0, ("upstream", scene.call(upstream, prompt), upstream, "_topk", lambda *args: None))
    for name, call, module, rest, nothing in calls:
        yield {"what": name} | measured(call)
        with mock.patch.object(module, rest, nothing):
            yield {"what": f"{name}, scores alone"} | measured(call)
    settings = tried.PROMPT if prompt else tried.DECODE
    for name, changes in settings.items() if tries else ():
        with tried.applied(changes):
            yield {"what": f"ours, {name}"} | measured(calls[-1][1])


def measure(
    contexts: list[int], users: list[int], chunk: int, longest: int, budget: int, page: int, device: str,
    rate: float | None, tries: bool = False, keys: Iterable[str] = KEYS,
) -> Iterator[dict]:  # fmt: skip
    """Decodes of so many users and one chunk of a prompt at each context, ours and upstream's."""
    narrow = sorted(contexts)[-LONGEST:]
    cases = [(form, context) for form in keys for context in (contexts if form == "bf16" else narrow)]
    for name, context in cases:
        for requests, rows in [*((count, 1) for count in users), (1, chunk)]:
            made = partial(Scene, requests, context=context, longest=longest, budget=budget, page=page, device=device)
            made = partial(made, dtype=KEYS[name])
            scene = made(rows=rows)
            row = {"part": "select", "context": context, "requests": requests, "rows": rows, "budget": budget}
            row |= {"keys": name, "multiplications": scene.multiplications()}
            for fields in times(scene, rate, tries):
                yield row | fields
            for what, kinds in (("scores differ", None), ("40 scores", 40)):
                # Rows enough for their keys to be copied, which `scores` reads in their pages.
                case = made(rows=min(rows, unpaged.LEAST_ROWS), kinds=kinds)
                checked = checks(case) | (upstream_checks(case) if upstream_reads(case) else {})
                yield row | {"what": f"checks, {what}", "rows": case.rows} | checked


def workspace_bytes(device: str) -> int:
    return sum(buffer.nbytes for place, buffer in qsa_workspace._buffers.items() if place.type == device.split(":")[0])
