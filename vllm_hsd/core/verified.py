"""What a level makes of the drafts of the level below: verdicts, and tokens for its own drafts."""

from __future__ import annotations

import numpy as np
import torch

from vllm_hsd.core.drafts import DraftStore, ragged_arange, ragged_starts
from vllm_hsd.core.level_models import Forward, LevelModels
from vllm_hsd.core.levels import DraftBatch
from vllm_hsd.verify.chain import verify_batch, verify_greedy
from vllm_hsd.verify.coupled import verify_coupled


def verify(
    models: LevelModels,
    batch: DraftBatch,
    level: int,
    slots: np.ndarray,
    below: DraftStore,
    forward: Forward,
) -> tuple[np.ndarray, np.ndarray]:
    """Verify drafts that end the texts: greedily, by probabilities, or by equal noise.

    Args:
        models: of the cascade.
        batch: the requests.
        level: the level that verifies.
        slots: [n] int64.
        below: has their drafts.
        forward: what the level says about each of their tokens and after the last one.

    Returns:
        (token ids [n, longest draft + 1] padded with -1, accepted [n]).
    """
    counts, start = below.counts[slots], batch.end[slots] - below.counts[slots]
    rows = forward.logits if forward.probs is None else forward.probs
    chain = below.chain_batch(slots, counts, rows, counts, counts)
    if batch.greedy:
        return verify_greedy(chain, models.argmax(forward.logits, level))
    is_drawn = batch.is_drawn(slots)
    drawn, chosen = np.flatnonzero(is_drawn), np.flatnonzero(~is_drawn)
    token_ids = np.full((len(slots), chain.tokens.shape[1] + 1), -1, dtype=np.int64)
    accepted = np.zeros(len(slots), dtype=np.int64)
    if len(drawn):
        uniforms = batch.uniforms(slots[drawn], counts[drawn] + 1, level)
        token_ids[drawn], accepted[drawn] = verify_batch(
            chain.of(drawn), models.options[level].verifier, uniforms
        )

    def choose(requests: np.ndarray, t: int) -> np.ndarray:
        own = chosen[requests]
        logits = forward.logits[torch.from_numpy(chain.target_rows[own, t])]
        return models.choose(batch, level, logits, slots[own], start[own] + t)

    token_ids[chosen], accepted[chosen] = verify_coupled(
        chain.tokens[chosen], counts[chosen], choose
    )
    return token_ids, accepted


def append_verified(
    drafts: DraftStore,
    batch: DraftBatch,
    level: int,
    slots: np.ndarray,
    counts: np.ndarray,
    verdict: tuple[np.ndarray, np.ndarray],
    forward: Forward,
) -> np.ndarray:
    """Keep what was accepted of drafts that end the texts, and the token that was drawn after it.

    Nothing follows an accepted eos, not even the token drawn after it.

    Args:
        drafts: where the kept tokens go.
        batch: the requests.
        level: the level that has verified.
        slots, counts: [n] int64 requests and lengths of their drafts.
        verdict, forward: see `verify`.

    Returns:
        [n] bool, drafts that end here: with eos, or after a token that the level is unsure of.
    """
    (token_ids, accepted), start = verdict, batch.end[slots] - counts
    is_eos = (token_ids == batch.eos[slots][:, None]) & (token_ids >= 0)
    ended: np.ndarray = is_eos.any(1)
    last = np.where(ended, is_eos.argmax(1), accepted)
    emitted = last + 1
    batch.tokens[batch.rows[slots], start + last] = token_ids[np.arange(len(slots)), last]
    batch.end[slots] = start + emitted
    # What was computed from the last token on belongs to rejected tokens.
    cached = batch.cached[: level + 1, slots]
    batch.cached[: level + 1, slots] = np.minimum(cached, start + last)
    first_row = ragged_starts(counts + 1)
    drafts.append(slots, token_ids, emitted, forward.probs, first_row, level, forward.entropy)
    # Ignore the entropy of rejected positions.
    owners, offsets = ragged_arange(counts + 1)
    ended[owners[forward.uncertain & (offsets < emitted[owners])]] = True
    return ended
