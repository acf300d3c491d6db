"""Replacements on one runner of a worker, made while it builds its drafter (see compat.py)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.worker import gpu_model_runner

if TYPE_CHECKING:
    from vllm_hsd.runner_v1.proposer import CascadeProposer


def take_over_runner(proposer: CascadeProposer, runner) -> None:
    """Replace the runner's methods that know only one drafter."""
    sample_tokens = runner.sample_tokens

    def sample_tokens_with_counts(grammar_output):
        output = sample_tokens(grammar_output)
        if isinstance(output, ModelRunnerOutput) and output.req_ids:
            # A plain attribute: pickled to the scheduler with the output, unknown to vLLM.
            output.hsd_level_stats = proposer.take_stats()
        return output

    update_states = runner._update_states

    def update_states_and_follow(scheduler_output):
        # Also called for steps without tokens, which tell that the last request has ended.
        deferred = update_states(scheduler_output)
        proposer.follow_scheduler(scheduler_output)
        return deferred

    runner._update_states = update_states_and_follow
    runner.sample_tokens = sample_tokens_with_counts
    runner.propose_draft_token_ids = proposer.propose_draft_token_ids
    # Stock vLLM stops drafting for the whole batch near max_model_len; we cap per request.
    runner._input_fits_in_drafter = lambda metadata: metadata is not None
    runner._get_spec_decode_draft_probs = lambda metadata: None
    _hook_logits_processors()


def _hook_logits_processors() -> None:
    """Build min_p and logit_bias too; the runner asks for them after its drafter."""
    build = gpu_model_runner.build_logitsprocs
    if hasattr(build, "__wrapped__"):
        return

    @functools.wraps(build)
    def build_logitsprocs(
        vllm_config, device, is_pin_memory, is_pooling_model, custom_logitsprocs=()
    ):
        method = getattr(vllm_config.speculative_config, "method", None)
        if custom_logitsprocs or method != "hsd":
            return build(vllm_config, device, is_pin_memory, is_pooling_model, custom_logitsprocs)
        return LogitsProcessors(
            processor(vllm_config, device, is_pin_memory) for processor in BUILTIN_LOGITS_PROCESSORS
        )

    gpu_model_runner.build_logitsprocs = build_logitsprocs
