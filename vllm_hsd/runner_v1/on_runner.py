"""Replacements on the one runner that hosts a cascade."""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch

from vllm_hsd import metrics
from vllm_hsd.core.counters import Count, LevelCounts
from vllm_hsd.errors import UserError
from vllm_hsd.runner_v1 import hooks
from vllm_hsd.runner_v1.hooks import (
    NO_PLUGIN_API,
    NONE_FILED,
    PLUGIN_ISSUE,
    RUNNER,
    replaces_on_runner,
)


class HostedCascade(Protocol):
    """What the replacements call: the cascade's proposer."""

    device: torch.device

    def follow_scheduler(self, scheduler_output: Any) -> None:
        """Take note of requests that left, joined or came back since the last step."""

    def take_counts(self) -> LevelCounts:
        """Counts of every level since the last call."""

    def propose_draft_token_ids(self, *args: Any) -> list[list[int]]:
        """Draft for the requests that have just sampled."""


@replaces_on_runner(
    f"{RUNNER}._update_states",
    ("self", "scheduler_output"),
    why="tells of requests that join, leave or come back, also in steps without tokens",
    until=NO_PLUGIN_API,
    issue=PLUGIN_ISSUE,
)
def update_states(original, proposer: HostedCascade, scheduler_output):
    deferred = original(scheduler_output)
    proposer.follow_scheduler(scheduler_output)
    return deferred


@replaces_on_runner(
    f"{RUNNER}.sample_tokens",
    ("self", "grammar_output"),
    why="attaches the counts of every level to the step's output",
    until="vLLM carries a drafter's own statistics",
    issue=NONE_FILED,
)
def sample_tokens(original, proposer: HostedCascade, grammar_output):
    from vllm.v1.outputs import ModelRunnerOutput

    output = original(grammar_output)
    if isinstance(output, ModelRunnerOutput) and output.req_ids:
        counts = proposer.take_counts()
        if proposer.device.type != "cpu":
            # A device runs behind the host's clock: this is the time to enqueue the work.
            counts.rows[:, [Count.forward_ns, Count.ns]] = 0
        setattr(output, metrics.ATTRIBUTE, counts)
    return output


@replaces_on_runner(
    f"{RUNNER}.propose_draft_token_ids",
    (
        "self",
        "scheduler_output",
        "sampled_token_ids",
        "sampling_metadata",
        "hidden_states",
        "sample_hidden_states",
        "aux_hidden_states",
        "spec_decode_metadata",
        "common_attn_metadata",
        "slot_mappings",
    ),
    why="drafts with the cascade",
    until=NO_PLUGIN_API,
    issue=PLUGIN_ISSUE,
)
def propose_draft_token_ids(original, proposer: HostedCascade, *args, **kwargs):
    return proposer.propose_draft_token_ids(*args, **kwargs)


@replaces_on_runner(
    f"{RUNNER}._input_fits_in_drafter",
    ("self", "common_attn_metadata"),
    why="drafts up to max_model_len with a limit per request; vLLM stops the whole batch",
    until=NO_PLUGIN_API,
    issue="vllm-project/vllm#29422",
)
def input_fits_in_drafter(original, proposer: HostedCascade, metadata):
    return metadata is not None


@replaces_on_runner(
    f"{RUNNER}._get_spec_decode_draft_probs",
    ("self", "spec_decode_metadata"),
    why="leaves the draft probabilities with the drafts; vLLM drops the batch's where one has none",
    until=NO_PLUGIN_API,
    issue="vllm-project/vllm#40269",
)
def no_draft_probs(original, proposer: HostedCascade, metadata):
    return None


@hooks.replaces(
    f"{RUNNER}.__init__",
    ("self", "vllm_config", "device"),
    why="adds the logits processors that vLLM leaves out under speculation and our samplers apply; "
    "gives the requests' generators to our sampler under stock drafters",
    until="vLLM's rejection samplers apply min_p and logit_bias",
    issue="vllm-project/vllm#42744",
)
def init_runner(original, self, vllm_config, device):
    ours = getattr(vllm_config.speculative_config, "hsd_runner", None) == "V1"
    if ours:
        # vLLM is about to warn that min_p and logit_bias do nothing.
        logging.getLogger("vllm.v1.sample.logits_processor").addFilter(
            lambda record: "min_p and logit_bias" not in str(record.msg)
        )
    original(self, vllm_config, device)
    if ours:
        complete_logits_processors(self)
    from vllm_hsd.runner_v1.stock_drafters import StockDraftSampler

    if isinstance(getattr(self, "rejection_sampler", None), StockDraftSampler):
        self.rejection_sampler.attach(self)


def complete_logits_processors(runner) -> None:
    """Add the built-in logits processors that vLLM leaves out under speculation.

    Done on the finished runner, so that it does not matter who has built the list or wrapped the
    function that does.

    Raises:
        UserError: the list holds a processor that our sampler would not apply.
    """
    from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS

    present = runner.input_batch.logitsprocs
    known = tuple(BUILTIN_LOGITS_PROCESSORS)
    for processor in present.all:
        if not isinstance(processor, known):
            name = f"{type(processor).__module__}.{type(processor).__qualname__}"
            raise UserError(
                f"our verifier does not apply the logits processor {name}: remove it, or serve "
                "without speculation."
            )
    from vllm.utils.platform_utils import is_pin_memory_available

    for kind in known:
        if not any(isinstance(processor, kind) for processor in present.all):
            processor = kind(runner.vllm_config, runner.device, is_pin_memory_available())
            (
                present.argmax_invariant
                if processor.is_argmax_invariant()
                else present.non_argmax_invariant
            ).append(processor)
