"""Writer and selection at the published model's shapes, compiled for every card that they are meant for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm.models.qwen4_exp.qsa import score

ARCHS = (80, 86, 89, 90)
#: A kernel that is compiled for every card with other constants.
FEWER = {"fused, bf16": (86,), "rows, int8": (86, 90), "fused, int8, e4m3": (86, 90)}
FEWER |= {"keys copied": (86,), "keys copied, e4m3": (86, 90)}
FEWER |= {f"numbering, {kernel}": (80, 86, 89) for kernel in ("mark", "own", "count", "number", "look_up", "edges")}
#: A kernel that takes other warps on a card.
WARPS = {(f"scores of a {kind}{keys}", 90): {"warps": 4} for kind in ("prompt", "copy") for keys in ("", ", e4m3")}
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
PACKAGE = "vllm.models.qwen4_exp"
SAMPLE = "vllm.v1.worker.gpu.sample"

# I32 is a multiple of 16, i32 is not known to be one; names that are not here are constants.
STRIDES = {f"stride_{part}_{axis}": "I32" for part in ("keys", "values") for axis in ("block", "slot", "head")}
STRIDES |= {f"stride_{part}_{axis}": "i32" for part in ("kscale", "vscale") for axis in ("block", "slot", "head")}
CACHE = {"key_scales_ptr": "*fp32", "value_scales_ptr": "*fp32", "slots_ptr": "*i64", **STRIDES}
CACHE |= {"k_scale": "fp32", "v_scale": "fp32"}


def pointers(kind: str, names: str) -> dict:
    return {f"{name}_ptr": f"*{kind}" for name in names.split()}


def integers(kind: str, names: str) -> dict:
    return dict.fromkeys(names.split(), kind)


SCORE = (
    pointers("bf16", "q k_cache")
    | pointers("i32", "page_table query_start visible keys tops")
    | integers(
        "I32", "stride_q_row stride_q_head stride_cache_page stride_cache_token stride_table stride_keys stride_tops"
    )
    | integers("i32", "first_row num_rows page_table_width tiles")
)
COPY = {name: kind for name, kind in SCORE.items() if name.split("_")[0] in ("k", "page", "query", "visible")}
COPY |= {"out_ptr": "*bf16"} | integers("I32", "stride_cache_page stride_cache_token stride_table stride_out")
COUNT = {"logits_ptr": "*bf16", "counts_ptr": "*i32", "stride": "I32", "vocab_size": "I32"}
SELECT = pointers("i32", "keys run_tops visible out") | integers("I32", "stride_keys stride_tops stride_out")
# Which rows of host memory a prompt's chunk reads; a block of three stages.
NUMBERING = pointers("i32", "selected token_to_req table furthest first counts ends number groups size numbers edges")
NUMBERING |= {"needed_ptr": "*i8"} | integers("i32", "stride_selected stride_table places pages limit size count")
NUMBERING |= {"stride_edges": "i32"}
FUSED = pointers("bf16", "qkv main_cos_sin q_weight k_weight query gate")
FUSED |= {"positions_ptr": "*i64", "main_eps": "fp32"} | integers("I32", "stride_qkv")
FUSED |= integers("i32", "stride_pos_axis stride_pos_token index_programs")
ROWS = pointers("bf16", "key value") | integers(
    "I32", "stride_key_token stride_key_head stride_value_token stride_value_head"
)
SCORE_CONSTANTS = dict(PAGE=392, HEADS=4, DIM=128, BUDGET=512, BLOCK_N=64, RUN=8)
# Upstream's kernel for the indexer alone, in a launch with ours: no main heads, which its main part has to compile with.
INDEXER = (
    pointers("bf16", "q k cos_sin q_norm_weight k_norm_weight q_out state_cache compressed_cache")
    | pointers("i64", "pos state_slots logical_positions compressed_slots")
    | pointers("i32", "state_table query_start_loc k_work_metadata")
    | integers("I32", "q_stride_token k_stride_token q_out_stride_token q_out_stride_head state_cache_stride_block")
    | integers("I32", "state_cache_stride_token compressed_cache_stride_block compressed_cache_stride_token")
    | integers("i32", "pos_stride_axis pos_stride_token state_table_stride_req num_tokens num_state_blocks")
    | integers("i32", "num_compressed_blocks num_k_work")
    | {"eps": "fp32"}
)
INDEXER_CONSTANTS = dict(HQ=4, D=128, TILE_T_Q=2, TILE_H_Q=2, COMPRESS_RATIO=4, STATE_SIZE=4, COMP_PAGE_SIZE=392)
INDEXER_CONSTANTS |= dict(IS_2D_POSITIONS=False, IS_K_MROPE=False, CACHE_HAS_ROPE_POS=False, MROPE_H=0, MROPE_W=0)
FUSED_CONSTANTS = dict(MAIN_BLOCK_SIZE=1568, MAIN_D=256, MAIN_ROTARY=64, MAIN_Q_HEADS=24, MAIN_KV_HEADS=2, MAIN_AXES=3)
FUSED_CONSTANTS |= dict(MAIN_SECTION_H=11, MAIN_SECTION_W=10) | INDEXER_CONSTANTS


def cases() -> dict[str, dict]:
    found = {
        "scores of a decode": (
            "qsa.score._score_kernel",
            SCORE,
            SCORE_CONSTANTS | dict(QUERY_LEN=1, TILE_R=4, STAGES=1, EVICTION="evict_first"),
            4,
        ),
        "scores of a prompt": (
            "qsa.score._score_kernel",
            SCORE,
            SCORE_CONSTANTS | dict(QUERY_LEN=0, TILE_R=score._PROMPT_ROWS, STAGES=2, EVICTION=""),
            8,
        ),
        "keys copied": (
            "qsa.unpaged._copy_kernel",
            COPY,
            dict(PAGE=392, DIM=128, WIDTH=128, BUDGET=512, KEYS=64, AT_ONCE=1024),
            4,
        ),
        "512 of 2,048": ("qsa.select._select_kernel", SELECT, dict(RUN=8, BUDGET=512, RUNS=256, HELD=256), 1),
        "512 of 65,536": ("qsa.select._select_kernel", SELECT, dict(RUN=8, BUDGET=512, RUNS=8192, HELD=512), 4),
        "logits that are no numbers": (f"{SAMPLE}.damaged_logits._count_kernel", COUNT, dict(PART=8192), 4),
        "rows, int8": ("qsa.write.rows._write_rows_kernel", ROWS | CACHE, dict(BLOCK_SIZE=1568, D=256, KIND=2), 1),
    }
    for kernel, constants, warps in (
        ("mark", dict(WIDTH=2051, BLOCK_SIZE=12528, RATIO=4, COLUMNS=512), 4),
        ("own", dict(BLOCK_SIZE=12528, PLACES=512), 4),
        ("count", dict(BLOCK_SIZE=12528, RATIO=4, GROUPS=1024), 4),
        ("number", dict(BLOCK_SIZE=12528, RATIO=4, GROUPS=1024), 4),
        ("look_up", dict(WIDTH=2051, BLOCK_SIZE=12528, RATIO=4, BEYOND=2**31 - 1, COLUMNS=512), 4),
        ("edges", dict(WIDTH=2051, STEPS=12, EDGES=32), 1),
    ):
        found[f"numbering, {kernel}"] = (f"qsa.host_kv.numbering.{kernel}_kernel", NUMBERING, constants, warps)
    for name, number, storage in (("bf16", 0, "bf16"), ("fp8", 1, "u8"), ("int8", 2, "i8")):
        types = INDEXER | FUSED | CACHE | pointers(storage, "keys values")
        found[f"fused, {name}"] = (
            "compact_kv.one_launch.prepare_kernel",
            types,
            FUSED_CONSTANTS | dict(MAIN_KIND=number),
            1,
        )
    # Index keys in e4m3: scores read words, the indexer writes bytes.
    for name, types in (
        ("scores of a decode", pointers("i32", "q k_cache")),
        ("scores of a prompt", pointers("i32", "q k_cache")),
        ("fused, int8", pointers("u8", "q_out compressed_cache")),
    ):
        kernel, bf16, *rest = found[name]
        found[f"{name}, e4m3"] = (kernel, bf16 | types, *rest)
    found["keys copied, e4m3"] = (
        found["keys copied"][0],
        COPY | pointers("i32", "k_cache") | pointers("fp16", "out"),
        *found["keys copied"][2:],
    )
    for keys, number in (("", "bf16"), (", e4m3", "fp16")):
        kernel, types, constants, warps = found[f"scores of a prompt{keys}"]
        found[f"scores of a copy{keys}"] = (
            kernel,
            types | pointers(number, "k_cache"),
            constants | dict(PAGE=0, STAGES=score._COPY_STAGES),
            warps,
        )
    found["rows, int8"][1].update(pointers("i8", "keys values"))
    return {
        name: {
            "module": kernel.rpartition(".")[0]
            if kernel.startswith("vllm.")
            else f"{PACKAGE}.{kernel.rpartition('.')[0]}",
            "kernel": kernel.rpartition(".")[2],
            "types": types,
            "constants": constants,
            "warps": warps,
            "stages": 3,
        }
        for name, (kernel, types, constants, warps) in found.items()
    }


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[tuple[str, int], dict]:
    asked = {
        (name, arch): {**case, "arch": arch, **WARPS.get((name, arch), {})}
        for name, case in cases().items()
        for arch in FEWER.get(name, ARCHS)
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_job.py"))],
        input=json.dumps(list(asked.values())),
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(asked, json.loads(done.stdout)))


@pytest.mark.parametrize("name, arch", [(n, a) for n in sorted(cases()) for a in FEWER.get(n, ARCHS)])
def test_it_fits_and_spills_nothing(compiled, name, arch):
    result = compiled[name, arch]
    assert result["shared"] <= SHARED[arch]
    assert result["spills"] == 0


@pytest.mark.parametrize("keys", ["", ", e4m3"], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("arch", ARCHS)
def test_decodes_and_prompts_multiply_alike(compiled, arch, keys):
    """One family of instructions and one depth, so that a row's products add up in one order in either.

    Operands that were narrower could be dealt out four neighbours to a thread, and other sixteen be summed at a time.
    """

    def depth(name: str) -> set[str]:
        shapes = (i for i in compiled[name + keys, arch]["instructions"] if "k16" in i)
        return {i.split(".")[0] + "k" + i.split("k")[-1] for i in shapes}

    assert depth("scores of a decode") == depth("scores of a prompt") == depth("scores of a copy") != set()
    for kind in ("decode", "prompt", "copy"):
        assert set(compiled[f"scores of a {kind}{keys}", arch]["packed"]) <= {"2"}
