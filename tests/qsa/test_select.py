"""Selection: exact, ties by position, the same whatever the batch, and nothing outside its rows.

Numbers are small whole ones, whose sums are exact in any order: numpy, which multiplies for the interpreter, adds in
an order that follows the shape of a tile. That a GPU's does not is measured by benchmarks.qsa_write_select.
"""

from types import SimpleNamespace

import pytest
import torch

from tests.cpu.qsa_inputs import Batch, nan_pages
from vllm.models.qwen4_exp import qsa_workspace
from vllm.models.qwen4_exp.cpu import qsa as twin
from vllm.models.qwen4_exp.qsa import e4m3, score, select, unpaged

HEADS, WIDTH, PAGE, RATIO = 4, 32, 4, 4
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def work_space(monkeypatch):
    """A work space of 9 KiB, full of garbage, so that batches are scored in parts; returns its setter."""
    torch.manual_seed(0)

    def give(words: int) -> torch.Tensor:
        buffer = torch.randint(-(2**31), 2**31 - 1, (words,)).int()
        monkeypatch.setitem(qsa_workspace._buffers, CPU, buffer)
        return buffer

    give(2304)
    return give


def whole(*shape: int) -> torch.Tensor:
    return torch.randint(-8, 9, shape).bfloat16()


class Case:
    """A batch with its compressed keys; ``kinds`` different ones, few where ties are wanted.

    All of its numbers are e4m3's too, so that the definition is the same for either ``dtype``.
    """

    def __init__(self, lengths, queries, kinds=None, dtype=torch.bfloat16):
        self.batch = Batch(lengths, queries, page_size=PAGE, ratio=RATIO)
        self.cache = nan_pages(self.batch.num_pages, PAGE, 1, WIDTH)
        pool = whole(kinds or 1, WIDTH)
        for request, length in enumerate(lengths):
            for group in range(length // RATIO):
                slot = self.batch.slot(request, group, PAGE)
                key = pool[torch.randint(kinds, (1,))] if kinds else whole(1, WIDTH)
                self.cache[slot // PAGE, slot % PAGE] = key
        self.q = whole(sum(queries), HEADS, WIDTH).to(dtype)
        self.cache = self.cache.to(dtype)

    def scores(self, row: int) -> list[float]:
        request, count = int(self.batch.token_to_req[row]), int(self.batch.visible[row])
        slots = [self.batch.slot(request, group, PAGE) for group in range(count)]
        keys = [self.cache[s // PAGE, s % PAGE, 0].float() for s in slots]
        keys = torch.stack(keys) if slots else torch.empty(0, WIDTH)
        return torch.relu(self.q[row].float() @ keys.T).sum(0).tolist()

    def by_rank(self, keep: int) -> torch.Tensor:
        """The definition: rank by score, then by position, and keep the first."""
        rows = []
        for row in range(self.q.shape[0]):
            scores = self.scores(row)
            best = sorted(sorted(range(len(scores)), key=lambda g: (-scores[g], g))[:keep])
            rows.append(best + [-1] * (keep - len(best)))
        return torch.tensor(rows).int()

    def prefill(self, module, keep: int) -> torch.Tensor:
        out = torch.full((self.q.shape[0], keep), -7, dtype=torch.int32)
        b = self.batch
        # As in a mixed batch: offsets of rows that follow some decodes.
        starts = b.query_start_loc + 6
        module.qsa_select_paged_prefill(
            self.q,
            self.cache,
            b.block_table,
            starts,
            b.visible,
            keep * RATIO,
            RATIO,
            max(b.queries),
            out,
            max(b.lengths),
        )
        return out

    def decode(self, module, keep: int) -> torch.Tensor:
        out = torch.full((self.q.shape[0], keep), -7, dtype=torch.int32)
        b = self.batch
        module.qsa_select_paged_decode(
            self.q, self.cache, b.block_table, b.visible, keep * RATIO, RATIO, b.queries[0], out
        )
        return out


MODULES = pytest.mark.parametrize("module", [select, twin], ids=["kernel", "twin"])
E4M3 = torch.float8_e4m3fn
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=["bf16", "e4m3"])


@MODULES
@pytest.mark.parametrize(
    ("kinds", "keep", "dtype"),
    [(kinds, keep, torch.bfloat16) for kinds in (None, 3) for keep in (2, 5, 16)] + [(None, 5, E4M3), (3, 16, E4M3)],
    ids=str,
)
def test_prefill(module, kinds, keep, dtype):
    """Uneven requests; 2 of up to 5 runs and 16 of 80 groups, so that both levels rank."""
    case = Case([320, 3, 17, 70], [13, 3, 17, 1], kinds, dtype)
    assert torch.equal(case.prefill(module, keep), case.by_rank(keep))


@pytest.fixture
def copies(monkeypatch, work_space) -> list[torch.Tensor]:
    """A work space with room for copies of keys, which any prompt makes; what they are."""
    work_space(1 << 15)
    made: list[torch.Tensor] = []
    monkeypatch.setattr(unpaged, "LEAST_ROWS", 1)
    monkeypatch.setattr(select, "unpaged", lambda *args: made.append(unpaged.unpaged(*args)) or made[-1])
    return made


@DTYPES
@pytest.mark.parametrize("kinds", [None, 3], ids=["scores differ", "three scores"])
def test_a_prompt_whose_keys_are_copied(copies, monkeypatch, dtype, kinds):
    """Uneven requests, one that sees no more than the budget, one whose rows are read in three parts."""
    monkeypatch.setattr(unpaged, "_VISIBLE_AT_ONCE", 8)
    case = Case([320, 3, 37, 170], [19, 3, 17, 1], kinds, dtype)
    assert torch.equal(case.prefill(select, 9), case.by_rank(9))
    assert [copy.shape for copy in copies] == [(4, 128, WIDTH)]


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("dtype, damages", [(torch.bfloat16, (torch.nan, torch.inf)), (E4M3, (torch.nan, -torch.nan))])
def test_damage_in_copied_keys(copies, dtype, damages):
    """A damaged group is selected by every row that sees it, a damaged query selects the first; other rows do not change."""
    case = Case([320], [20], dtype=dtype)
    case.q[..., 3] = 1.0
    want = case.by_rank(4)
    for damage in damages:
        slot = case.batch.slot(0, 76, PAGE)
        sound = case.cache.clone()
        case.cache[slot // PAGE, slot % PAGE, 0, 3] = damage
        case.q[19, 2, 5] = torch.nan
        got = case.prefill(select, 4)
        seen = case.batch.visible > 76
        assert (got == 76).any(1)[:19].tolist() == seen[:19].tolist() == [False] * 7 + [True] * 12
        assert torch.equal(got[~seen], want[~seen])
        assert got[19].tolist() == [0, 1, 2, 3]
        case.cache, case.q[19, 2, 5] = sound, 0.0
    assert len(copies) == len(damages)


@DTYPES
def test_a_copy_stays_in_its_part(dtype):
    """Of requests that rank: what their rows see, and nothing behind it; of e4m3 in the order in which a decode sums."""
    case = Case([320, 12, 90], [5, 2, 3], dtype=dtype)
    b = case.batch
    words = unpaged.copy_words(3, 128, WIDTH)
    case.cache.view(torch.uint8)[..., :2][case.cache[..., 0].float() > 1] = 0xFF  # NaN in both dtypes
    spaces = [torch.full((words + 8,), -7, dtype=torch.int32) for _ in range(2)]
    arguments = case.cache, b.block_table, b.query_start_loc + 6, b.visible, 128, 5
    copy, reference = unpaged.unpaged(*arguments, spaces[0]), unpaged.unpaged_reference(*arguments, spaces[1])
    untouched = copy.view(torch.int32) == -7
    assert torch.equal(untouched, reference.view(torch.int32) == -7) and (spaces[0][words:] == -7).all()
    numbers = [each[~untouched.repeat_interleave(2, -1)].float() for each in (copy, reference)]
    assert torch.equal(*(each.nan_to_num(nan=-1e5) for each in numbers)) and numbers[0].isnan().any()
    for request, written in enumerate((80, 0, 22)):
        keys = [case.cache[divmod(b.slot(request, group, PAGE), PAGE)][0] for group in range(written)]
        want = torch.stack(keys).float() if keys else torch.empty(0, WIDTH)
        if dtype is E4M3:
            want = torch.cat([want[:, 0::2], want[:, 1::2]], dim=1) * e4m3.SCALE
        assert torch.equal(copy[request, :written].float().nan_to_num(), want.nan_to_num())
        assert untouched[request, written:].all()


def test_when_keys_are_copied():
    """128 rows of each request on average, and half of the work space."""
    words = unpaged.copy_words(2, 65536, 128)
    assert words == 2 * 65536 * 128 // 2
    assert unpaged.pays(256, 2, 65536, 128, 2 * words)
    assert not unpaged.pays(255, 2, 65536, 128, 2 * words)
    assert not unpaged.pays(256, 2, 65536, 128, 2 * words - 1)


@pytest.mark.parametrize(
    "rows, most, query_len, step",
    [(2048, 181, 0, 160), (2048, 853, 0, 704), (7, 181, 0, 32), (40, 31, 0, 20), (9, 4, 1, 3)],
)
def test_launches_are_of_whole_tiles(rows, most, query_len, step):
    assert score.rows_at_once(rows, most, query_len) == step


@MODULES
@DTYPES
@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("kinds", [None, 2], ids=["scores differ", "two scores"])
def test_decode(module, query_len, kinds, dtype):
    case = Case([320, 7, 133], [query_len] * 3, kinds, dtype)
    assert torch.equal(case.decode(module, 4), case.by_rank(4))


@MODULES
@pytest.mark.parametrize("groups", [4, 5, 6, 16, 17, 79, 80, 81])
def test_about_the_budget_and_a_run(module, groups):
    case = Case([groups * RATIO], [1])
    assert torch.equal(case.decode(module, 5), case.by_rank(5))


@pytest.mark.parametrize("kinds", [None, 3], ids=["scores differ", "three scores"])
def test_runs_that_all_fit_are_not_ranked(kinds):
    """A budget of 256 groups holds all 256 runs of the narrowest kernel: only groups are ranked."""
    case = Case([1200, 1030], [2, 1], kinds)
    assert select._shape(300, 256)["RUNS"] == select._shape(300, 256)["HELD"]
    assert torch.equal(case.prefill(select, 256), case.by_rank(256))


@MODULES
def test_equal_scores_keep_the_earliest(module):
    case = Case([320], [9], kinds=1)
    visible = case.batch.visible
    want = [[g if g < int(v) else -1 for g in range(16)] for v in visible]
    assert case.prefill(module, 16).tolist() == want
    case.q.fill_(0)
    assert case.prefill(module, 16).tolist() == want


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@MODULES
@pytest.mark.parametrize(
    ("damage", "factor", "dtype"),
    [(d, 1.0, torch.bfloat16) for d in (torch.nan, -torch.nan, torch.inf)]
    + [(d, f, E4M3) for d in (torch.nan, -torch.nan) for f in (1.0, -1.0, 0.0)],
    ids=str,
)
def test_a_damaged_group_is_always_selected(module, damage, factor, dtype):
    """Dropped quietly, it would leave a request that nobody ends."""
    case = Case([320], [1], dtype=dtype)
    slot = case.batch.slot(0, 41, PAGE)
    case.cache[slot // PAGE, slot % PAGE, 0, 3] = damage
    case.q[..., 3] = factor
    assert 41 in case.decode(module, 2)[0].tolist()


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@MODULES
def test_a_damaged_query_selects_the_first(module):
    """Every score of its row is none, and positions decide: the damage reaches the logits by the main query."""
    case = Case([320], [3], dtype=E4M3)
    case.q[1, 2, 5] = torch.nan
    got = case.decode(module, 4)
    assert got[1].tolist() == [0, 1, 2, 3]
    case.q[1, 2, 5] = 0.0
    assert torch.equal(got[[0, 2]], case.by_rank(4)[[0, 2]])


def test_a_row_does_not_depend_on_its_neighbours_or_on_the_cut(work_space):
    """Alone, in a batch, in parts of another size, as a decode: the same bits."""
    case = Case([320, 90, 200], [20, 5, 20], kinds=6)
    together = case.prefill(select, 8)
    work_space(1 << 16)
    assert torch.equal(case.prefill(select, 8), together)
    b = case.batch
    for request, first in ((0, 0), (2, 25)):
        for row in (first, first + 7, first + 19):
            out = torch.full((1, 8), -7, dtype=torch.int32)
            table = b.block_table[request : request + 1]
            visible = b.visible[row : row + 1]
            select.qsa_select_paged_decode(case.q[row : row + 1], case.cache, table, visible, 32, RATIO, 1, out)
            assert torch.equal(out[0], together[row])
            select.qsa_select_paged_prefill(
                case.q[row : row + 1], case.cache, table, torch.tensor([3, 4]), visible, 32, RATIO, 1, out, 320
            )
            assert torch.equal(out[0], together[row])


def test_a_row_of_e4m3_is_the_same_as_a_prompt_and_as_a_decode():
    case = Case([200, 90], [3, 3], kinds=6, dtype=E4M3)
    assert torch.equal(case.prefill(select, 8), case.decode(select, 8))


def test_nothing_is_written_beside_the_rows(work_space):
    """Guards around the output and behind the work space of exactly one row stay."""
    case = Case([320], [5])
    columns = 256
    buffer = work_space(columns + columns // 8 + 8)
    tail = buffer[-8:].clone()
    around = torch.full((9, 7), -7, dtype=torch.int32)
    out = around[2:7, 1:6]
    b = case.batch
    select.qsa_select_paged_prefill(
        case.q, case.cache, b.block_table, b.query_start_loc, b.visible, 20, RATIO, 5, out, 320
    )
    assert torch.equal(out, case.by_rank(5))
    around[2:7, 1:6] = -7
    assert (around == -7).all()
    assert torch.equal(buffer[-8:], tail)


def test_a_work_space_too_small_for_a_row(work_space):
    work_space(60)
    with pytest.raises(RuntimeError, match="set VLLM_SPARSE_INDEXER_MAX_LOGITS_MB to at least 1"):
        Case([320], [1]).decode(select, 4)


def test_a_budget_too_large_for_registers():
    q = torch.zeros(1, HEADS, WIDTH).bfloat16()
    out = torch.empty(1, 2048, dtype=torch.int32)
    table = torch.zeros(1, 100_000, dtype=torch.int32)
    cache = torch.zeros(1, PAGE, 1, WIDTH).bfloat16()
    with pytest.raises(ValueError, match="a budget of 2048 groups of 400000 needs 65536 integers"):
        select.qsa_select_paged_decode(q, cache, table, torch.zeros(1).int(), 8192, RATIO, 1, out)
    with pytest.raises(ValueError, match="lower --max-model-len"):  # a short prompt of a long context
        select.qsa_select_paged_prefill(
            q, cache, table, torch.tensor([0, 1]), torch.zeros(1).int(), 8192, RATIO, 1, out, 4
        )


@pytest.mark.parametrize("capability, warps", [(80, 8), (86, 8), (89, 8), (90, 4), (100, 4), (120, 8)])
def test_one_warp_group_where_there_are_such(monkeypatch, capability, warps):
    platform = SimpleNamespace(has_device_capability=lambda least: capability >= least)
    monkeypatch.setattr(score, "current_platform", platform)
    assert score._prompt_warps() == warps


@pytest.mark.parametrize("capability, programs", [(80, 20), (86, 10), (89, 10), (90, 20), (100, 20), (120, 10)])
def test_programs_that_run_at_once(monkeypatch, capability, programs):
    monkeypatch.setattr(
        score, "current_platform", SimpleNamespace(has_device_capability=lambda least: capability >= least)
    )
    monkeypatch.setattr(score, "num_compute_units", lambda: 10)
    assert score._programs_at_once() == programs


@pytest.mark.parametrize(
    "row_tiles, key_tiles, at_once, tiles",
    [(5, 977, 264, 19), (22, 256, 264, 22), (64, 32, 264, 8), (5, 977, 82, 31), (22, 256, 82, 24), (1, 9, 264, 1)]
    + [(6400, 977, 82, 33)],
)
def test_no_few_programs_are_left_over(row_tiles, key_tiles, at_once, tiles):
    """On an H200 and on a 3090: 2,048 rows at 250,000, 65,536 and 8,192 tokens, a few keys, and many requests."""
    assert score._prompt_tiles(row_tiles, key_tiles, at_once) == tiles
    programs = row_tiles * -(-key_tiles // tiles)
    used = row_tiles * key_tiles / (-(-programs // at_once) * tiles * at_once)
    assert used > 0.9 or key_tiles <= 32


def test_parts_are_of_one_size(monkeypatch, work_space):
    """23 rows where 9 fit: three parts of at most 8, not two of 9 and a rest."""
    case = Case([320], [23])
    work_space(9 * (128 + 128 // 8))
    parts = []
    monkeypatch.setattr(select, "score_groups", lambda *args: parts.append(len(args[-1])) or score.score_groups(*args))
    assert torch.equal(case.prefill(select, 5), case.by_rank(5))
    assert parts == [8, 8, 7]


@DTYPES
def test_warm_up_reads_nothing(dtype):
    cache = nan_pages(2, PAGE, 1, WIDTH).to(dtype)
    table = torch.full((3, 200), 10**6, dtype=torch.int32)
    assert select.warm_up(cache, table, HEADS, 20, RATIO, 2) == [
        "decode of 1",
        "decode of 2",
        "prefill of 800 groups",
        "prefill of 128 rows",
    ]


def test_warm_up_compiles_every_power_of_two(work_space):
    work_space(1 << 14)
    table = torch.full((1, 2500), 10**6, dtype=torch.int32)
    compiled = select.warm_up(nan_pages(2, PAGE, 1, WIDTH), table, HEADS, 20, RATIO, 1)
    widths = (10_000, 8192, 4096, 2048)
    assert compiled == ["decode of 1"] + [f"prefill of {n} groups" for n in widths] + ["prefill of 128 rows"]
    shapes = [select._shape(columns, 5) for columns in range(1, 10_001)]
    assert [select._shape(n, 5) for n in reversed(widths)] == [s for i, s in enumerate(shapes) if s not in shapes[:i]]
