"""Samplers with one error each, for which `verify` must fail.

They patch method "hsd" on vLLM's V2 runner, in the engine's process, for a cascade of one model
under block verification. A patch takes what it replaces as its first argument. What the compiled
kernels decide is changed in what they are given, or in what has come of it.
"""

from __future__ import annotations

import copy
import functools
import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

# Of the text that shows the errors.
TEMPERATURE = 2.0
# Drafters do not know the grammar, which refuses about two thirds of their tokens.
GRAMMAR = {"regex": "[ -~]{500}"}

# How wrong some mutants are: about 2 % of total variation per drafted position.
GENEROUS, STRICT, SHARPER, UNSEEN, ONE_PLACE = 1.05, 0.95, 1.3, 0.025, 1.5

_SAMPLER = "vllm_hsd.host.sampler:"
_VERIFY = f"{_SAMPLER}verify_chain_padded"
_TARGET_LOGITS = f"{_SAMPLER}BlockRejectionSampler.target_logits"
_DRAFTS = "vllm_hsd.host.cascade_sampler:CascadeRejectionSampler.drafts"


@dataclass(frozen=True)
class Mutant:
    """One error.

    Attributes:
        fault: what is wrong.
        constrained: whether only a text under GRAMMAR shows it.
        seeded: whether only requests with seeds show it, which are compared exactly.
        workload: the one of `tools.audit.workloads` that shows it; None for plain requests.
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
    "raw proposals": Mutant(
        "drafts are verified with probabilities at the target's temperature, not the drafter's"
    ),
    "standard residual": Mutant(
        "block verification recovers with the residual of token-level rejection", weight=16
    ),
    "uniforms met twice": Mutant(
        "uniforms belong to positions, and rejected positions meet theirs again", weight=4
    ),
    "unscored grammar cut": Mutant(
        "the scheduler cuts a draft at a token that a grammar refuses, which is then not verified",
        constrained=True,
    ),
    "unverified refusal": Mutant(
        "the verifier ends a draft before a token that a grammar refuses", constrained=True
    ),
    "generous": Mutant(f"the acceptance ratio is {GENEROUS:g} times too large", weight=4),
    "strict": Mutant(f"the acceptance ratio is {STRICT:g} of what it is to be", weight=4),
    "no cap": Mutant("whole drafts are accepted by their uncapped joint ratio too", weight=4),
    "neighbouring row": Mutant("drafts are verified by the target's rows of the next positions"),
    "draft of another": Mutant("drafts are verified with the rows of the request before"),
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
        "after a whole draft a request with a seed meets its last noise again", seeded=True
    ),
    "row of another": Mutant(
        "the first two requests of a batch get each other's first row", workload="crowd16"
    ),
    "no penalties": Mutant(
        "requests with penalties are verified by the model's own rows", workload="crowd16"
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
        _replaced.append(replace(target, patch))


def replace(target: str, patch: Callable[..., Any]) -> tuple[Any, str, Any]:
    """Put a patch, whose first argument is what it replaces, in the place of "module:name".

    Returns:
        (what has the name, its last part, what was there).
    """
    module, _, path = target.partition(":")
    above, _, attribute = path.rpartition(".")
    owner = pkgutil.resolve_name(f"{module}:{above}")
    whole = getattr(owner, attribute)

    # A function and no `partial`, which would not bind as a method.
    @functools.wraps(whole)
    def call(*args: Any, **kwargs: Any) -> Any:
        return patch(whole, *args, **kwargs)

    setattr(owner, attribute, call)
    return owner, attribute, whole


class _Verified:
    """A verification of B requests of at most K draft tokens, and what has come of it.

    Attributes:
        result: the verifier's.
        sampled: bool [B], requests that the rule is for: neither greedy nor coupled.
        slots: int64 [B].
        lengths: int64 [B], tokens of each draft.
        drafts: int64 [B, K + 1], of each draft, then anything.
    """

    def __init__(self, result, target, drafts, sampled, cu, slots, options) -> None:
        self.result, self.target, self.options = result, target, options
        self.slots, self.temperature = slots.long(), options["temperature"][slots.long()]
        self.sampled, self.starts = self.temperature > 0, cu[:-1].long()
        self.rows, self.lengths = drafts, cu.long().diff() - 1
        self.index = options.get("draft_index", slots).long()
        if "draft_length" in options:
            limits = options["draft_length"][self.index.clamp_min(0)].long()
            self.lengths = self.lengths.minimum(limits) * (self.index >= 0)
        places = torch.arange(result.token_ids.shape[1], device=cu.device)
        last = len(sampled) - 1
        self.drafts = sampled[(self.starts[:, None] + 1 + places).clamp_max(last)].long()
        # An empty slot ends a draft.
        inside = (places < self.lengths[:, None]) & (self.drafts >= 0)
        self.lengths = inside.long().cumprod(1).sum(1)

    def uniforms(self) -> torch.Tensor:
        """float32 [B]."""
        return torch.rand(len(self.slots), device=self.slots.device)

    @property
    def accepted(self) -> torch.Tensor:
        """int64 [B]."""
        return self.result.num_accepted.long()

    @property
    def rejected(self) -> torch.Tensor:
        """bool [B], sampled requests of whose drafts a token was rejected."""
        return self.sampled & (self.accepted < self.lengths)

    @property
    def whole(self) -> torch.Tensor:
        """bool [B], sampled requests of whose drafts all was accepted, if there was one."""
        return self.sampled & (self.lengths > 0) & (self.accepted == self.lengths)

    def target_probs(self, at: torch.Tensor) -> torch.Tensor:
        """float32 [B, V] of the target after `at` tokens, int64 [B], of each draft."""
        rows = self.starts + at
        scaled = self.target[rows].float() / self.temperature.abs().clamp_min(1e-6)[:, None]
        thresholds = self.options["thresholds"]
        if thresholds is not None:
            scaled = scaled.masked_fill(scaled < thresholds[rows, None], -torch.inf)
        return scaled.softmax(-1)

    def draft_probs(self, at: torch.Tensor) -> torch.Tensor:
        """float32 [B, V] that the token after `at` tokens of each draft was drawn from."""
        at = at.clamp_max(self.rows.shape[1] - 1)
        scale = self.options["draft_temperature"][self.slots].abs().clamp_min(1e-6)
        return (self.rows[self.index.clamp_min(0), at].float() / scale[:, None]).softmax(-1)

    def ratios(self) -> torch.Tensor:
        """float32 [B], joint probability of each draft by the target over that by the drafter."""
        found = torch.ones_like(self.temperature)
        for t in range(int(self.lengths.max())):
            at, token = torch.full_like(self.lengths, t), self.drafts[:, t, None].clamp_min(0)
            inside = t < self.lengths
            p = self.target_probs(torch.where(inside, at, 0)).gather(1, token)[:, 0]
            q = self.draft_probs(at).gather(1, token)[:, 0]
            found = found * torch.where(inside, p / q, 1.0)
        return found

    def redraw(self, which: torch.Tensor, probs: torch.Tensor):
        """The result with other last tokens of requests `which`, bool [B], from [B, V] weights."""
        result, which = self.result, which & (probs.sum(1) > 0)
        if which.any():
            last = result.num_emitted.long()[which] - 1
            result.token_ids[which, last] = torch.multinomial(probs[which], 1)[:, 0]
        return result

    def take(self, which: torch.Tensor):
        """The result with whole drafts accepted of requests `which`, bool [B]."""
        which = which & self.sampled & (self.lengths > 0)
        places = torch.arange(self.drafts.shape[1], device=which.device)
        taken = torch.where(places < self.lengths[:, None], self.drafts, -1)
        result, lengths = self.result, self.lengths.int()
        result.token_ids[which] = taken[which]
        result.num_accepted[which] = lengths[which]
        result.num_emitted[which] = lengths[which] + 1
        return self.redraw(which, self.target_probs(self.lengths))


def _after(name: str) -> Callable[[Callable], Callable]:
    """Patch what has come of a verification with drafts."""

    def decorate(change: Callable[[_Verified], Any]) -> Callable:
        def verify(whole, target, drafts, sampled, cu, slots, **options):
            result = whole(target, drafts, sampled, cu, slots, **options)
            if drafts is None:
                return result
            return change(_Verified(result, target, drafts, sampled, cu, slots, options))

        return _patches(name, _VERIFY)(verify)

    return decorate


@_patches("shared noise", "vllm_hsd.kernels.chain_verify:stream_of")
def _drafting_stream(whole, level, lowest):
    return 0


@_patches("shared noise", _VERIFY)
def _drafting_draws(whole, *args, **options):
    # A verification takes one uniform for the next token, then one per draft token.
    return whole(*args, draw_offset=-1, **options)


@_patches("raw proposals", _DRAFTS)
def _raw_proposals(whole, self, *args):
    given = whole(self, *args)
    return {**given, "draft_temperature": self.parameters.temperature, "draft_lse": None}


@_after("standard residual")
def _standard_residual(step):
    residual = step.target_probs(step.accepted) - step.draft_probs(step.accepted)
    return step.redraw(step.rejected, residual.clamp_min(0))


@_patches("uniforms met twice", "vllm_hsd.host.base_speculator:BaseSpeculator._stage")
def _drafts_by_position(whole, self, state, *args, **options):
    from vllm_hsd.cascade.schedule import DRAWS_PER_LENGTH

    whole(self, state, *args, **options)
    state.draws.div_(DRAWS_PER_LENGTH, rounding_mode="floor")


@_patches("uniforms met twice", _VERIFY)
def _verdicts_by_position(whole, *args, draws, **options):
    from vllm_hsd.cascade.schedule import DRAWS_PER_LENGTH

    return whole(*args, draws=draws // DRAWS_PER_LENGTH, **options)


@_patches("unscored grammar cut", "vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids")
def _unscored_cut(whole, self, draft_token_ids):
    whole(self, draft_token_ids)
    for name in draft_token_ids.req_ids:
        request = self.requests.get(name)
        if request is not None and request.use_structured_output:
            # What the grammar refuses comes as a token that is none.
            request.spec_token_ids = [token for token in request.spec_token_ids if token >= 0]


@_patches("unverified refusal", "vllm.v1.worker.gpu.model_runner:grammar_invalid_drafts")
def _unverified_refusal(whole, *args):
    invalid = whole(*args)
    # The verifier leaves out the first one.
    return None if invalid is None else invalid | invalid.roll(-1)


def _less_likely(given: dict[str, Any], factor: float, place: slice = slice(None)):
    """Drafts as if they had been drawn with 1 / factor of their probabilities."""
    lse = given["draft_lse"].clone()
    lse[:, place] += math.log(factor)
    return {**given, "draft_lse": lse}


@_patches("generous", _DRAFTS)
def _generous(whole, *args):
    return _less_likely(whole(*args), GENEROUS)


@_patches("strict", _DRAFTS)
def _strict(whole, *args):
    return _less_likely(whole(*args), STRICT)


@_patches("one place", _DRAFTS)
def _one_place(whole, *args):
    return _less_likely(whole(*args), ONE_PLACE, slice(1, 2))


@_after("no cap")
def _no_cap(step):
    return step.take(step.rejected & (step.uniforms() < step.ratios()))


@_patches("neighbouring row", _VERIFY)
def _neighbouring_row(whole, target, drafts, sampled, cu, *args, **options):
    index = torch.arange(1, len(target) + 1, device=target.device)
    index[cu[1:].long() - 1] -= 1
    return whole(target[index], drafts, sampled, cu, *args, **options)


@_patches("draft of another", _DRAFTS)
def _draft_of_another(whole, *args):
    given = whole(*args)
    return {**given, "draft_index": given["draft_index"].roll(1)}


@_after("unsubtracted")
def _unsubtracted(step):
    return step.redraw(step.rejected, step.target_probs(step.accepted))


@_after("sharp bonus")
def _sharp_bonus(step):
    return step.redraw(step.whole, step.target_probs(step.accepted) ** SHARPER)


@_after("unseen")
def _unseen(step):
    return step.take(step.uniforms() < UNSEEN)


@_after("one request")
def _one_request(step):
    return step.take(step.slots % 16 == 0)


@_patches("neighbouring noise", _VERIFY)
def _neighbouring_noise(whole, *args, positions, **options):
    return whole(*args, positions=positions + 1, **options)


@_patches("noise met twice", _VERIFY)
def _noise_met_twice(whole, target, drafts, sampled, cu, *args, positions, **options):
    after = positions.clone()
    after[cu[1:].long() - 1] -= (cu.diff() > 1).long()
    return whole(target, drafts, sampled, cu, *args, positions=after, **options)


@_patches("row of another", _TARGET_LOGITS)
def _row_of_another(whole, self, *args):
    found, is_scaled = whole(self, *args)
    first = (args[6] == 0).nonzero()[:2, 0]
    found[first] = found[first.flip(0)]
    return found, is_scaled


@_patches("no penalties", _TARGET_LOGITS)
def _no_penalties(whole, self, logits, *args):
    return logits, False


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


@_patches(
    "late mask",
    "vllm.v1.worker.gpu.structured_outputs:StructuredOutputsWorker.apply_grammar_bitmask",
)
def _late_mask(whole, self, logits, batch, requests, bitmask):
    return whole(self, logits, batch, requests, np.roll(bitmask, 1, axis=0))


_budgets: list[int] = []


@_patches(
    "budget of another", "vllm.v1.worker.gpu.sample.thinking_budget:ThinkingBudgetState.add_request"
)
def _budget_of_another(whole, self, slot, params):
    if params.thinking_token_budget is not None:
        _budgets.append(params.thinking_token_budget)
        params = copy.copy(params)
        params.thinking_token_budget = _budgets[-2:][0]
    return whole(self, slot, params)
