"""What every verifier is made of; samplers and exact distributions share it.

Notation: p target and q proposal probabilities, a prefix acceptance probability, s residual mass, h
acceptance probability at a position.
"""

import torch

ROW_SUM_TOLERANCE = 1e-3


def is_normalized(row: torch.Tensor) -> bool:
    """Whether a row [V] is finite, non-negative and sums to 1 within 1e-3."""
    # A NaN or an infinity anywhere makes the sum fail the comparison, so two reductions suffice.
    return abs(float(row.sum()) - 1) < ROW_SUM_TOLERANCE and bool(row.min() >= 0)


def ratio(row: torch.Tensor, proposal: torch.Tensor, token_id: int) -> float:
    """rho = p(x) / q(x); 0 where q(x) = 0, a token that its row cannot have drawn."""
    q = float(proposal[token_id])
    return float(row[token_id]) / q if q > 0 else 0.0


def residual(a: float, row: torch.Tensor, proposal: torch.Tensor) -> tuple[torch.Tensor, float]:
    """max(a * p - q, 0), a new row [V], and its mass s."""
    rest = (a * row - proposal).clamp_min(0)
    return rest, float(rest.sum())


def acceptance_probability(a: float, mass: float) -> float:
    """h = s / (s + 1 - a), and 1 at a = 1: never above a, because s <= a.

    Both the success probability of an inner position of a chain and the ratio that a tree node
    keeps after one of its children has been turned down.
    """
    return 1.0 if a >= 1 else mass / (mass + 1 - a)


def point_masses(token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """float64 [n, V], one-hot at the tokens [n]; at 0 for an empty position, -1."""
    return torch.nn.functional.one_hot(token_ids.long().clamp(min=0), vocab_size).double()


def draw(row: torch.Tensor, uniform: float) -> int:
    """The token at a quantile in [0, 1) of an unnormalized row [V] with mass; one that has some."""
    cumulative = row.double().cumsum(0)
    # Rounding must not step past the last token.
    end = torch.nextafter(cumulative[-1], torch.zeros_like(cumulative[-1]))
    return int(
        torch.searchsorted(cumulative, torch.minimum(uniform * cumulative[-1], end), right=True)
    )
