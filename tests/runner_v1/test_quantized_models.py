"""8-bit and 4-bit copies of the target as levels, and quantized targets."""

import pytest
from support.engines import run_engine
from support.level_files import cascade
from support.quantized import QUANTIZATION_4_BIT, write_int4, write_int8

from vllm_hsd import host

PROMPTS = [[(7 * i + j * j) % 60 + 2 for j in range(4 + 9 * i)] for i in range(4)]
PARAMS = [{"temperature": t, "max_tokens": 30, "ignore_eos": True} for t in (0, 0, 0, 1)]
JOBS = {"text": {"prompts": PROMPTS, "params": PARAMS}}
FLAGS = host.flags()
# vLLM's kernel for AMX takes 16 bits only.
DTYPE = "bfloat16" if "amx_int8" in FLAGS else "float32"
# Without these instructions oneDNN adds pairs of products in 16 bits, which overflow.
EXACT = bool({"avx512_vnni", "avx_vnni"} & FLAGS)


@pytest.fixture(scope="module")
def int8(family, tmp_path_factory) -> str:
    return write_int8(family.target, tmp_path_factory.mktemp("quantized") / "int8")


def greedy(result: dict) -> list[list[int]]:
    return [output[0]["ids"] for output in result["text"]["outputs"][:3]]


def test_a_quantized_copy_of_the_target_drafts_for_it(family, int8):
    target = {"model": family.target, "dtype": DTYPE}
    plain = greedy(run_engine(target, JOBS))
    levels = {"ngram": {"max": 3}, "num_tokens": 3}, {"model": int8}
    result = run_engine({**target, **cascade(*levels)}, JOBS)
    assert greedy(result) == plain
    level = result["text"]["levels"][1]
    # It differs from the target by rounding only, where the products are.
    assert (0.7 if EXACT else 0.0) * level["drafted"] < level["accepted"]


def test_a_quantized_target_with_other_drafters(family, int8):
    target = {"model": int8, "dtype": DTYPE}
    plain = greedy(run_engine(target, JOBS))
    levels = {"early_exit": 1, "num_tokens": 2}, {"model": family.mid}
    result = run_engine({**target, **cascade(*levels)}, JOBS)
    assert greedy(result) == plain
    assert all(level["accepted"] > 0 for level in result["text"]["levels"])


@pytest.mark.slow
@pytest.mark.parametrize("stored", QUANTIZATION_4_BIT)
def test_4_bits(family, tmp_path, stored):
    """As a level of a target with the same rounded weights, and as a target.

    vLLM's kernel for CPUs runs in 16 bits only, where greedy text may part.
    """
    rounded = write_int4(family.target, tmp_path / "rounded", None)
    int4 = write_int4(family.target, tmp_path / stored, stored)
    for target, level in ((rounded, int4), (int4, rounded)):
        engine = {"model": target, "dtype": "bfloat16", **cascade({"model": level})}
        (counts,) = run_engine(engine, JOBS)["text"]["levels"]
        # Not all: the scales are rounded too.
        assert counts["accepted"] > 0.7 * counts["drafted"] > 0
