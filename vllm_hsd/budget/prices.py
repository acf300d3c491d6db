"""What is drafted in a step, at what prices, and which tokens are worth theirs."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vllm_hsd.budget.goodput import FORBIDDEN
from vllm_hsd.cascade.level import StepLevels

NOTHING = StepLevels()


class Round(NamedTuple):
    """A further pass of the model that drafts for the target, with what drafts for it below.

    Attributes:
        price: of all requests, in accepted tokens.
        tokens: [longest] float64, by the tokens of a draft the price of each one that it adds.
        emitted: tokens that it adds to a request's draft, in the mean.
    """

    price: float
    tokens: np.ndarray
    emitted: float = 1.0


NOTHING_MORE = Round(0.0, np.zeros(1))


@dataclass
class Plan:
    """What is drafted in one step, and at what prices.

    The ranks of a tensor-parallel target have clocks that differ, and must agree on one's.

    Attributes:
        verify: [M + 1] float64, that the target reads m more tokens of all requests together, in
            accepted tokens; what is more than M costs as much.
        selection: levels and draft lengths.
        further: see `Round`.
        gained: by the search for the offer, in accepted tokens above the price of verifying them.
    """

    verify: np.ndarray
    selection: StepLevels = NOTHING
    further: Round = NOTHING_MORE
    gained: float = 0.0


def further_tokens(verify: np.ndarray) -> np.ndarray:
    """[N] by the tokens of a draft what one more of it costs: as much as the first one.

    Where a pass over more tokens takes less time, as much as each of those up to the cheapest end.

    Args:
        verify: [N + 1] that the target reads so many tokens of a request, see `Plan`.
    """
    found = np.full(len(verify) - 1, verify[1])
    known = verify[verify < FORBIDDEN]
    if (np.diff(known) < 0).any():
        for n in range(len(known) - 1):
            found[n] = ((known[n + 1 :] - known[n]) / np.arange(1, len(known) - n)).min()
    return found


def cut(survival: np.ndarray, verify: np.ndarray, fill: float = 1.0) -> tuple[float, float]:
    """The least survival that pays for a token, and what all such tokens gain above their price.

    Survival never rises along a draft, so what is kept of it is a draft; the same holds for trees.

    Args:
        survival: of all tokens of all requests, any shape; 0 for none.
        verify: see `Plan`.
        fill: share of the drafts that will hold any token.

    Returns:
        (infinity where no token pays, what is gained).
    """
    gains = -np.sort(-survival[survival > 0])
    if not len(gains):
        return np.inf, 0.0
    more = (fill * np.arange(1, len(gains) + 1)).astype(np.int64)
    net = fill * np.cumsum(gains) - verify[np.minimum(more, len(verify) - 1)]
    best = int(net.argmax())
    return (float(gains[best]), float(net[best])) if net[best] > 0 else (np.inf, 0.0)
