"""Samplers with one error each, for which `verify` must fail.

They patch method "hsd" on vLLM's V1 runner, in the engine's process, for a cascade of one model
under block verification. A patch takes what it replaces as its first argument.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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

_CHAIN = "vllm_hsd.verify.chain:"
_REQUESTS = "vllm_hsd.runner_v1.request_state:RequestState."
_NOISE = "vllm_hsd.runner_v1.noise:RequestNoise."
_DRAFTS_TO_VERIFY = "vllm_hsd.runner_v1.sampler:drafts_to_verify"


@dataclass(frozen=True)
class Mutant:
    """One error.

    Attributes:
        fault: what is wrong.
        constrained: whether only a text of LETTERS under GRAMMAR shows it.
        seeded: whether only requests with seeds show it, which are compared exactly.
        workload: the one of `lossless.workloads` that shows it; None for plain requests.
        weight: how many times more tokens it takes than the others.
        patches: "module:name" of what it replaces -> in its place.
    """

    fault: str
    constrained: bool = False
    seeded: bool = False
    workload: str | None = None
    weight: int = 1
    patches: dict[str, Callable[..., Any]] = field(default_factory=dict)


MUTANTS = {
    "shared noise": Mutant("the verifier reuses the drafter's uniforms"),
    "raw proposals": Mutant("drafts are verified with probabilities before the temperature"),
    "standard residual": Mutant(
        "block verification recovers with the residual of token-level rejection", weight=16
    ),
    "uniforms met twice": Mutant(
        "uniforms belong to positions, and rejected positions meet theirs again", weight=4
    ),
    "unscored grammar cut": Mutant(
        "a grammar cuts a draft at a refused token, which is then not verified", constrained=True
    ),
    "generous": Mutant(f"the acceptance ratio is {GENEROUS:g} times too large", weight=4),
    "strict": Mutant(f"the acceptance ratio is {STRICT:g} of what it is to be", weight=4),
    "no cap": Mutant("the running acceptance probability is not capped at 1", weight=4),
    "neighbouring row": Mutant("drafts are accepted by the target's row of the next position"),
    "unsubtracted": Mutant(
        "recovered tokens are drawn from the target in place of the residual", weight=4
    ),
    "sharp bonus": Mutant(
        f"bonus tokens are drawn from the target's row to the power of {SHARPER:g}", weight=4
    ),
    "unseen": Mutant(f"{UNSEEN:.1%} of the drafts are accepted unseen", weight=4),
    "one request": Mutant("one request in 16 has every draft accepted", weight=4),
    "one place": Mutant(
        f"the acceptance ratio is {ONE_PLACE:g} times too large at the second place of drafts",
        weight=4,
    ),
    "neighbouring noise": Mutant(
        "tokens of requests with seeds are drawn with the noise of the next position", seeded=True
    ),
    "noise met twice": Mutant(
        "after an accepted draft a request with a seed meets its last noise again", seeded=True
    ),
    "row of another": Mutant(
        "the first two requests of a batch get each other's first row", workload="crowd16"
    ),
    "token after a stop": Mutant("a request goes on for a token after its stop", workload="stops"),
    "block of another": Mutant(
        "the second half of a block is no part of its hash in the prefix cache", workload="turns"
    ),
    "late mask": Mutant("a grammar's masks come one row late", workload="schemas"),
    "budget of another": Mutant(
        "a request gets the thinking budget of the one before", workload="thinking"
    ),
}


def _patches(name: str, target: str) -> Callable[[Callable], Callable]:
    def decorate(patch: Callable) -> Callable:
        MUTANTS[name].patches[target] = patch
        return patch

    return decorate


_replaced: list[tuple[Any, str, Any]] = []


def install(llm: Any, name: str | None) -> None:
    """Put one mutant in place of the last one, or none; runs in the engine's process."""
    for owner, attribute, value in reversed(_replaced):
        setattr(owner, attribute, value)
    _replaced.clear()
    for target, patch in MUTANTS[name].patches.items() if name is not None else ():
        whole = pkgutil.resolve_name(target)
        module, _, path = target.partition(":")
        above, _, attribute = path.rpartition(".")
        owner = pkgutil.resolve_name(f"{module}:{above}")
        _replaced.append((owner, attribute, whole))
        # A function and no `partial`, which would not bind as a method.
        setattr(owner, attribute, _with_first(patch, whole))


def _with_first(patch: Callable, whole: Any) -> Callable:
    @functools.wraps(patch)
    def call(*args: Any, **kwargs: Any) -> Any:
        return patch(whole, *args, **kwargs)

    return call


def _is_not_first(counts: np.ndarray) -> np.ndarray:
    """[sum(counts)] bool, all but the first entry of every request.

    A verification takes one uniform for the next token, then one per draft token.
    """
    return ragged_arange(counts)[1] > 0


@_patches("shared noise", f"{_REQUESTS}uniforms")
def _shared_noise(whole, self, slots, counts, stream):
    from vllm_hsd.verify.rng import host_uniforms

    drawn = whole(self, slots, counts, stream)
    if stream > 0:
        owners, offsets = ragged_arange(counts - 1)
        now = slots[owners]
        used = self.draws[0, now] - self.drafts.counts[now] + offsets
        drawn[_is_not_first(counts)] = host_uniforms(self.seed[now], np.array(0), used)
    return drawn


@_patches("raw proposals", "vllm_hsd.core.verified:BlockedCDF")
def _filtered_cdf(whole, probs):
    return whole((probs.log() / TEMPERATURE).softmax(-1))


@_patches("raw proposals", "vllm_hsd.runner_v1.sampling:RequestSampling.draft_probabilities")
def _raw_proposals(whole, self, logits, requests, level):
    return self.masked(logits, requests).softmax(-1)


@_patches("standard residual", f"{_CHAIN}recovered_cdf")
def _standard_residual(whole, batch, requests, tau, a):
    return whole(batch, requests, tau, np.ones_like(a))[0], whole(batch, requests, tau, a)[1]


@_patches("uniforms met twice", f"{_REQUESTS}uniforms")
def _uniforms_by_position(whole, self, slots, counts, stream):
    from vllm_hsd.verify.rng import host_uniforms

    drawn = whole(self, slots, counts, stream)
    owners, offsets = ragged_arange(counts - (stream > 0))
    now = slots[owners]
    if stream == 0:
        return host_uniforms(self.seed[now], np.array(7), self.end[now] + offsets)
    # Drafting has moved the end of the text past the draft.
    places = self.end[now] - self.drafts.counts[now] + offsets
    drawn[_is_not_first(counts)] = host_uniforms(self.seed[now], np.array(8), places)
    return drawn


@_patches("unscored grammar cut", _DRAFTS_TO_VERIFY)
def _unscored_cut(whole, *args):
    batch, scored = whole(*args)
    return replace(batch, lengths=scored), scored


@_patches("generous", f"{_CHAIN}probability_ratios")
def _generous(whole, target, draft):
    return GENEROUS * whole(target, draft)


@_patches("strict", f"{_CHAIN}probability_ratios")
def _strict(whole, target, draft):
    return STRICT * whole(target, draft)


@_patches("no cap", f"{_CHAIN}prefix_acceptance")
def _no_cap(whole, rho, **method):
    return np.cumprod(rho, -1)


@_patches("neighbouring row", "vllm_hsd.verify.inputs:ChainBatch.token_probs")
def _neighbouring_row(whole, self):
    rows = np.concatenate((self.target_rows[:, 1:], self.target_rows[:, -1:]), axis=1)
    return whole(replace(self, target_rows=rows))


@_patches("unsubtracted", f"{_CHAIN}recovered_cdf")
def _unsubtracted(whole, batch, requests, tau, a):
    from vllm_hsd.verify.chain import bonus_cdf

    return bonus_cdf(batch, requests, tau), whole(batch, requests, tau, a)[1]


@_patches("sharp bonus", f"{_CHAIN}bonus_cdf")
def _sharp_bonus(whole, batch, requests, tau):
    from vllm_hsd.verify.residual import BlockedCDF

    return BlockedCDF(batch.target(requests, tau) ** SHARPER)


def _taken(found: np.ndarray, length: np.ndarray, picked: np.ndarray) -> np.ndarray:
    """[batch, n] acceptance probabilities, those of picked drafts 1 whatever the target says."""
    inside = np.arange(found.shape[1]) < length[:, None]
    return np.where(picked[:, None] & inside, 1.0, found)


_rng = np.random.default_rng(0)


@_patches("unseen", f"{_CHAIN}prefix_probabilities")
def _unseen(whole, batch, length, method):
    found = whole(batch, length, method)
    return _taken(found, length, _rng.random(len(found)) < UNSEEN)


_slots: list[np.ndarray] = []


@_patches("one request", _DRAFTS_TO_VERIFY)
def _note_slots(whole, drafts, slots, *rest):
    _slots[:] = [slots]
    return whole(drafts, slots, *rest)


@_patches("one request", f"{_CHAIN}prefix_probabilities")
def _one_request(whole, batch, length, method):
    return _taken(whole(batch, length, method), length, _slots[0] % 16 == 0)


@_patches("one place", f"{_CHAIN}probability_ratios")
def _one_place(whole, target, draft):
    found = whole(target, draft)
    found[:, 1:2] *= ONE_PLACE
    return found


@_patches("neighbouring noise", f"{_NOISE}at")
def _neighbouring_noise(whole, self, offset):
    return whole(self, offset + 1)


@_patches("noise met twice", f"{_NOISE}emitted")
def _noise_met_twice(whole, self, count):
    return whole(self, max(1, count - 1))


@_patches("row of another", "vllm_hsd.runner_v1.sampling:RequestSampling.target_logits")
def _row_of_another(whole, self, logits, counts, *rest):
    found = whole(self, logits, counts, *rest)
    if len(counts) > 1:
        second = int(counts[0]) + 1
        found[[0, second]] = found[[second, 0]]
    return found


_going_on: set[str] = set()


@_patches("token after a stop", "vllm.v1.core.sched.scheduler:check_stop")
def _token_after_a_stop(whole, request, max_model_len):
    from vllm.v1.request import RequestStatus

    before = request.status
    if whole(request, max_model_len) and request.status != RequestStatus.FINISHED_STOPPED:
        return True
    if request.request_id in _going_on:
        request.status = RequestStatus.FINISHED_STOPPED
        return True
    if request.status == RequestStatus.FINISHED_STOPPED:
        _going_on.add(request.request_id)
        request.status, request.stop_reason = before, None
    return False


@_patches("block of another", "vllm.v1.core.kv_cache_utils:hash_block_tokens")
def _block_of_another(whole, function, parent, token_ids, *rest):
    return whole(function, parent, token_ids[: len(token_ids) // 2], *rest)


@_patches("late mask", "vllm.v1.worker.gpu_model_runner:apply_grammar_bitmask")
def _late_mask(whole, scheduled, grammar, *rest):
    late = np.roll(grammar.grammar_bitmask, 1, axis=0)
    return whole(scheduled, replace(grammar, grammar_bitmask=late), *rest)


_budgets: list[int] = []


@_patches(
    "budget of another",
    "vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder._init_state_entry",
)
def _budget_of_another(whole, self, prompt, budget):
    _budgets.append(budget)
    return whole(self, prompt, _budgets[-2:][0])
