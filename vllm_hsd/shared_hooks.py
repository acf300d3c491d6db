"""Registry of the vLLM names that both model runners' parts need.

`entrance` adds the function that reads configurations. Importing this module imports nothing of
vLLM.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any

from vllm_hsd.errors import UserError
from vllm_hsd.registry import NONE_FILED, Registry

REGISTRY = Registry("vllm_hsd", ("metrics",))
_SPECULATION = "vllm.config.speculative.SpeculativeConfig"
REGISTRY.overrides(
    {
        f"{_SPECULATION}.max_num_new_slots_for_drafting": ("slots of the drafts", None),
        f"{_SPECULATION}.compute_hash": ("tells compiled cascades apart", ("self",)),
        f"{_SPECULATION}.verify_equal_vocab_size_if_draft_model": (
            "names the level whose vocabulary differs",
            ("self",),
        ),
    }
)

# Drafters of vLLM under which block verification was tested, by runner.
STOCK_METHODS = {
    "V1": ("draft_model", "eagle", "eagle3", "medusa", "mtp", "ngram", "suffix"),
    "V2": ("draft_model", "eagle", "eagle3", "mtp", "ngram", "ngram_gpu", "dflash"),
}


def install(runner: str) -> None:
    """Replace what the part of a runner, "V1" or "V2", replaces; see `Registry.install`."""
    importlib.import_module(f"vllm_hsd.runner_{runner.lower()}.hooks").REGISTRY.install()


class NeedsHooks:
    """Base of configurations that install a runner's hooks in every process that receives them.

    Attributes:
        hsd_runner: "V1" or "V2"; not there where vLLM chooses and only V1 needs hooks.
        hsd_feature: what vLLM says that its V2 runner does not support, for configurations of V1.
        hsd_synchronous: without asynchronous scheduling, vLLM's scheduler cuts a draft before the
            token that a grammar refuses, so that it is never verified.
    """

    hsd_feature = "a speculative configuration of vllm-hsd that was made for V1"
    hsd_synchronous = False

    def adapt(self, scheduler_config: Any) -> None:
        """Take in the scheduler's configuration, each time that vLLM settles more of it."""
        self.hsd_synchronous = scheduler_config.async_scheduling is False

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        install(getattr(self, "hsd_runner", "V1"))


@REGISTRY.replaces(
    "vllm.config.vllm.VllmConfig._get_v2_model_runner_unsupported_features",
    ("self",),
    why="keeps a configuration of ours on the runner that it was made for, and shows it the "
    "scheduler's",
    until="cascades run on the V2 runner wherever it runs",
    issue=NONE_FILED,
)
def unsupported_features_of_v2(original, self):
    features = original(self)
    made_for = getattr(self.speculative_config, "hsd_runner", None)
    if made_for == "V1":
        features.append(self.speculative_config.hsd_feature)
    elif made_for == "V2" and features:
        raise UserError(
            f"vLLM's V2 runner does not support {', '.join(features)}: set "
            "VLLM_USE_V2_MODEL_RUNNER=0 to serve this configuration on the V1 runner."
        )
    elif made_for == "V2":
        self.speculative_config.adapt(self.scheduler_config)
    return features


@REGISTRY.changes(
    "vllm.config.vllm.VllmConfig.num_lookahead_tokens",
    why="reserves the blocks in which branches of a draft are computed",
    until="vLLM verifies trees",
    issue=NONE_FILED,
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
    ("self", "speculative_config"),
    why="allows min_p and logit_bias, which our samplers apply to every draft token; refuses "
    "grammars where the scheduler cuts drafts by what their tokens are",
    until="vLLM's rejection samplers apply both",
    issue="vllm-project/vllm#42744",
)
def validate_spec_decode(original, self, speculative_config):
    if self.structured_outputs and getattr(speculative_config, "hsd_synchronous", False):
        raise UserError(
            "structured_outputs with speculative decoding on vLLM's V2 runner is exact with "
            "asynchronous scheduling only: start the engine without --no-async-scheduling, or "
            "without a speculative configuration."
        )
    applies = getattr(speculative_config, "hsd_applies_min_p", False)
    if applies and (self.min_p or self.logit_bias):
        self = copy.copy(self)
        self.min_p, self.logit_bias = 0.0, None
    original(self, speculative_config)


@REGISTRY.replaces(
    "vllm.v1.core.sched.scheduler.Scheduler._update_request_as_session",
    ("self", "session", "update"),
    why="goes on with a session behind the last token but one, as without speculation, where a "
    "turn ended inside an accepted draft",
    until="vLLM counts what was computed of a draft that a stop token ends",
    issue=NONE_FILED,
)
def update_request_as_session(original, self, session, update):
    session.num_computed_tokens = min(session.num_computed_tokens, session.num_tokens - 1)
    original(self, session, update)
