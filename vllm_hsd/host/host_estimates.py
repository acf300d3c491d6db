"""How sure lookups are of what they have drafted, read on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch

from vllm_hsd.budget.source_choice import SourcesLookup
from vllm_hsd.cascade.level import of_each_token
from vllm_hsd.cascade.proposal_state import ProposalState
from vllm_hsd.levels import LevelConfig


def estimates_of(
    level: LevelConfig, lookup: Any
) -> Callable[[ProposalState, Any], np.ndarray] | None:
    """(state, what the lookup returned) -> [B, n] float64 of the tokens of level 0's draft.

    Each after the ones before it; anything after the end of a draft. None for rows of logits.
    """
    if isinstance(lookup, SourcesLookup):
        return lambda state, _: _of_sources(lookup, state)
    if lookup is None:
        return None
    own = cast(Any, level.drafters[0]).estimates(torch.device("cpu"))
    if own is None:
        return _of_offers
    values = own.values.numpy()
    if own.by_token:
        return lambda state, _: values[np.maximum(_drafted(state, -1), 0)]
    return lambda state, _: np.broadcast_to(
        values[: state.lowest_draft], (state.batch, state.lowest_draft)
    )


def _drafted(state: ProposalState, first: int) -> np.ndarray:
    """[B, n] tokens of the texts, from `first` places after the start of level 0's draft on."""
    places = np.arange(first, first + state.lowest_draft)
    at = state.start[0].numpy()[:, None] + places
    window = state.window.numpy()
    found: np.ndarray = np.take_along_axis(window, np.minimum(at, window.shape[1] - 1), 1)
    return found


def _of_offers(state: ProposalState, offers: Any) -> np.ndarray:
    """Of the text whose continuation was drafted: see `suffix_lookup.Offers`."""
    return _chosen(
        state,
        offers.token_ids.numpy(),
        offers.counts.numpy(),
        of_each_token(offers.confidence.numpy()),
    )


def _of_sources(lookup: SourcesLookup, state: ProposalState) -> np.ndarray:
    slots = state.slot.numpy()
    return _chosen(
        state,
        lookup.token_ids.numpy()[:, slots],
        lookup.counts.numpy()[:, slots],
        lookup.expected.numpy()[:, slots],
    )


def _chosen(
    state: ProposalState, tokens: np.ndarray, counts: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """Of the offers [S, B, n] that begin as the drafts do, the one of most expected tokens."""
    length = state.drafted[0].numpy()
    inside = np.arange(tokens.shape[2]) < length[:, None]
    same = ((tokens == _drafted(state, 0)) | ~inside).all(2) & (counts >= length)
    survival = np.where(inside, np.cumprod(np.minimum(values, 1.0), axis=2), 0.0).sum(2)
    best = np.where(same, survival, -1.0).argmax(0)
    chosen: np.ndarray = values[best, np.arange(len(length))]
    return chosen
