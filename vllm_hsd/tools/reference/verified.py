"""What a level adds to its drafts: a token of its own, or what it keeps of the draft from below."""

from __future__ import annotations

import numpy as np
import torch

from vllm_hsd.cascade.drafts import DraftStore, ragged_arange, ragged_starts
from vllm_hsd.cascade.level import DraftBatch
from vllm_hsd.rules.chain import verify_batch, verify_greedy
from vllm_hsd.rules.coupled import verify_coupled
from vllm_hsd.rules.residual import BlockedCDF
from vllm_hsd.tools.reference.level_models import Forward, LevelModels


def append_own(
    models: LevelModels,
    drafts: DraftStore,
    batch: DraftBatch,
    level: int,
    slots: np.ndarray,
    uniforms: np.ndarray | None,
) -> tuple[Forward, np.ndarray]:
    """Add a token of the level's model to each draft.

    Args:
        models: of the cascade.
        drafts: where the token goes.
        batch: the requests.
        level: the level.
        slots: [n] int64.
        uniforms: [n] float64, None where no token is drawn from probabilities.

    Returns:
        what the model says; [n] bool, drafts that end here: with eos, after a token that the level
        is unsure of, or where the text outgrows the level.
    """
    forward = models.forward(batch, level, slots, np.ones(len(slots), dtype=np.int64))
    return forward, append_next(models, drafts, batch, level, slots, uniforms, forward)


def append_next(
    models: LevelModels,
    drafts: DraftStore,
    batch: DraftBatch,
    level: int,
    slots: np.ndarray,
    uniforms: np.ndarray | None,
    forward: Forward,
    rank: int = 0,
) -> np.ndarray:
    """Add the token to each draft that the level's model has next.

    Args:
        models, drafts, batch, level, slots, uniforms: see `append_own`.
        forward: what the model says after each text, [n] rows.
        rank: of a token that is not drawn from probabilities: 0 is the level's own, 1, 2, ... are
            the likeliest others.

    Returns:
        the second of `append_own`.
    """
    token_ids = np.zeros(len(slots), dtype=np.int64)
    if forward.probs is not None and uniforms is not None:
        drawn = torch.from_numpy(uniforms).to(forward.probs.device)
        token_ids = BlockedCDF(forward.probs).draw(drawn).cpu().numpy()
    chosen = np.flatnonzero(~batch.is_drawn(slots))
    if len(chosen):
        own, logits = slots[chosen], forward.logits
        if len(chosen) < len(slots):
            logits = logits[torch.from_numpy(chosen)]
        token_ids[chosen] = models.choose(batch, level, logits, own, batch.end[own])
        if rank:
            token_ids[chosen] = _another(logits, token_ids[chosen], rank)
    batch.tokens[batch.rows[slots], batch.end[slots]] = token_ids
    batch.end[slots] += 1
    order, one = np.arange(len(slots)), np.ones(len(slots), dtype=np.int64)
    drafts.append(slots, token_ids[:, None], one, forward.probs, order, level, forward.entropy)
    outgrown = batch.end[slots] > models.context_lengths[level]
    ended: np.ndarray = (token_ids == batch.eos[slots]) | forward.uncertain | outgrown
    return ended


def _another(logits: torch.Tensor, token_ids: np.ndarray, rank: int) -> np.ndarray:
    """[n] int64, the likeliest tokens but those given, the rank-th of each row [n, V] from 1 on."""
    likeliest = logits.topk(min(rank + 1, logits.shape[1])).indices.cpu().numpy()
    others = np.argsort(likeliest == token_ids[:, None], axis=1, kind="stable")
    place = others[:, min(rank, likeliest.shape[1]) - 1]
    found: np.ndarray = likeliest[np.arange(len(place)), place]
    return found


def append_unverified(
    models: LevelModels,
    drafts: DraftStore,
    batch: DraftBatch,
    level: int,
    slots: np.ndarray,
    below: DraftStore,
) -> tuple[int, np.ndarray]:
    """Keep drafts that end the texts as they are, and add a token of the level to each.

    Every token keeps the probabilities that it was drawn from, so the next verification is lossless
    (Chen, "An Exploration of Hierarchical Speculative Decoding", Algorithm 2). Nothing follows eos.

    Args:
        models, drafts, batch, level, slots: see `append_own`.
        below: has the drafts.

    Returns:
        tokens that the level computed; [n] bool, drafts that end here.
    """
    last = batch.tokens[batch.rows[slots], batch.end[slots] - 1]
    ended: np.ndarray = (below.counts[slots] > 0) & (last == batch.eos[slots])
    drafts.extend(below, slots)
    going = np.flatnonzero(~ended)
    if not len(going):
        return 0, ended
    now = slots[going]
    drawn = batch.is_drawn(now).any()
    uniforms = batch.uniforms(now, np.ones(len(now), np.int64), level) if drawn else None
    forward, ended[going] = append_own(models, drafts, batch, level, now, uniforms)
    return forward.computed, ended


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
