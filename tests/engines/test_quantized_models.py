"""8-bit and 4-bit copies of the target as levels, and quantized targets."""

from pathlib import Path

import pytest
import torch
from engines.test_architectures import JOBS, greedy
from support.engines import run_engine
from support.level_files import cascade

from benchmarks.models.quantize import int8_copy, quantized_copy
from vllm_hsd.tools import system

GROUP = 32
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
    """A copy with weights rounded to 4 bits, in a format of QUANTIZATION_4_BIT or None: its own."""
    from vllm.model_executor.layers.quantization.utils.quant_utils import awq_pack, pack_cols

    def quantized(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, columns = value.shape
        groups = value.view(rows, columns // GROUP, GROUP)
        scale = groups.abs().amax(2, keepdim=True) / 7
        rounded = (groups / scale).round()
        if stored is None:
            return {f"{name}.weight": (rounded * scale).view(rows, columns)}
        # The bits of all three formats: 8 stands for zero.
        bits = (rounded + 8).view(rows, columns)
        packed = pack_cols(bits, 4, rows, columns)
        scale = scale[..., 0]
        if stored == "compressed-tensors":
            return {
                f"{name}.weight_packed": packed,
                f"{name}.weight_scale": scale.contiguous(),
                f"{name}.weight_shape": torch.tensor([rows, columns]),
            }
        # Of zeros GPTQ stores one less.
        gptq = stored == "gptq"
        zeros = torch.full((columns // GROUP, rows), 7 if gptq else 8)
        found = {
            f"{name}.scales": scale.T.contiguous(),
            f"{name}.qzeros": pack_cols(zeros, 4, *zeros.shape),
            f"{name}.qweight": packed.T.contiguous()
            if gptq
            else awq_pack(bits.T, 4, columns, rows),
        }
        if gptq:
            found[f"{name}.g_idx"] = torch.arange(columns, dtype=torch.int32) // GROUP
        return found

    described = stored and {"quant_method": stored, **QUANTIZATION_4_BIT[stored]}
    return str(quantized_copy(source, directory, quantized, described))


FLAGS = system.flags()
# vLLM's kernel for AMX takes 16 bits only.
DTYPE = "bfloat16" if "amx_int8" in FLAGS else "float32"
# Without these instructions oneDNN adds pairs of products in 16 bits, which overflow.
EXACT = bool({"avx512_vnni", "avx_vnni"} & FLAGS)


@pytest.fixture(scope="module")
def int8(family, tmp_path_factory) -> str:
    return str(int8_copy(family.target, tmp_path_factory.mktemp("quantized") / "int8"))


def counts(target: str, *levels: dict) -> list[dict]:
    """Of each level, below greedy text that is asserted to be that of no speculation."""
    engine = {"model": target, "dtype": DTYPE}
    plain, result = (run_engine(engine | drafts, JOBS) for drafts in ({}, cascade(*levels)))
    assert greedy(result) == greedy(plain)
    return result["text"]["levels"]


def test_a_quantized_copy_of_the_target_drafts_for_it(family, int8):
    _, level = counts(family.target, {"ngram": {"max": 3}, "num_tokens": 3}, {"model": int8})
    # It differs from the target by rounding only, where the products are.
    assert (0.7 if EXACT else 0.0) * level["drafted"] < level["accepted"]


def test_a_quantized_target_with_other_drafters(family, int8):
    found = counts(int8, {"early_exit": 1, "num_tokens": 2}, {"model": family.mid})
    assert all(level["accepted"] > 0 for level in found)


@pytest.mark.slow
@pytest.mark.skipif("avx512f" not in FLAGS, reason="vLLM's kernel for 4 bits needs AVX-512")
@pytest.mark.parametrize("stored", QUANTIZATION_4_BIT)
def test_4_bits(family, tmp_path, stored):
    """vLLM's kernel for CPUs runs in 16 bits only, where greedy text may part."""
    rounded = write_int4(family.target, tmp_path / "rounded", None)
    int4 = write_int4(family.target, tmp_path / stored, stored)
    for target, level in ((rounded, int4), (int4, rounded)):
        engine = {"model": target, "dtype": "bfloat16", **cascade({"model": level})}
        (level,) = run_engine(engine, JOBS)["text"]["levels"]
        # Not all: the scales are rounded too.
        assert level["accepted"] > 0.7 * level["drafted"] > 0
