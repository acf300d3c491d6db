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
    """[N] by the tokens of a draft what one more of it costs: as much as the first one, at least.

    Where those after it cost more, as much as each of those up to the cheapest end; where a pass
    over more tokens takes less time, always.

    Args:
        verify: [N + 1] that the target reads so many tokens of a request, see `Plan`.
    """
    known = verify[verify < FORBIDDEN]
    found, tokens = np.full(len(verify) - 1, verify[1]), np.arange(len(known))
    more = tokens - tokens[:-1, None]
    each = (known - known[:-1, None]) / np.maximum(more, 1)
    found[: len(each)] = np.where(more > 0, each, np.inf).min(axis=1)
    return found if (np.diff(known) < 0).any() else np.maximum(found, verify[1])


def cut(
    survival: np.ndarray, verify: np.ndarray, drafting: np.ndarray, fill: float = 1.0
) -> tuple[np.ndarray, float]:
    """Which tokens pay for their price, and what they gain above it.

    Survival never rises along a draft, so what is kept of it is a draft; the same holds for trees.

    Args:
        survival: [n, N] of tokens by places; 0 for none.
        verify: see `Plan`.
        drafting: [N + 1] by places that are used, what it costs to draft.
        fill: share of the drafts that will hold any token.

    Returns:
        (bool [n, N], what is gained); of nothing that pays, none and 0.
    """
    places = np.arange(survival.shape[1])
    used = places[: int(survival.any(0).sum())]
    # From the surest token on, by the last place that is used.
    order = np.argsort(-survival, axis=None, kind="stable")[: np.count_nonzero(survival)]
    sure, held = survival.ravel()[order], order % len(places) <= used[:, None]
    more = np.minimum((fill * held.cumsum(1)).astype(np.int64), len(verify) - 1)
    net = fill * (sure * held).cumsum(1) - verify[more] - drafting[used + 1, None]
    if not net.size or net.max() <= 0:
        return np.zeros(survival.shape, dtype=bool), 0.0
    last, least = np.unravel_index(net.argmax(), net.shape)
    return (survival >= sure[least]) & (places <= last), float(net[last, least])
