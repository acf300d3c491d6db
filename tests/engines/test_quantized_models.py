"""8-bit and 4-bit copies of the target as levels, and quantized targets."""

from pathlib import Path

import pytest
import torch
from support.engines import ids, run_engine
from support.level_files import cascade

from benchmarks.models.quantize import int8_copy, quantized_copy
from vllm_hsd.tools import system

GROUP = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "dynamic": False}
WEIGHTS |= {"group_size": GROUP}
# format -> quantization_config; 4 bits, groups of GROUP inputs.
QUANTIZATION_4_BIT = {
    "compressed-tensors": {
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    },
    "gptq": {"bits": 4, "group_size": GROUP, "sym": True, "desc_act": False, "lm_head": False},
    "awq": {"bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}


def write_int4(source: str, directory: Path, stored: str | None) -> str:
    """A copy with 4-bit weights, rounded to nearest.

    Args:
        stored: key of QUANTIZATION_4_BIT; None for the rounded weights in the source's own dtype.
    """

    def quantized(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, columns = value.shape
        groups = value.view(rows, columns // GROUP, GROUP)
        scale = groups.abs().amax(2, keepdim=True) / 7
        rounded = (groups / scale).round()
        if stored is None:
            return {f"{name}.weight": (rounded * scale).view(rows, columns)}
        # The bits of all three formats: 8 stands for zero.
        bits = (rounded + 8).to(torch.int64).view(rows, columns)
        scale = scale[..., 0]
        if stored == "compressed-tensors":
            return {
                f"{name}.weight_packed": packed(bits),
                f"{name}.weight_scale": scale.contiguous(),
                f"{name}.weight_shape": torch.tensor([rows, columns]),
            }
        found = {f"{name}.scales": scale.T.contiguous()}
        if stored == "gptq":
            # Stored zeros are one less.
            zeros = torch.full((columns // GROUP, rows), 7)
            groups_of_inputs = torch.arange(columns, dtype=torch.int32) // GROUP
            return found | {
                f"{name}.qweight": packed(bits).T.contiguous(),
                f"{name}.qzeros": packed(zeros),
                f"{name}.g_idx": groups_of_inputs,
            }
        order = torch.arange(rows).view(-1, 8)[:, _AWQ_ORDER].flatten()
        zeros = torch.full((columns // GROUP, rows), 8)
        return found | {
            f"{name}.qweight": packed(bits.T[:, order]),
            f"{name}.qzeros": packed(zeros),
        }

    described = stored and {"quant_method": stored, **QUANTIZATION_4_BIT[stored]}
    return str(quantized_copy(source, directory, quantized, described))


def packed(bits: torch.Tensor) -> torch.Tensor:
    """[n, m / 8] int32 of [n, m] numbers of 4 bits, the first one lowest."""
    shifts = 4 * torch.arange(8)
    words = (bits.reshape(len(bits), -1, 8) << shifts).sum(-1)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32)


PROMPTS = [[(7 * i + j * j) % 60 + 2 for j in range(4 + 9 * i)] for i in range(4)]
PARAMS = [{"temperature": t, "max_tokens": 30, "ignore_eos": True} for t in (0, 0, 0, 1)]
JOBS = {"text": {"prompts": PROMPTS, "params": PARAMS}}
FLAGS = system.flags()
# vLLM's kernel for AMX takes 16 bits only.
DTYPE = "bfloat16" if "amx_int8" in FLAGS else "float32"
# Without these instructions oneDNN adds pairs of products in 16 bits, which overflow.
EXACT = bool({"avx512_vnni", "avx_vnni"} & FLAGS)


@pytest.fixture(scope="module")
def int8(family, tmp_path_factory) -> str:
    return str(int8_copy(family.target, tmp_path_factory.mktemp("quantized") / "int8"))


def greedy(result: dict) -> list[list[int]]:
    return ids(result["text"])[:3]


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
