"""What a level adds to its drafts: a token of its own, or what it keeps of the draft from below."""

from __future__ import annotations

import numpy as np
import torch

from vllm_hsd.cascade.ragged import ragged_arange, ragged_starts
from vllm_hsd.rules.chain import verify_batch, verify_greedy
from vllm_hsd.rules.residual import BlockedCDF
from vllm_hsd.tools.reference.batch import DraftBatch
from vllm_hsd.tools.reference.drafts import DraftStore
from vllm_hsd.tools.reference.level_models import Forward, LevelModels


def append_own(
    models: LevelModels,
    drafts: DraftStore,
    batch: DraftBatch,
    level: int,
    slots: np.ndarray,
    uniforms: np.ndarray | None,
) -> np.ndarray:
    """Add a token of the level's model to each draft.

    Args:
        drafts: where the token goes.
        slots: [n] int64.
        uniforms: [n] float64, None of greedy requests.

    Returns:
        [n] bool, drafts that end here: with eos, after a token that the level is unsure of, or
        where the text outgrows the level.
    """
    one = np.ones(len(slots), dtype=np.int64)
    forward = models.forward(batch, level, slots, one)
    if forward.probs is None or uniforms is None:
        token_ids = models.argmax(forward.logits, level)
    else:
        drawn = torch.from_numpy(uniforms).to(forward.probs.device)
        token_ids = BlockedCDF(forward.probs).draw(drawn).cpu().numpy()
    batch.tokens[batch.rows[slots], batch.end[slots]] = token_ids
    batch.end[slots] += 1
    order = np.arange(len(slots))
    drafts.append(slots, token_ids[:, None], one, forward.probs, order, level, forward.entropy)
    outgrown = batch.end[slots] > models.context_lengths[level]
    ended: np.ndarray = (token_ids == batch.eos[slots]) | forward.uncertain | outgrown
    return ended


def append_unverified(
    models: LevelModels,
    drafts: DraftStore,
    batch: DraftBatch,
    level: int,
    slots: np.ndarray,
    below: DraftStore,
) -> np.ndarray:
    """Keep drafts that end the texts as they are, and add a token of the level to each.

    Every token keeps the probabilities that it was drawn from, so the next verification is lossless
    (Chen, "An Exploration of Hierarchical Speculative Decoding", Algorithm 2). Nothing follows eos.
    Arguments as of `append_own`; `below` has the drafts.

    Returns:
        [n] bool, drafts that end here.
    """
    last = batch.tokens[batch.rows[slots], batch.end[slots] - 1]
    ended: np.ndarray = (below.counts[slots] > 0) & (last == batch.eos[slots])
    drafts.extend(below, slots)
    going = np.flatnonzero(~ended)
    if not len(going):
        return ended
    now = slots[going]
    uniforms = None if batch.greedy else batch.uniforms(now, np.ones(len(now), np.int64), level)
    ended[going] = append_own(models, drafts, batch, level, now, uniforms)
    return ended


def verify(
    models: LevelModels,
    batch: DraftBatch,
    level: int,
    slots: np.ndarray,
    below: DraftStore,
    forward: Forward,
) -> tuple[np.ndarray, np.ndarray]:
    """Verify drafts that end the texts, greedily or by probabilities.

    Args:
        level: the level that verifies.
        slots: [n] int64.
        below: has their drafts.
        forward: what the level says about each of their tokens and after the last one.

    Returns:
        (token ids [n, longest draft + 1] padded with -1, accepted [n]).
    """
    rows = forward.logits if forward.probs is None else forward.probs
    chain = below.chain_batch(slots, rows)
    if forward.probs is None:
        return verify_greedy(chain, models.argmax(forward.logits, level))
    uniforms = batch.uniforms(slots, chain.lengths + 1, level)
    return verify_batch(chain, models.options[level].verifier, uniforms)


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
