"""Verification of a chain draft: how long a prefix is accepted, and the one token after it.

`block` is block verification (Sun et al., "Block Verification Accelerates Speculative Decoding",
arXiv:2403.10444). On a chain it is the same rule as capped branch resampling, which Zhou et al.,
"Overcoming Joint Intractability with Lossless Hierarchical Speculative Decoding", section 5.2, call
hierarchical (capped at every position; their released code leaves the last ratio uncapped, which is
biased). `standard` is token-level rejection sampling (Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding", arXiv:2211.17192).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_hsd.rules.residual import acceptance_probability, draw, is_normalized, ratio, residual

METHODS = "block", "standard"


def verify_chain(
    target: torch.Tensor,
    draft: torch.Tensor,
    token_ids: Sequence[int],
    uniforms: Sequence[float],
    *,
    method: str = "block",
) -> tuple[list[int], int]:
    """Verify a draft of one request without changing the target's distribution.

    A row that is not normalized (not finite, negative, or a sum off 1 by 1e-3) ends the draft: a
    proposal row before the token drawn from it, a target row after the token that leads to it. The
    first rule does not look at the token and the second keeps it, so both are lossless. Where the
    first target row is not normalized, its argmax is emitted, NaN counting as the maximum: what
    vLLM's own sampler gives.

    Args:
        target: floating [n + 1, V], the target's probabilities after t draft tokens.
        draft: [n, V], what each token was really drawn from; one-hot for a point mass.
        token_ids: n of them, -1 for an empty position, which ends the draft.
        uniforms: n + 1 in [0, 1): one for the token after the accepted prefix, then one for each
            draft token.
        method: "block" or "standard".

    Returns:
        (tokens that are emitted, how many of them are the draft's): an accepted prefix and one more
        token; without it only where the target's row there is not normalized.

    Raises:
        ValueError: there is no such method.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, must be one of {', '.join(METHODS)}.")
    if not is_normalized(target[0]):
        return [int(target[0].argmax())], 0
    length = 0
    for token, before, proposal in zip(token_ids, target, draft, strict=False):
        if token < 0 or not (is_normalized(before) and is_normalized(proposal)):
            break
        length += 1
    stops = chain_stops(target[: length + 1], draft, token_ids[:length], method=method)
    accepted = 0
    for t, (h, _) in enumerate(stops[1:], 1):
        if uniforms[t] < h:
            accepted = t
        elif method == "standard":
            break
    emitted = list(token_ids[:accepted])
    if is_normalized(target[accepted]):
        emitted.append(draw(stops[accepted][1], uniforms[0]))
    return emitted, accepted


def chain_stops(
    target: torch.Tensor, draft: torch.Tensor, token_ids: Sequence[int], *, method: str
) -> list[tuple[float, torch.Tensor]]:
    """Of t = 0, ..., n accepted tokens: h, and the row [V] of the next token, unnormalized.

    The draw at t succeeds with probability h. By `block` the last success tells how many tokens are
    accepted, by `standard` the last one before any failure.
    """
    found, a = [], 1.0
    for t, row in enumerate(target):
        if t:
            rho = ratio(target[t - 1], draft[t - 1], token_ids[t - 1])
            a = min(1.0, a * rho if method == "block" else rho)
        h, after = a, row
        if t < len(token_ids):
            rest, mass = residual(a if method == "block" else 1.0, row, draft[t])
            if method == "block":
                h = acceptance_probability(a, mass)
            if mass > 0:
                after = rest
        found.append((h, after))
    return found
