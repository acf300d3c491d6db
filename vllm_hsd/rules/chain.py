"""Verification of chain drafts: how long a prefix is accepted, and the one token after it.

`block` is block verification (Sun et al., "Block Verification Accelerates Speculative Decoding",
arXiv:2403.10444). On a chain it is the same rule as capped branch resampling, which Zhou et al.,
"Overcoming Joint Intractability with Lossless Hierarchical Speculative Decoding", section 5.2, call
hierarchical (capped at every position; their released code leaves the last ratio uncapped, which is
biased). `standard` is token-level rejection sampling (Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding", arXiv:2211.17192).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_hsd.rules.inputs import ChainBatch, read_chain_batch, read_uniforms
from vllm_hsd.rules.residual import (
    CDF,
    acceptance_probability,
    is_normalized,
    prefix_acceptance,
    probability_ratios,
)


class VerifyResult(NamedTuple):
    """token_ids: int64 [batch, max_n + 1], padded with -1; num_accepted: int64 [batch].

    Request i emits its first num_accepted[i] draft tokens and one more: the recovered token, or the
    bonus token after a whole draft. Only where the target distribution of that token is not
    normalized, after at least one accepted token, does its row end with the accepted tokens.
    """

    token_ids: torch.Tensor
    num_accepted: torch.Tensor


def verify_chain(
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    draft_token_ids: torch.Tensor,
    num_draft_tokens: Sequence[int],
    *,
    method: str = "block",
    uniforms: torch.Tensor | None = None,
) -> VerifyResult:
    """Verify one draft per request without changing the target's distribution.

    A row that is not normalized (not finite, negative, or a sum off 1 by 1e-3) ends the draft: a
    proposal row before the token drawn from it, a target row after the token that leads to it. The
    first rule does not look at the token and the second keeps it, so both are lossless. Where the
    first target row of a request is not normalized, the request emits that row's argmax, NaN
    counting as the maximum: what vLLM's own sampler gives. The token id -1 marks an empty position
    and ends the draft there.

    Args:
        target_probs: [sum(n_i + 1), V] float32 or float64; request after request, row t of a
            request is the target distribution given its first t draft tokens. For `greedy`
            probabilities or logits of any floating dtype.
        draft_probs: [sum(n_i), V] like target_probs, the distributions that the tokens were really
            drawn from, or None when they are point masses. Not read by `greedy`.
        draft_token_ids: [sum(n_i)] int64 or int32, -1 for an empty position.
        num_draft_tokens: draft length n_i of every request, zeros allowed.
        method: "block", "standard" or "greedy".
        uniforms: float64 [sum(n_i + 1)] in [0, 1): for each request one for the token after the
            accepted prefix, then one per draft token; by default of the default generator. Not read
            by `greedy`.

    Returns:
        VerifyResult on the device of target_probs.

    Raises:
        ValueError: arguments that do not fit together, or a token outside the vocabulary; names the
            argument and the first offending entry.
    """
    batch = read_chain_batch(target_probs, draft_probs, draft_token_ids, num_draft_tokens, method)
    device = target_probs.device
    if method == "greedy":
        token_ids, accepted = verify_greedy(batch, argmax_rows(target_probs)[0])
    else:
        flat = read_uniforms(batch.lengths, device, uniforms)
        draft_ok = None if batch.draft_probs is None else is_normalized(batch.draft_probs)
        token_ids, accepted = verify_batch(
            batch, method, flat, target_ok=is_normalized(target_probs), draft_ok=draft_ok
        )
    return VerifyResult(
        torch.from_numpy(token_ids).to(device), torch.from_numpy(accepted).to(device)
    )


def verify_batch(
    batch: ChainBatch,
    method: str,
    uniforms: np.ndarray,
    *,
    target_ok: np.ndarray | None = None,
    draft_ok: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """`verify_chain` on arrays that were checked before; nothing about a row's numbers raises.

    Args:
        batch: drafts and probabilities.
        method: "block" or "standard".
        uniforms: [sum(n_i + 1)] float64 in [0, 1), as in `verify_chain`.
        target_ok: [R] bool, which target rows are normalized; None for all.
        draft_ok: [S] bool, which proposal rows are normalized; None for all.

    Returns:
        (token ids [batch, max_n + 1] int64 padded with -1, accepted tokens [batch] int64).
    """
    length, has_last = _usable_length(batch, target_ok, draft_ok)
    accept, last = _split_uniforms(batch, uniforms)
    a = prefix_probabilities(batch, length, method)
    decide = _first_failure if method == "standard" else _last_success
    accepted, token = decide(batch, length, a, accept, last)
    if target_ok is not None:
        broken = np.flatnonzero(~target_ok[batch.target_rows[:, 0]])
        if broken.size:
            rows = batch.target(broken, np.zeros_like(broken))
            token[broken] = rows.argmax(-1).cpu().numpy()
    return _emitted(batch, accepted, token, has_last | (accepted < length)), accepted


def verify_greedy(batch: ChainBatch, best: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Accept while the draft is the target's argmax.

    Args:
        batch: drafts; its probabilities are not read.
        best: [R] int64 argmax of every target row.

    Returns:
        as `verify_batch`.
    """
    expected = best[batch.target_rows]
    matches = (batch.tokens == expected[:, :-1]) & batch.valid
    accepted = np.logical_and.accumulate(matches, axis=1).sum(1)
    token = expected[np.arange(batch.size), accepted]
    return _emitted(batch, accepted, token, np.ones(batch.size, dtype=bool)), accepted


def prefix_probabilities(batch: ChainBatch, length: np.ndarray, method: str) -> np.ndarray:
    """`prefix_acceptance` of every draft, 0 past its valid length: float64 [batch, max_n]."""
    rho = probability_ratios(*batch.token_probs())
    rho[np.arange(rho.shape[1]) >= length[:, None]] = 0.0
    return prefix_acceptance(rho, method=method)


def bonus_cdf(batch: ChainBatch, requests: np.ndarray, tau: np.ndarray) -> CDF:
    """Distribution of the bonus token after a whole draft of length tau[k]: p_tau."""
    return CDF(batch.target(requests, tau))


def recovered_cdf(
    batch: ChainBatch, requests: np.ndarray, tau: np.ndarray, a: np.ndarray
) -> tuple[CDF, np.ndarray]:
    """Distribution of the recovered token after a prefix of length tau[k] < n.

    Args:
        batch: drafts and probabilities.
        requests, tau: [k] int64.
        a: [k] float64 prefix acceptance probabilities there.

    Returns:
        (max(a * p - q, 0) unnormalized, p where that has no mass; its acceptance probability h,
        [k] float64).
    """
    rows = batch.target(requests, tau)
    if (a != 1).any():
        rows.mul_(torch.from_numpy(a).to(rows)[:, None])
    batch.subtract_draft(rows, requests, tau)
    cdf = CDF(rows)
    mass = cdf.total.cpu().numpy()
    h = acceptance_probability(a, mass)
    empty = np.flatnonzero(mass <= 0)
    if empty.size:
        index = torch.from_numpy(empty).to(rows.device)
        rows[index] = batch.target(requests[empty], tau[empty])
        cdf = CDF(rows)
    return cdf, h


def argmax_rows(rows: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Index and value of the first maximum of every row, NaN counting as the maximum.

    Args:
        rows: [n, V].

    Returns:
        ([n] int64, [n] floating), on the host.
    """
    best = rows.argmax(-1)
    highest = rows.gather(1, best[:, None])[:, 0].float()
    return best.cpu().numpy(), highest.cpu().numpy()


def _usable_length(
    batch: ChainBatch, target_ok: np.ndarray | None, draft_ok: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """(draft length before the first bad row or empty position; whether a token follows it)."""
    drawn = batch.valid & (batch.tokens >= 0)
    if draft_ok is not None:
        drawn &= draft_ok[batch.draft_rows] | (batch.draft_rows < 0)
    if target_ok is not None:
        # Token t is accepted although the row after it is bad; token t + 1 is not.
        drawn &= target_ok[batch.target_rows[:, :-1]]
    length = np.logical_and.accumulate(drawn, axis=1).sum(1)
    if target_ok is None:
        return length, np.ones(batch.size, dtype=bool)
    after = batch.target_rows[np.arange(batch.size), length]
    return length, target_ok[after] | (length == 0)


def _split_uniforms(batch: ChainBatch, flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """([batch, max_n] for the draft tokens, 1 where there is none; [batch] for the next tokens)."""
    first = np.cumsum(batch.lengths + 1) - batch.lengths - 1
    accept = np.ones(batch.tokens.shape)
    accept[batch.valid] = np.delete(flat, first)
    return accept, flat[first]


def _emitted(
    batch: ChainBatch, accepted: np.ndarray, token: np.ndarray, has_last: np.ndarray
) -> np.ndarray:
    """[batch, max_n + 1] int64: accepted tokens, the one after them where there is one, then -1."""
    out = np.full((batch.size, batch.tokens.shape[1] + 1), -1, dtype=np.int64)
    keep = np.arange(batch.tokens.shape[1]) < accepted[:, None]
    out[:, :-1][keep] = batch.tokens[keep]
    ending = np.flatnonzero(has_last)
    out[ending, accepted[ending]] = token[ending]
    return out


def _last_success(
    batch: ChainBatch, length: np.ndarray, a: np.ndarray, accept: np.ndarray, last: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(tau, next token) of every request; tau = the last t with U_t < h_t, 0 without one.

    h_t <= a_t, so only positions with U_t < a_t can succeed. From the back, every request looks
    at its last such position, and is done unless the residual mass there says that it failed.
    """
    size, width = a.shape
    # Column 0 is the empty prefix, which is always accepted.
    a = np.concatenate((np.ones((size, 1)), a), axis=1)
    accept = np.concatenate((np.zeros((size, 1)), accept), axis=1)
    candidates = accept < a
    accepted = np.zeros(size, dtype=np.int64)
    token = np.zeros(size, dtype=np.int64)
    pending = np.arange(size)
    while pending.size:
        tau = width - candidates[pending, ::-1].argmax(1)
        accepted[pending] = tau
        failed = _draw_next(
            batch, length, pending, tau, a[pending, tau], accept[pending, tau], last, token
        )
        pending = pending[failed]
        candidates[pending, accepted[pending]] = False
    return accepted, token


def _first_failure(
    batch: ChainBatch, length: np.ndarray, a: np.ndarray, accept: np.ndarray, last: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(tau, next token) of every request; tau = the last t up to which all U_t < min(1, rho_t)."""
    accepted = np.logical_and.accumulate(accept < a, axis=1).sum(1)
    token = np.zeros(batch.size, dtype=np.int64)
    zero, one = np.zeros(batch.size), np.ones(batch.size)
    _draw_next(batch, length, np.arange(batch.size), accepted, one, zero, last, token)
    return accepted, token


def _draw_next(
    batch: ChainBatch,
    length: np.ndarray,
    requests: np.ndarray,
    tau: np.ndarray,
    a: np.ndarray,
    accept: np.ndarray,
    last: np.ndarray,
    token: np.ndarray,
) -> np.ndarray:
    """Draw the token after every prefix tau; [k] bool, True where the prefix is not accepted."""
    failed = np.zeros(requests.size, dtype=bool)
    whole = tau == length[requests]
    if whole.any():
        # The last position's h is its prefix acceptance itself, and U < a is how it got here.
        _draw(bonus_cdf(batch, requests[whole], tau[whole]), requests[whole], last, token)
    if not whole.all():
        inner = ~whole
        cdf, h = recovered_cdf(batch, requests[inner], tau[inner], a[inner])
        failed[inner] = accept[inner] >= h
        _draw(cdf, requests[inner], last, token)
    return failed


def _draw(cdf: CDF, requests: np.ndarray, last: np.ndarray, token: np.ndarray) -> None:
    uniforms = torch.from_numpy(last[requests]).to(cdf.rows.device)
    token[requests] = cdf.draw(uniforms).cpu().numpy()
