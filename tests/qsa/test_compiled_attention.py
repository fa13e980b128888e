"""Attention kernels at real widths, compiled for every card in the table, without one."""

import json
import os
import subprocess
import sys

import pytest

from vllm.models.qwen4_exp.qsa.formats import BF16, FP8, INT8
from vllm.models.qwen4_exp.qsa.tiles import TILES

ARCHS = (80, 86, 89, 90)
BOTH = ("decode", "prefill")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Samples of all architectures, from processes of their own: Triton is not interpreted there."""
    folder = tmp_path_factory.mktemp("compiled")
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder / "cache"), "TRITON_DEFAULT_FP_FUSION": "0"}
    jobs = []
    far = ("decode", "prefill", "section", "place")
    for archs, kinds, options in (
        ((80, 89), BOTH, ()), ((90,), BOTH, ()), ((86,), (*BOTH, "section", "join", "finish", "place"), ()),
        ((86,), far, ("--wide",)), ((86, 90), ("decode",), ("--host", "--formats", "int8")),
    ):  # fmt: skip
        out = folder / f"qsa-{archs[0]}{''.join(options[:1])}.json"
        command = [sys.executable, "-m", "benchmarks.qsa_kernels.compiled", "--table", "--out", str(out)]
        command += ["--arch", *map(str, archs), "--kernels", *kinds, *options]
        jobs.append(
            (out, subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
        )
    for out, process in jobs:
        _, errors = process.communicate(timeout=500)
        # One where a claim of the record fails, which the tests below say better.
        assert process.returncode in (0, 1) and out.exists(), errors.decode()[-2000:]
    return [sample for out, _ in jobs for sample in json.loads(out.read_text())["samples"]]


def test_every_kernel_compiles_for_every_card(compiled):
    made = {
        which: {(s["kernel"], s["format"], s["arch"]) for s in compiled if (s["wide"], s["host"]) == which}
        for which in ((False, False), (True, False), (False, True))
    }
    expected = {(kind, form.name, arch) for kind in ("decode", "prefill") for form, arch in formats_and_archs()}
    # The others on one card: prefill's kernel with a state to start from, and two without products.
    expected |= {("section", form.name, 86) for form in (BF16, FP8, INT8)}
    assert made[False, False] == expected | {(kind, "bf16", 86) for kind in ("join", "finish", "place")}
    # Places of a large pool, on the card with the least room.
    far = {(kind, form.name, 86) for kind in (*BOTH, "section") for form in (BF16, FP8, INT8)}
    assert made[True, False] == far | {("place", "bf16", 86)}
    # Rows of whole lines, as host memory has them.
    assert made[False, True] == {("decode", "int8", 86), ("decode", "int8", 90)}
    assert {(arch, form) for form, arch in formats_and_archs()} == set(TILES)


def formats_and_archs():
    return [(form, arch) for form in (BF16, FP8, INT8) for arch in ARCHS]


def test_nothing_spills(compiled):
    assert [sample for sample in compiled if sample["spills"]] == []


def test_shared_memory_fits_sm_86(compiled):
    assert max(sample["shared"] for sample in compiled if sample["arch"] in (86, 89)) <= 99 << 10


def test_one_byte_rows_are_neither_loaded_nor_converted_one_by_one(compiled):
    """What pairs of bytes and strides known to the compiler are for."""
    for sample in compiled:
        if sample["kernel"] == "prefill" and sample["format"] != "bf16":
            loop, lanes = sample["loop"], sample["warps"] * 32
            # Integers that become fp32 are sums of products, one a head and column.
            scores = 16 * sample["block_n"] / lanes if sample["format"] == "int8" else 0
            assert loop["I2F"] <= scores and loop["I2FP"] <= scores and loop["PRMT"] <= 8
            # Keys and values of a tile, by copies of 16 bytes a lane, and int8's scales, both by one.
            assert loop["LDGSTS"] == sample["block_n"] * 512 / 16 / lanes + (1 if sample["format"] == "int8" else 0)
            # And from shared memory 512 bytes at a time: 16 heads' queries and probabilities, by every warp, and rows.
            queries, p = 16 * 512, 16 * 2 * sample["block_n"]
            assert loop["LDSM"] * 512 == queries + p + 512 * sample["block_n"] / sample["warps"]


def test_int8_keys_are_multiplied_as_they_are(compiled):
    for sample in compiled:
        if sample["kernel"] in ("decode", "prefill"):
            products = sample["loop"]["IMMA"] > 0
            assert products == (sample["format"] == "int8")
            if products:
                # Both pieces of a query have sums of their own, eight columns to a product.
                assert sample["loop"]["begun"] == 2 * sample["block_n"] / 8 / sample["warps"]


def test_decode_looks_up_places_before_its_loop(compiled):
    """What its loop loads besides copies of rows waits for the list and the table in every tile."""
    loops = [sample for sample in compiled if sample["kernel"] == "decode" and sample["split"] > sample["block_n"]]
    assert loops and [sample["loop"]["LDG"] for sample in loops] == [0] * len(loops)
