"""Probability integral transform: does text follow a known distribution?

The statistics are those of `vllm-hsd verify` (`vllm_hsd.tools.audit`, docs/lossless.md): every
token's place in the target's distribution must be uniform, in orders that know the drafter too, and
independent of what came before. Here the distributions come from tables or transformers in the
place of an engine, and every token counts as a step of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vllm_hsd.tools.audit.directions import marks, rows_of
from vllm_hsd.tools.audit.quantiles import FIGURES, token_ranges
from vllm_hsd.tools.audit.sampled import Texts, checks
from vllm_hsd.tools.audit.statistics import adjusted

# An exact sampler fails with this probability; a biased one must fall below the second bound.
PASSES, REJECTED = 1e-3, 1e-6


def places(
    logits: torch.Tensor, tokens: torch.Tensor, drafter: torch.Tensor | None = None
) -> np.ndarray:
    """[N, FIGURES] float64 of `token_ranges`; with a drafter also `directions.marks`.

    Args:
        logits, drafter: [N, V], of the target and of what drafts, at the tokens' temperature.
        tokens: int64 [N].
    """
    found = [token_ranges(logits, tokens).numpy()]
    if drafter is not None:
        found.append(marks(logits.float().softmax(-1), tokens, rows_of(drafter)))
    return np.concatenate(found, 1)


def p_value(texts: list[np.ndarray]) -> float:
    """p-value of tokens that follow the target and lean to no drafter.

    Args:
        texts: `places` of each text's tokens in order.
    """
    drafters = {"drafter": list[np.ndarray]()} if texts[0].shape[1] > FIGURES else {}
    steps = [[1] * len(own) for own in texts]
    offered = [np.ones(len(own), dtype=bool) for own in texts]
    every = {"settings": [0] * len(texts), "step_lengths": steps, "offered": offered}
    found = checks(Texts([""], rows=drafters, **every), texts, "float32", 0)
    return min(adjusted([check.p_value for check in found]))


def checked_row(
    kind: str,
    name: str,
    texts: list[np.ndarray],
    rate: float,
    control: bool,
    rejected: float | None = REJECTED,
) -> dict[str, Any]:
    """A row of an item's table.

    Args:
        kind: heading of the first column.
        name: in the first column.
        texts: as for `p_value`.
        rate: tokens per target step.
        control: whether the text was biased on purpose.
        rejected: greatest p-value of a control; None where the texts are too short to tell.

    Fails where the text does not follow the target, or the control is not noticed.
    """
    p = p_value(texts)
    if not control and p < PASSES:
        pytest.fail(f"{name}: p-value {p:.2g}, the text does not follow the target.")
    if control and rejected is not None and p > rejected:
        pytest.fail(f"{name}: the biased control is not noticed, p-value {p:.2g}.")
    return {
        kind: name,
        "control": control,
        "tokens": sum(map(len, texts)),
        "tokens_per_step": rate,
        "p_value": f"{p:.2g}",
    }


def sentence(row: dict[str, Any], name: str) -> str:
    """A row of `checked_row` in words."""
    bound = f"at most {REJECTED:g}" if row["control"] else f"at least {PASSES:g}"
    return (
        f"{name}{', biased control' if row['control'] else ''}: p-value {row['p_value']} "
        f"({bound}) over {row['tokens']} tokens, {row['tokens_per_step']:.2f} per step."
    )
