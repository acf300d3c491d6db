"""Replacements of classes of vLLM's V1 runner; `on_runner` and `metrics` have the others.

Importing this module imports nothing of vLLM.
"""

from __future__ import annotations

from vllm_hsd.errors import UserError
from vllm_hsd.runner_v1.hooks import (
    BLOCK_ISSUE,
    NO_PLUGIN_API,
    NONE_FILED,
    PLUGIN_ISSUE,
    replaces,
)
from vllm_hsd.shared_hooks import STOCK_METHODS


@replaces(
    "vllm.v1.spec_decode.draft_model.DraftModelProposer.__new__",
    None,
    why="makes the cascade where the runner makes its draft model; the subclass passes the "
    "runner's isinstance checks, a factory would not",
    until=NO_PLUGIN_API,
    issue=PLUGIN_ISSUE,
)
def new_draft_model_proposer(original, cls, vllm_config, *args, **kwargs):
    if cls.__name__ == "DraftModelProposer" and _is_cascade(vllm_config.speculative_config):
        from vllm_hsd.runner_v1.proposer import CascadeProposer

        cls = CascadeProposer
    return _new(original, cls, vllm_config, *args, **kwargs)


@replaces(
    "vllm.v1.sample.rejection_sampler.RejectionSampler.__new__",
    None,
    why="makes our sampler for block verification on the V1 runner, which has none",
    until="vLLM's V1 runner verifies blocks, or is gone",
    issue=BLOCK_ISSUE,
)
def new_rejection_sampler(original, cls, sampler, spec_config=None, *args, **kwargs):
    if getattr(spec_config, "hsd_runner", None) == "V2":
        raise UserError(
            "this speculative configuration was made for vLLM's V2 runner, and vLLM chose V1: set "
            "VLLM_USE_V2_MODEL_RUNNER to 0 or 1."
        )
    if cls.__name__ == "RejectionSampler" and _verifies_blocks(spec_config):
        from vllm_hsd.runner_v1.stock_drafters import StockDraftSampler

        cls = StockDraftSampler
    return _new(original, cls, sampler, spec_config, *args, **kwargs)


@replaces(
    "vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer.__init__",
    ("self", "vllm_config", "device", "pass_hidden_states_to_model", "runner"),
    why="keeps a drafter's probabilities for block verification; vLLM keeps them for 'standard'",
    until="vLLM's V1 runner verifies blocks, or is gone",
    issue=BLOCK_ISSUE,
)
def init_base_proposer(original, self, vllm_config, *args, **kwargs):
    original(self, vllm_config, *args, **kwargs)
    config = vllm_config.speculative_config
    if _verifies_blocks(config) and config.draft_sample_method == "probabilistic":
        self._enable_probabilistic_draft_probs = True


@replaces(
    "vllm.v1.sample.thinking_budget_state.ThinkingBudgetStateHolder.sync_batch",
    ("self", "batch_update"),
    why="forgets the budget of a request that has left when another moves into its row, which "
    "vLLM leaves to that other request",
    until="vLLM does so",
    issue=NONE_FILED,
)
def sync_thinking_budgets(original, self, batch_update):
    for _, target, direction in batch_update.moved if batch_update else ():
        if direction.name == "UNIDIRECTIONAL":
            self._state.pop(target, None)
    original(self, batch_update)


def _new(original, cls, *args, **kwargs):
    return original(cls) if original is object.__new__ else original(cls, *args, **kwargs)


def _is_cascade(config) -> bool:
    return getattr(config, "method", None) == "hsd"


def _verifies_blocks(config) -> bool:
    return (
        getattr(config, "rejection_sample_method", None) == "block"
        and config.method in STOCK_METHODS["V1"]
    )
