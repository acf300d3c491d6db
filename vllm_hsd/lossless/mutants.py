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

Patches = list[tuple[Any, str, Any]]


@dataclass(frozen=True)
class Mutant:
    """One error.

    Attributes:
        fault: what is wrong.
        patches: called in the engine's process; (owner, attribute, new value) of what it changes.
        constrained: whether only a text of LETTERS under GRAMMAR shows it.
        weight: how many times more tokens it takes than the others.
    """

    fault: str
    patches: Callable[[], Patches]
    constrained: bool = False
    weight: int = 1


def _shared_noise() -> Patches:
    from vllm_hsd.runner_v1.requests import RequestTable
    from vllm_hsd.verify.rng import host_uniforms

    whole = RequestTable.uniforms

    def uniforms(self, slots, counts, stream):
        drawn = whole(self, slots, counts, stream)
        if stream > 0:
            # A verification takes one uniform for the next token, then one per draft token.
            owners, offsets = ragged_arange(counts - 1)
            now = slots[owners]
            used = self.draws[0, now] - self.drafts.counts[now] + offsets
            drawn[_is_not_first(counts)] = host_uniforms(self.seed[now], np.array(0), used)
        return drawn

    return [(RequestTable, "uniforms", uniforms)]


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
    from vllm_hsd.runner_v1.requests import RequestTable
    from vllm_hsd.verify.rng import host_uniforms

    whole = RequestTable.uniforms

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

    return [(RequestTable, "uniforms", uniforms)]


def _unscored_cut() -> Patches:
    from vllm_hsd.runner_v1 import sampler

    whole = sampler.drafts_to_verify

    def drafts_to_verify(*args):
        batch, scored = whole(*args)
        return replace(batch, lengths=scored), scored

    return [(sampler, "drafts_to_verify", drafts_to_verify)]


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
