"""Probability integral transform: does text follow a known distribution?

For a token drawn from P, with the tokens in any fixed order and U uniform, P(before it) + U P(it)
is uniform on [0, 1]. Where P is the exact distribution of every token given the text before
it, these values are independent, too, however the text was produced. So pairs of neighbors are
counted in a grid of GRID x GRID equal cells and tested by Pearson's chi-square: it finds a wrong
distribution of single tokens, and a wrong joint distribution of two.

The order is that of falling probability, so that a distribution that is too peaked, or too
flat, moves all values one way. A sampler that leans towards what was drafted does not show there,
so the tokens are also ordered and scored by the drafter's probability over the target's (see
docs/lossless.md), all together and text by text.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from vllm_hsd.lossless.directions import BEFORE, marks, rows_of
from vllm_hsd.lossless.lean import lean_checks
from vllm_hsd.lossless.quantiles import randomized
from vllm_hsd.lossless.statistics import adjusted, alike, uniform

GRID = 12
# The least that a cell is to be expected to hold.
EXPECTED = 5.0
# An exact sampler fails with this probability; a biased one must fall below the second bound.
PASSES, REJECTED = 1e-3, 1e-6


def transformed(
    logits: torch.Tensor, tokens: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Values of the transform, float64 [N] on the CPU.

    Args:
        logits: [N, V], at the temperature that the tokens were drawn at.
        tokens: int64 [N].
        generator: of the CPU.
    """
    probs = logits.double().softmax(-1)
    own = probs.gather(1, tokens[:, None])
    ids = torch.arange(probs.shape[1], device=probs.device)
    before = (probs > own) | ((probs == own) & (ids < tokens[:, None]))
    below = torch.where(before, probs, 0.0).sum(-1).cpu()
    return (
        below + torch.rand(len(tokens), generator=generator, dtype=torch.float64) * own[:, 0].cpu()
    )


def leaning(logits: torch.Tensor, drafter: torch.Tensor, tokens: torch.Tensor) -> np.ndarray:
    """[N, 1 + directions.WIDTH] float64, the tokens' probabilities and then `directions.marks`.

    Args:
        logits, drafter: [N, V], of the target and of what drafts, at the tokens' temperature.
        tokens: int64 [N].
    """
    probs = logits.float().softmax(-1)
    own = probs.gather(1, tokens[:, None]).double().cpu().numpy()
    return np.concatenate((own, marks(probs, tokens, rows_of(drafter))), 1)


def p_value(
    texts: list[np.ndarray], grid: int = GRID, leans: list[np.ndarray] | None = None
) -> float:
    """p-value of independent uniform values, and of tokens that lean to no drafter.

    Args:
        texts: the values of each text in order; neighbors are paired without overlap.
        leans: `leaning` of each text; None if no drafter's distribution is known.

    Raises:
        ValueError: too few values for the grid.
    """
    pairs = [text[: len(text) // 2 * 2].reshape(-1, 2) for text in texts]
    values = np.concatenate(pairs)
    expected = len(values) / grid**2
    if expected < EXPECTED:
        raise ValueError(f"{len(values)} pairs are too few for {grid}^2 cells.")
    cells = np.minimum((values * grid).astype(int), grid - 1)
    counts = np.bincount(cells[:, 0] * grid + cells[:, 1], minlength=grid**2)
    statistic = ((counts - expected) ** 2 / expected).sum()
    p_values = [float(chi2.sf(statistic, grid**2 - 1))]
    if leans is not None:
        every = np.concatenate(leans)
        owner = np.repeat(np.arange(len(leans)), [len(own) for own in leans])
        uniforms = np.random.default_rng(0).random((1, len(every)))
        quantiles = randomized(every[:, : 2 + BEFORE], uniforms)[0]
        labels = np.full(len(every), "1", dtype=object)
        checks = lean_checks("", "drafter", every[:, 1:], labels)
        checks += [
            uniform("", "drafter", "all", quantiles),
            *alike("", "drafter", quantiles, owner),
        ]
        p_values += [check.p_value for check in checks]
    return min(adjusted(p_values))


def checked_row(
    kind: str,
    name: str,
    texts: list[np.ndarray],
    rate: float,
    grid: int,
    control: bool,
    rejected: float | None = REJECTED,
    leans: list[np.ndarray] | None = None,
) -> dict[str, Any]:
    """A row of an item's table.

    Args:
        kind: heading of the first column.
        name: in the first column.
        texts: as for `p_value`.
        rate: tokens per target step.
        control: whether the text was biased on purpose.
        rejected: greatest p-value of a control; None where the texts are too short to tell.
        leans: as for `p_value`.

    Fails where the text does not follow the target, or the control is not noticed.
    """
    p = p_value(texts, grid, leans)
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
