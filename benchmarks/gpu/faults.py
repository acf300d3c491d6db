"""Faults of a verifier on tables, each small: about 2 % of total variation per drafted position.

Some change what the kernels are given, others what they have decided.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

# One request in so many is verified wrongly by some of them.
ONE_IN = 16
RATIO, UNSEEN, SHARPER, PLACE_RATIO = 1.05, 0.06, 1.5, 1.3


@dataclass
class Step:
    """A verification of B drafts of K tokens at temperature 1, before and after it.

    Attributes:
        logits: [B, K + 1, V] the target's.
        lse: float32 [B, K], of the rows that the drafts were drawn from.
        drafts: int64 [B, K].
        draft_logprobs: [B, K], of the draft tokens, in the rows that they were drawn from.
        token_ids: int64 [B, K + 1], emitted, then -1; filled in by the verifier.
        num_emitted: int32 [B].
        generator: on the device.
    """

    logits: torch.Tensor
    lse: torch.Tensor
    drafts: torch.Tensor
    draft_logprobs: torch.Tensor
    token_ids: torch.Tensor
    num_emitted: torch.Tensor
    generator: torch.Generator

    def uniforms(self) -> torch.Tensor:
        """[B]."""
        drafts = self.drafts
        return torch.rand(len(drafts), device=drafts.device, generator=self.generator)

    def redraw(self, which: torch.Tensor, power: float = 1.0) -> None:
        """Draw the last emitted token of requests `which`, [B] bool, from the target's row."""
        index = which.nonzero()[:, 0]
        if len(index):
            last = self.num_emitted[index].long() - 1
            probs = (self.logits[index, last].float() * power).softmax(-1)
            drawn = torch.multinomial(probs, 1, generator=self.generator)[:, 0]
            self.token_ids[index, last] = drawn

    def take(self, which: torch.Tensor) -> None:
        """Accept the whole drafts of requests `which`, [B] bool."""
        self.token_ids[which, :-1] = self.drafts[which]
        self.num_emitted[which] = self.drafts.shape[1] + 1
        self.redraw(which)


def _generous(step: Step) -> None:
    step.lse += torch.tensor(RATIO).log()


def _strict(step: Step) -> None:
    step.lse -= torch.tensor(RATIO).log()


def _one_place(step: Step) -> None:
    step.lse[:, 1] += torch.tensor(PLACE_RATIO).log()


def _neighbouring_row(step: Step) -> None:
    odd = torch.arange(len(step.drafts), device=step.drafts.device) % ONE_IN == 0
    step.logits[odd] = step.logits[odd].roll(-1, 1)


def _no_cap(step: Step) -> None:
    k = step.drafts.shape[1]
    logprobs = step.logits[:, :k].float().log_softmax(-1).gather(2, step.drafts[..., None])[..., 0]
    joint = (logprobs - step.draft_logprobs).sum(1)
    step.take((step.uniforms().log() < joint) & (step.num_emitted <= k))


def _unsubtracted(step: Step) -> None:
    rejected = step.num_emitted <= step.drafts.shape[1]
    step.redraw(rejected & (step.uniforms() < 0.5))


def _sharp_bonus(step: Step) -> None:
    step.redraw(step.num_emitted > step.drafts.shape[1], SHARPER)


def _unseen(step: Step) -> None:
    step.take(step.uniforms() < UNSEEN)


def _one_request(step: Step) -> None:
    step.take(torch.arange(len(step.drafts), device=step.drafts.device) % ONE_IN == 0)


# name -> (before the verifier, after it), None where nothing is changed.
Change = Callable[[Step], None] | None
FAULTS: dict[str, tuple[Change, Change]] = {
    "acceptance ratio too large": (_generous, None),
    "acceptance ratio too small": (_strict, None),
    "ratio too large at the second place": (_one_place, None),
    "neighbouring rows in one request of 16": (_neighbouring_row, None),
    "whole drafts accepted by an uncapped ratio": (None, _no_cap),
    "half of the recovered tokens from the target": (None, _unsubtracted),
    "bonus tokens from a sharpened row": (None, _sharp_bonus),
    "drafts accepted unseen": (None, _unseen),
    "every draft accepted in one request of 16": (None, _one_request),
}

# For the V2 runner. Drafts taken for certain would be no fault: that is lossless for any draft that
# does not depend on the verifier's uniforms.
COLDER = 10.0


def install(setattr=setattr) -> None:
    """Divide the drafts' temperature, for stock drafters and cascades."""

    def changed(found):
        colder = found["draft_temperature"] / COLDER
        return {**found, "draft_temperature": colder, "draft_lse": None}

    _install(changed, setattr)


def install_generous(setattr=setattr, ratio: float = RATIO) -> None:
    """Accept by a ratio that is too large: by default about 2 % off for each drafted position."""

    def changed(found):
        lse = found["draft_lse"]
        return found if lse is None else {**found, "draft_lse": lse + math.log(ratio)}

    _install(changed, setattr)


def _install(changed, setattr) -> None:
    from vllm_hsd.host.cascade_sampler import CascadeRejectionSampler
    from vllm_hsd.host.sampler import BlockRejectionSampler

    for verifier in (BlockRejectionSampler, CascadeRejectionSampler):
        setattr(verifier, "drafts", _changed(verifier.drafts, changed))


def _changed(right, changed):
    def drafts(self, draft_logits, idx_mapping):
        return changed(right(self, draft_logits, idx_mapping))

    return drafts
