"""What a level adds to its drafts: a token of its own, or what it keeps of the draft from below."""

from __future__ import annotations

import numpy as np
import torch

from vllm_hsd.cascade.ragged import ragged_arange, ragged_starts
from vllm_hsd.rules.chain import verify_batch, verify_greedy
from vllm_hsd.rules.residual import CDF
from vllm_hsd.tools.reference.batch import DraftBatch
from vllm_hsd.tools.reference.drafts import DraftStore
from vllm_hsd.tools.reference.level_models import LevelModels


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
        token_ids = CDF(forward.probs).draw(drawn).cpu().numpy()
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
    drafts: DraftStore,
    batch: DraftBatch,
    level: int,
    slots: np.ndarray,
    below: DraftStore,
) -> tuple[np.ndarray, np.ndarray]:
    """Keep what the level accepts of drafts that end the texts, and the token drawn after it.

    Nothing follows an accepted eos, not even the token drawn after it.
    Arguments as of `append_unverified`.

    Returns:
        tokens accepted, [n] int64, and drafts that end here, with eos or after a token that the
        level is unsure of, [n] bool.
    """
    counts = below.counts[slots]
    forward = models.forward(batch, level, slots, counts + 1)
    if forward.probs is None:
        chain = below.chain_batch(slots, forward.logits)
        token_ids, accepted = verify_greedy(chain, models.argmax(forward.logits, level))
    else:
        chain = below.chain_batch(slots, forward.probs)
        uniforms = batch.uniforms(slots, counts + 1, level)
        token_ids, accepted = verify_batch(chain, models.options[level].verifier, uniforms)
    start = batch.end[slots] - counts
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
    return accepted, ended
