"""Samplers with one error each, for which `verify` must fail.

They patch method "hsd" on vLLM's V1 runner, in the engine's process, for a cascade of one model
under block verification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vllm_hsd.core.drafts import ragged_arange

# Of the text that shows the errors.
TEMPERATURE = 2.0
# Drafters know the allowed letters and not the grammar, which refuses half of them.
LETTERS = "abcdefghijklmnop"
GRAMMAR = {"regex": "[a-h]{500}"}

# How wrong some mutants are: about 2 % of total variation per drafted position.
GENEROUS, STRICT, SHARPER, UNSEEN, ONE_PLACE = 1.05, 0.95, 1.3, 0.025, 1.5

Patches = list[tuple[Any, str, Any]]


@dataclass(frozen=True)
class Mutant:
    """One error.

    Attributes:
        fault: what is wrong.
        patches: called in the engine's process; (owner, attribute, new value) of what it changes.
        constrained: whether only a text of LETTERS under GRAMMAR shows it.
        seeded: whether only requests with seeds show it, which are compared exactly.
        weight: how many times more tokens it takes than the others.
    """

    fault: str
    patches: Callable[[], Patches]
    constrained: bool = False
    seeded: bool = False
    weight: int = 1


def _shared_noise() -> Patches:
    from vllm_hsd.runner_v1.request_state import RequestState
    from vllm_hsd.verify.rng import host_uniforms

    whole = RequestState.uniforms

    def uniforms(self, slots, counts, stream):
        drawn = whole(self, slots, counts, stream)
        if stream > 0:
            # A verification takes one uniform for the next token, then one per draft token.
            owners, offsets = ragged_arange(counts - 1)
            now = slots[owners]
            used = self.draws[0, now] - self.drafts.counts[now] + offsets
            drawn[_is_not_first(counts)] = host_uniforms(self.seed[now], np.array(0), used)
        return drawn

    return [(RequestState, "uniforms", uniforms)]


def _raw_proposals() -> Patches:
    from vllm_hsd.core import lowest_level
    from vllm_hsd.runner_v1.sampling import RequestSampling
    from vllm_hsd.verify.residual import BlockedCDF

    class Filtered(BlockedCDF):
        def __init__(self, probs):
            super().__init__((probs.log() / TEMPERATURE).softmax(-1))

    def draft_probabilities(self, logits, requests, level):
        return self.masked(logits, requests).softmax(-1)

    return [
        (lowest_level, "BlockedCDF", Filtered),
        (RequestSampling, "draft_probabilities", draft_probabilities),
    ]


def _standard_residual() -> Patches:
    from vllm_hsd.verify import chain

    whole = chain.recovered_cdf

    def recovered_cdf(batch, requests, tau, a):
        _, h = whole(batch, requests, tau, a)
        return whole(batch, requests, tau, np.ones_like(a))[0], h

    return [(chain, "recovered_cdf", recovered_cdf)]


def _uniforms_by_position() -> Patches:
    from vllm_hsd.runner_v1.request_state import RequestState
    from vllm_hsd.verify.rng import host_uniforms

    whole = RequestState.uniforms

    def uniforms(self, slots, counts, stream):
        drawn = whole(self, slots, counts, stream)
        if stream == 0:
            owners, offsets = ragged_arange(counts)
            now = slots[owners]
            return host_uniforms(self.seed[now], np.array(7), self.end[now] + offsets)
        owners, offsets = ragged_arange(counts - 1)
        now = slots[owners]
        # Drafting has moved the end of the text past the draft.
        places = self.end[now] - self.drafts.counts[now] + offsets
        drawn[_is_not_first(counts)] = host_uniforms(self.seed[now], np.array(8), places)
        return drawn

    return [(RequestState, "uniforms", uniforms)]


def _unscored_cut() -> Patches:
    from vllm_hsd.runner_v1 import sampler

    whole = sampler.drafts_to_verify

    def drafts_to_verify(*args):
        batch, scored = whole(*args)
        return replace(batch, lengths=scored), scored

    return [(sampler, "drafts_to_verify", drafts_to_verify)]


def _generous() -> Patches:
    from vllm_hsd.verify import chain, residual

    whole = residual.probability_ratios
    return [(chain, "probability_ratios", lambda target, draft: GENEROUS * whole(target, draft))]


def _strict() -> Patches:
    from vllm_hsd.verify import chain, residual

    whole = residual.probability_ratios
    return [(chain, "probability_ratios", lambda target, draft: STRICT * whole(target, draft))]


def _no_cap() -> Patches:
    from vllm_hsd.verify import chain

    def prefix_acceptance(rho, *, method):
        return np.cumprod(rho, -1)

    return [(chain, "prefix_acceptance", prefix_acceptance)]


def _neighbouring_row() -> Patches:
    from vllm_hsd.verify.inputs import ChainBatch

    whole = ChainBatch.token_probs

    def token_probs(self):
        rows = np.concatenate((self.target_rows[:, 1:], self.target_rows[:, -1:]), axis=1)
        return whole(replace(self, target_rows=rows))

    return [(ChainBatch, "token_probs", token_probs)]


def _unsubtracted() -> Patches:
    from vllm_hsd.verify import chain

    whole = chain.recovered_cdf

    def recovered_cdf(batch, requests, tau, a):
        _, h = whole(batch, requests, tau, a)
        return chain.bonus_cdf(batch, requests, tau), h

    return [(chain, "recovered_cdf", recovered_cdf)]


def _sharp_bonus() -> Patches:
    from vllm_hsd.verify import chain
    from vllm_hsd.verify.residual import BlockedCDF

    def bonus_cdf(batch, requests, tau):
        return BlockedCDF(batch.target(requests, tau) ** SHARPER)

    return [(chain, "bonus_cdf", bonus_cdf)]


def _taken(pick: Callable[[np.ndarray], np.ndarray]) -> Patches:
    """Drafts, or places of them, are accepted whatever the target says of them.

    Args:
        pick: from [batch, n] acceptance probabilities, which of them become 1, bool of that shape.
    """
    from vllm_hsd.verify import chain

    whole = chain.prefix_probabilities

    def prefix_probabilities(batch, length, method):
        found = whole(batch, length, method)
        inside = np.arange(found.shape[1]) < length[:, None]
        return np.where(pick(found) & inside, 1.0, found)

    return [(chain, "prefix_probabilities", prefix_probabilities)]


def _unseen() -> Patches:
    rng = np.random.default_rng(0)
    return _taken(lambda found: rng.random((len(found), 1)) < UNSEEN)


def _one_request() -> Patches:
    from vllm_hsd.runner_v1 import sampler

    whole = sampler.drafts_to_verify
    now: list[np.ndarray] = []

    def drafts_to_verify(drafts, slots, *rest):
        now[:] = [slots]
        return whole(drafts, slots, *rest)

    return [
        (sampler, "drafts_to_verify", drafts_to_verify),
        *_taken(lambda found: (now[0] % 16 == 0)[:, None]),
    ]


def _one_place() -> Patches:
    from vllm_hsd.verify import chain, residual

    whole = residual.probability_ratios

    def probability_ratios(target, draft):
        found = whole(target, draft)
        found[:, 1:2] *= ONE_PLACE
        return found

    return [(chain, "probability_ratios", probability_ratios)]


def _neighbouring_noise() -> Patches:
    from vllm_hsd.runner_v1.noise import RequestNoise

    whole = RequestNoise.at
    return [(RequestNoise, "at", lambda self, offset: whole(self, offset + 1))]


def _noise_met_twice() -> Patches:
    from vllm_hsd.runner_v1.noise import RequestNoise

    whole = RequestNoise.emitted
    return [(RequestNoise, "emitted", lambda self, count: whole(self, max(1, count - 1)))]


MUTANTS = {
    "shared noise": Mutant("the verifier reuses the drafter's uniforms", _shared_noise),
    "raw proposals": Mutant(
        "drafts are verified with probabilities before the temperature", _raw_proposals
    ),
    "standard residual": Mutant(
        "block verification recovers with the residual of token-level rejection",
        _standard_residual,
        weight=16,
    ),
    "uniforms met twice": Mutant(
        "uniforms belong to positions, and rejected positions meet theirs again",
        _uniforms_by_position,
        weight=16,
    ),
    "unscored grammar cut": Mutant(
        "a grammar cuts a draft at a refused token, which is then not verified",
        _unscored_cut,
        constrained=True,
    ),
    "generous": Mutant(
        f"the acceptance ratio is {GENEROUS:g} times too large", _generous, weight=4
    ),
    "strict": Mutant(f"the acceptance ratio is {STRICT:g} of what it is to be", _strict, weight=4),
    "no cap": Mutant("the running acceptance probability is not capped at 1", _no_cap, weight=4),
    "neighbouring row": Mutant(
        "drafts are accepted by the target's row of the next position", _neighbouring_row
    ),
    "unsubtracted": Mutant(
        "recovered tokens are drawn from the target in place of the residual",
        _unsubtracted,
        weight=4,
    ),
    "sharp bonus": Mutant(
        f"bonus tokens are drawn from the target's row to the power of {SHARPER:g}",
        _sharp_bonus,
        weight=4,
    ),
    "unseen": Mutant(f"{UNSEEN:.1%} of the drafts are accepted unseen", _unseen, weight=4),
    "one request": Mutant("one request in 16 has every draft accepted", _one_request, weight=4),
    "one place": Mutant(
        f"the acceptance ratio is {ONE_PLACE:g} times too large at the second place of drafts",
        _one_place,
        weight=4,
    ),
    "neighbouring noise": Mutant(
        "tokens of requests with seeds are drawn with the noise of the next position",
        _neighbouring_noise,
        seeded=True,
    ),
    "noise met twice": Mutant(
        "after an accepted draft a request with a seed meets its last noise again",
        _noise_met_twice,
        seeded=True,
    ),
}

_replaced: Patches = []


def install(llm: Any, name: str | None) -> None:
    """Put one mutant in place of the last one, or none; runs in the engine's process."""
    for owner, attribute, value in reversed(_replaced):
        setattr(owner, attribute, value)
    _replaced.clear()
    for owner, attribute, value in MUTANTS[name].patches() if name is not None else []:
        _replaced.append((owner, attribute, getattr(owner, attribute)))
        setattr(owner, attribute, value)


def _is_not_first(counts: np.ndarray) -> np.ndarray:
    """[sum(counts)] bool, all but the first entry of every request."""
    return ragged_arange(counts)[1] > 0
