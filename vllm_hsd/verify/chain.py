"""Verification of chain drafts: how long a prefix stays, and the one token after it.

`hierarchical` is capped branch resampling (Zhou et al., Overcoming Joint Intractability with
Lossless Hierarchical Speculative Decoding, section 5.2, with a cap that includes position t and a
capped final ratio), in law equal to block verification (Sun et al., arXiv:2403.10444);
`tokenwise` is Leviathan et al., arXiv:2211.17192.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_hsd.verify.inputs import ChainBatch
from vllm_hsd.verify.residual import (
    BlockedCDF,
    acceptance_probability,
    is_normalized,
    prefix_acceptance,
    ratios,
    residual_rows,
)


class VerifyResult(NamedTuple):
    """token_ids: int64 [batch, max_n + 1], padded with -1; num_accepted: int64 [batch].

    Request i emits its first num_accepted[i] draft tokens and one more token. Only where the
    target row of that token is unusable, its row of token_ids ends after the accepted tokens.
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
    generators: Mapping[int, torch.Generator] | None = None,
    uniforms: torch.Tensor | None = None,
) -> VerifyResult:
    """Verify one draft per request, losslessly: the tokens emitted follow the target's law.

    An unusable row (not finite, negative, or a sum off 1 by 1e-3) ends the draft: a proposal row
    before the token drawn from it, a target row after the token that leads to it. The first rule
    does not look at the token and the second keeps it, so both leave the law as it is. The token
    id -1 marks an empty slot and ends the draft there.

    Args:
        target_probs: [sum(n_i + 1), V] float32 or float64; request after request, row t of a
            request is the target's law given its first t draft tokens. For `greedy` probabilities
            or logits of any floating dtype.
        draft_probs: [sum(n_i), V] like target_probs, the laws the tokens were really drawn from,
            or None when they are one-hot. Not read by `greedy`.
        draft_token_ids: [sum(n_i)] int64 or int32, -1 for an empty slot.
        num_draft_tokens: draft length n_i of every request, zeros allowed.
        method: "block", "standard" or "greedy".
        generators: batch row -> generator on the rows' device, from which a seeded request draws
            its n_i + 1 uniforms; the other requests share the default generator.
        uniforms: float64 [sum(n_i + 1)] in [0, 1), used instead of generators: for each request
            one per draft token, then one for the token that follows. Not read by `greedy`.
    Returns:
        VerifyResult on the device of target_probs.
    Raises:
        ValueError: arguments that do not fit together, a token outside the vocabulary, or an
            unusable first target row; names the argument and the first offending request or row.
    """
    batch = ChainBatch.read(target_probs, draft_probs, draft_token_ids, num_draft_tokens, method)
    if method == "greedy":
        accepted, final, has_final = greedy_end(batch)
    else:
        coins, final_coins = batch.coins(generators, uniforms)
        draft_ok = None if batch.draft_probs is None else is_normalized(batch.draft_probs)
        length, has_final = batch.usable(is_normalized(target_probs), draft_ok)
        a = prefix_ratios(batch, length, method)
        decide = _first_failure if method == "standard" else _last_success
        accepted, final = decide(batch, length, a, coins, final_coins)
        has_final |= accepted < length
    tokens = torch.from_numpy(batch.result_rows(accepted, final, has_final))
    device = target_probs.device
    return VerifyResult(tokens.to(device), torch.from_numpy(accepted).to(device))


def prefix_ratios(batch: ChainBatch, length: np.ndarray, method: str) -> np.ndarray:
    """Capped ratios a_1..a_n of every request, 0 past its usable length: float64 [batch, max_n]."""
    rho = np.zeros(batch.tokens.shape)
    rho[batch.valid] = ratios(*batch.token_probs())
    rho[np.arange(rho.shape[1]) >= length[:, None]] = 0.0
    return prefix_acceptance(rho, method=method)


def bonus(batch: ChainBatch, requests: np.ndarray, tau: np.ndarray) -> BlockedCDF:
    """Law of the token after a whole draft of length tau[k]: p_tau."""
    return BlockedCDF(batch.target_rows(requests, tau))


def correction(
    batch: ChainBatch, requests: np.ndarray, tau: np.ndarray, a: np.ndarray
) -> tuple[BlockedCDF, np.ndarray]:
    """Law of the token after a prefix of length tau[k] < n, and its success probability h.

    Args:
        requests, tau: int64 [k]; a: float64 [k] capped ratios there.
    Returns:
        (max(a * p - q, 0) unnormalised, p where that has no mass; float64 [k]).
    """
    target = batch.target_rows(requests, tau)
    mass = BlockedCDF(residual_rows(target, a, *batch.proposal(requests, tau)))
    total = mass.total.cpu().numpy()
    h = acceptance_probability(a, total)
    empty = total <= 0
    if empty.any():
        rows = torch.from_numpy(np.flatnonzero(empty)).to(target.device)
        target[rows] = batch.target_rows(requests[empty], tau[empty])
        mass = BlockedCDF(target)
    return mass, h


def _last_success(
    batch: ChainBatch,
    length: np.ndarray,
    a: np.ndarray,
    coins: np.ndarray,
    final_coins: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """(tau, final token) of every request; tau = the last t with U_t < h_t, 0 without one.

    h_t <= a_t, so only positions with U_t < a_t can succeed. From the back, every request looks
    at its last such position, and is done unless the residual mass there says that it failed.
    """
    size, width = a.shape
    # Column 0 is the empty prefix, which always stays.
    a = np.concatenate((np.ones((size, 1)), a), axis=1)
    coins = np.concatenate((np.zeros((size, 1)), coins), axis=1)
    candidates = coins < a
    accepted = np.zeros(size, dtype=np.int64)
    final = np.zeros(size, dtype=np.int64)
    pending = np.arange(size)
    while pending.size:
        tau = width - candidates[pending, ::-1].argmax(1)
        accepted[pending] = tau
        failed = _settle(
            batch, length, pending, tau, a[pending, tau], coins[pending, tau], final_coins, final
        )
        pending = pending[failed]
        candidates[pending, accepted[pending]] = False
    return accepted, final


def _first_failure(
    batch: ChainBatch,
    length: np.ndarray,
    a: np.ndarray,
    coins: np.ndarray,
    final_coins: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """(tau, final token) of every request; tau = the last t up to which all U_t < min(1, rho_t)."""
    accepted = np.logical_and.accumulate(coins < a, axis=1).sum(1)
    final = np.zeros(batch.size, dtype=np.int64)
    zero, one = np.zeros(batch.size), np.ones(batch.size)
    _settle(batch, length, np.arange(batch.size), accepted, one, zero, final_coins, final)
    return accepted, final


def _settle(
    batch: ChainBatch,
    length: np.ndarray,
    requests: np.ndarray,
    tau: np.ndarray,
    a: np.ndarray,
    coins: np.ndarray,
    final_coins: np.ndarray,
    final: np.ndarray,
) -> np.ndarray:
    """Write the final token of every request whose position tau succeeds; True where it fails."""
    failed = np.zeros(requests.size, dtype=bool)
    whole = tau == length[requests]
    if whole.any():
        # The last position's h is its capped ratio itself, and U < a is how it got here.
        _draw(bonus(batch, requests[whole], tau[whole]), requests[whole], final_coins, final)
    inner = ~whole
    if inner.any():
        mass, h = correction(batch, requests[inner], tau[inner], a[inner])
        failed[inner] = coins[inner] >= h
        _draw(mass, requests[inner], final_coins, final)
    return failed


def _draw(
    mass: BlockedCDF, requests: np.ndarray, final_coins: np.ndarray, final: np.ndarray
) -> None:
    coins = torch.from_numpy(final_coins[requests]).to(mass.rows.device)
    final[requests] = mass.draw(coins).cpu().numpy()


def greedy_end(batch: ChainBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tau, final token, whether there is one): accept while the draft is the target's argmax."""
    best, peak = _argmax(batch.target_probs)
    length, has_final = batch.usable(np.isfinite(peak), None)
    expected = np.full(batch.tokens.shape, -2, dtype=np.int64)
    expected[batch.valid] = np.delete(best, batch.first_target + batch.lengths)
    matches = (batch.tokens == expected) & (np.arange(expected.shape[1]) < length[:, None])
    accepted = np.logical_and.accumulate(matches, axis=1).sum(1)
    return accepted, best[batch.first_target + accepted], has_final | (accepted < length)


def _argmax(rows: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Index and value of the first maximum of every row; the value is NaN if the row has one."""
    if rows.device.type == "cpu":
        # numpy's argmax is vectorised, torch's on CPU is not: a tenth of the time.
        values = rows.detach().to(rows.dtype if rows.dtype.itemsize >= 4 else torch.float32).numpy()
        best = values.argmax(-1)
        return best, values[np.arange(best.size), best]
    best = rows.argmax(-1)
    peak = rows.gather(1, best[:, None])[:, 0].float()
    return best.cpu().numpy(), peak.cpu().numpy()
