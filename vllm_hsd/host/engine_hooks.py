"""What is replaced outside the model runner: configuration, scheduler, sampling parameters."""

from __future__ import annotations

import copy
from typing import Any

from vllm_hsd.errors import UserError, quoted
from vllm_hsd.host.hooks import REGISTRY, SCHEDULER, install

_SPECULATION = "vllm.config.speculative.SpeculativeConfig"
REGISTRY.overrides(
    {
        f"{_SPECULATION}.max_num_new_slots_for_drafting": ("slots of the drafts", None),
        f"{_SPECULATION}.compute_hash": ("tells compiled cascades apart", "self"),
        f"{_SPECULATION}.verify_equal_vocab_size_if_draft_model": (
            "names the level whose vocabulary differs",
            "self",
        ),
        f"{_SPECULATION}.use_ngram": ("keeps the texts that lookups search", "self"),
        f"{_SPECULATION}.use_eagle_block_drop": ("of levels that read target states", "self"),
    }
)
REGISTRY.overrides(
    {
        f"{_SPECULATION}.draft_shares_target_positions": (
            "keeps a level's shorter context from the target",
            "self",
        )
    },
    missing=("0.32",),
)

# Drafters of vLLM under which block verification was tested.
STOCK_METHODS = ("draft_model", "eagle", "eagle3", "mtp", "ngram", "ngram_gpu", "dflash")


class NeedsHooks:
    """Base of configurations that install the hooks in every process that receives them."""

    def adapt(self, scheduler_config: Any) -> None:
        """Take in the scheduler's configuration, each time that vLLM settles more of it."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        install()


@REGISTRY.replaces(
    "vllm.config.vllm.VllmConfig._get_v2_model_runner_unsupported_features",
    "self",
    why="refuses what would have vLLM choose its V1 runner, and shows our configuration the "
    "scheduler's",
    until="vLLM has no other runner",
)
def unsupported_features_of_v2(original, self):
    features = original(self)
    if isinstance(self.speculative_config, NeedsHooks):
        if features:
            raise UserError(
                f"vLLM's V2 runner, which serves this speculative configuration, does not support "
                f"{', '.join(features)}: remove one of them."
            )
        self.speculative_config.adapt(self.scheduler_config)
    return features


@REGISTRY.changes(
    "vllm.config.vllm.VllmConfig.num_lookahead_tokens",
    why="reserves the blocks in which branches of a draft are computed",
    until="vLLM verifies trees",
)
def reserve_for_branches():
    from vllm.config.vllm import VllmConfig

    usual: Any = VllmConfig.num_lookahead_tokens

    def num_lookahead_tokens(self):
        lookahead = getattr(self.speculative_config, "lookahead", lambda _: None)(self)
        return usual.fget(self) if lookahead is None else lookahead

    VllmConfig.num_lookahead_tokens = property(num_lookahead_tokens, doc=usual.__doc__)


@REGISTRY.replaces(
    "vllm.sampling_params.SamplingParams._validate_spec_decode",
    "self speculative_config",
    why="allows min_p and logit_bias, which our samplers apply to every draft token; refuses a "
    "seed that would end the engine",
    until="vLLM's rejection samplers apply both, and vLLM refuses the seed",
    issue="vllm-project/vllm#42744",
)
def validate_spec_decode(original, self, speculative_config):
    applies = isinstance(speculative_config, NeedsHooks)
    # vLLM gives the i-th of n answers seed + i.
    if applies and self.seed is not None and not -(2**63) <= self.seed <= 2**63 - self.n:
        each = " for each of the n answers, the i-th of which gets seed + i" * (self.n > 1)
        raise UserError(f"seed is {quoted(self.seed)}: give an integer of 64 bits{each}.")
    if applies and (self.min_p or self.logit_bias):
        self = copy.copy(self)
        self.min_p, self.logit_bias = 0.0, None
    original(self, speculative_config)


@REGISTRY.replaces(
    f"{SCHEDULER}._update_request_as_session",
    "self session update",
    why="goes on with a session behind the last token but one, as without speculation, where a "
    "turn ended inside an accepted draft",
    until="vLLM counts what was computed of a draft that a stop token ends",
)
def update_request_as_session(original, self, session, update):
    session.num_computed_tokens = min(session.num_computed_tokens, session.num_tokens - 1)
    original(self, session, update)


@REGISTRY.replaces(
    "vllm.v1.worker.gpu_worker.Worker._set_draft_weight_update_target",
    "self",
    why="refuses to load weights into levels, of which vLLM would lose what they have",
    until="vLLM updates several drafters",
)
def set_draft_weight_update_target(original, self):
    if getattr(self.speculative_config, "hsd", None) is not None:
        raise UserError(
            "start_draft_weight_update knows one draft model, not levels: start the server anew."
        )
    original(self)
