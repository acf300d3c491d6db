"""The quantities every verifier is made of; samplers and exact distributions share them.

Notation: p target and q proposal probabilities, a prefix acceptance probability, s residual mass, h
acceptance probability at a position. Rows are tensors, scalars float64 numpy arrays on the host.
"""

import numpy as np
import torch

ROW_SUM_TOLERANCE = 1e-3


def is_normalized(rows: torch.Tensor) -> np.ndarray:
    """Which rows [R, V] are finite, non-negative and sum to 1 within 1e-3: bool [R] on the host."""
    if rows.shape[0] == 0:
        return np.ones(0, dtype=bool)
    # A NaN or an infinity anywhere makes the sum fail the comparison, so two reductions suffice.
    good = ((rows.sum(-1) - 1).abs() < ROW_SUM_TOLERANCE) & (rows.amin(-1) >= 0)
    return good.cpu().numpy()


def probability_ratios(target: np.ndarray, draft: np.ndarray) -> np.ndarray:
    """rho = p(x) / q(x), float64; 0 where q(x) = 0, a token that its row cannot have drawn."""
    possible = draft > 0
    return np.where(possible, target / np.where(possible, draft, 1.0), 0.0)


def prefix_acceptance(rho: np.ndarray, *, method: str = "block") -> np.ndarray:
    """P(at least t tokens are accepted | draft) of block verification.

    a_t = min(1, a_(t-1) * rho_t); for `standard` the conditional probabilities min(1, rho_t).

    Args:
        rho: float64 [..., n].
    Returns:
        float64 [..., n].
    """
    a: np.ndarray = np.minimum(rho, 1.0)
    if method == "block":
        for t in range(1, rho.shape[-1]):
            np.minimum(a[..., t - 1] * rho[..., t], 1.0, out=a[..., t])
    return a


def acceptance_probability(a: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """h = s / (s + 1 - a), and 1 at a = 1: never above a, because s <= a.

    Both the success probability of an inner position of a chain and the ratio that a tree node
    keeps after one of its children has been turned down.
    """
    certain = a >= 1
    return np.where(certain, 1.0, mass / np.where(certain, 1.0, mass + (1.0 - a)))


class CDF:
    """Cumulative mass of unnormalized rows [k, V]: for totals and inverse-CDF draws."""

    def __init__(self, rows: torch.Tensor):
        self.rows = rows
        self.cumulative = rows.double().cumsum(-1)

    @property
    def total(self) -> torch.Tensor:
        """float64 [k]."""
        return self.cumulative[:, -1]

    def draw(self, uniforms: torch.Tensor) -> torch.Tensor:
        """The token at quantile u of each row: int64 [k]; never one of zero mass.

        Args:
            uniforms: float64 [k] in [0, 1), on the rows' device. Rows have positive mass.
        """
        # Rounding must not step past the last token.
        end = torch.nextafter(self.total, torch.zeros_like(self.total))
        goal = torch.minimum(uniforms * self.total, end)[:, None]
        return torch.searchsorted(self.cumulative, goal, right=True)[:, 0]
