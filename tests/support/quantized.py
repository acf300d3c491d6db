"""Models with 8-bit and 4-bit weights, in the formats of compressed-tensors, GPTQ and AWQ."""

from pathlib import Path

import torch

from benchmarks.models.quantize import int8_copy, quantized_copy

GROUP = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# format -> quantization_config; 4 bits, groups of GROUP inputs.
QUANTIZATION_4_BIT = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": GROUP,
                    "dynamic": False,
                },
            }
        },
    },
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "sym": True,
        "desc_act": False,
        "lm_head": False,
    },
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "version": "gemm",
    },
}


def write_int8(source: str, directory: Path) -> str:
    """See `int8_copy`."""
    return str(int8_copy(source, directory))


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

    described = None if stored is None else QUANTIZATION_4_BIT[stored]
    return str(quantized_copy(source, directory, quantized, described))


def packed(bits: torch.Tensor) -> torch.Tensor:
    """[n, m / 8] int32 of [n, m] numbers of 4 bits, the first one lowest."""
    shifts = 4 * torch.arange(8)
    words = (bits.reshape(len(bits), -1, 8) << shifts).sum(-1)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32)
