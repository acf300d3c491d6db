"""Replacements of vLLM's functions, apart from those on one runner and of the metrics.

Importing this module imports nothing of vLLM: the plugin does so in processes that never use it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

from vllm_hsd.errors import UserError
from vllm_hsd.runner_v1 import hooks
from vllm_hsd.runner_v1.hooks import NO_PLUGIN_API, STOCK_METHODS, replaces

logger = logging.getLogger(__name__)

ENTRANCE = "vllm.engine.arg_utils.EngineArgs.create_speculative_config"


@replaces(
    ENTRANCE,
    ("self", "target_model_config", "target_parallel_config"),
    why="reads method 'hsd' and rejection_sample_method; LLM() and `vllm serve` both call it",
    until="vLLM lets a plugin register a speculative method",
)
def create_speculative_config(original, self, target_model_config, target_parallel_config):
    if not _may_be_ours(self):
        return original(self, target_model_config, target_parallel_config)
    raw = _speculative_keys(self)
    verifier = raw.get("rejection_sample_method")
    if raw.get("method") == "hsd":
        _prepare("method 'hsd'")
        from vllm_hsd.runner_v1.spec_config import HsdSpeculativeConfig

        parsed = HsdSpeculativeConfig.create(raw, target_model_config, target_parallel_config)
        _check_adapters(self, parsed)
        return parsed
    if verifier == "hierarchical":
        _prepare("rejection_sample_method 'hierarchical'")
        from vllm_hsd.runner_v1.stock_config import V1BlockVerificationConfig

        return V1BlockVerificationConfig.create(raw, target_model_config, target_parallel_config)
    parsed = original(self, target_model_config, target_parallel_config)
    if verifier == "block":
        _serve_block_verification(parsed)
    return parsed


def _may_be_ours(arguments) -> bool:
    """Whether the engine's arguments mention this package, or are no configuration at all."""
    given = arguments.speculative_config
    if given is None or isinstance(given, Mapping):
        mentioned = [arguments.spec_method, *(given or {}).values()]
        return any(name in mentioned for name in ("hsd", "hierarchical", "block"))
    return True


def _speculative_keys(arguments) -> dict[str, Any]:
    """Speculative configuration of the engine's arguments, spelled with underscores.

    Raises:
        UserError: it is not a mapping, or gives a key twice.
    """
    from vllm_hsd.config import read_speculative_config

    raw = read_speculative_config(arguments.speculative_config)
    flags = {
        "method": ("--spec-method", arguments.spec_method),
        "model": ("--spec-model", arguments.spec_model),
        "num_speculative_tokens": ("--spec-tokens", arguments.spec_tokens),
    }
    for key, (flag, value) in flags.items():
        if value is not None and key in raw:
            raise UserError(f"{flag} and the key {key} of speculative_config exclude each other.")
        if value is not None:
            raw[key] = value
    return raw


def _prepare(feature: str) -> None:
    """Replace the rest of vLLM's names for a feature that needs the V1 runner.

    Raises:
        UserError: the installed vLLM differs from the tested ones, or V2 is enforced.
    """
    import vllm.envs as envs

    if envs.VLLM_USE_V2_MODEL_RUNNER:
        raise UserError(
            f"VLLM_USE_V2_MODEL_RUNNER is 1, but {feature} needs vLLM's V1 runner: unset it."
        )
    hooks.install()
    if hooks.installed_release() not in hooks.TESTED:
        logger.warning(
            "vllm-hsd was tested with vLLM %s; vLLM %s has the same names, but was not run.",
            ", ".join(hooks.TESTED),
            hooks.installed_release(),
        )


def _check_adapters(arguments, parsed) -> None:
    exits = [
        i for i, level in enumerate(parsed.hsd.levels) if level.kind in ("early_exit", "exit_head")
    ]
    if arguments.enable_lora and exits:
        level = parsed.hsd.levels[exits[0]]
        raise UserError(
            f"levels[{exits[0]}].{level.kind} runs layers of the target, which does not work "
            "with LoRA adapters: remove the level or enable_lora."
        )


def _serve_block_verification(config) -> None:
    """Let the V1 runner verify blocks where it would run; V2 has block verification of its own."""
    if config.method not in STOCK_METHODS:
        return
    try:
        hooks.install()
    except UserError as error:
        logger.warning("rejection_sample_method 'block' is left to vLLM: %s", error)
        return
    from vllm_hsd.runner_v1.stock_config import BlockVerificationConfig

    # vLLM's own object, of a class whose arrival in another process installs the hooks there.
    config.__class__ = BlockVerificationConfig


@replaces(
    "vllm.config.vllm.VllmConfig._get_v2_model_runner_unsupported_features",
    ("self",),
    why="keeps method 'hsd' and rejection_sample_method 'hierarchical' on the V1 runner",
    until="cascades run on the V2 runner",
)
def unsupported_features_of_v2(original, self):
    from vllm_hsd.runner_v1.stock_config import V1BlockVerificationConfig

    features = original(self)
    if _is_cascade(self.speculative_config):
        features.append("speculative method 'hsd'")
    elif isinstance(self.speculative_config, V1BlockVerificationConfig):
        features.append("rejection_sample_method 'hierarchical'")
    return features


@replaces(
    "vllm.sampling_params.SamplingParams._validate_spec_decode",
    ("self", "speculative_config"),
    why="allows min_p and logit_bias, which our sampler applies to every draft token",
    until="vLLM's rejection sampler applies both",
)
def validate_spec_decode(original, self, speculative_config):
    if _is_cascade(speculative_config) and (self.min_p or self.logit_bias):
        self = copy.copy(self)
        self.min_p, self.logit_bias = 0.0, None
    original(self, speculative_config)


@replaces(
    "vllm.v1.spec_decode.draft_model.DraftModelProposer.__new__",
    None,
    why="makes the cascade where the runner makes its draft model; the subclass passes the "
    "runner's isinstance checks, a factory would not",
    until=NO_PLUGIN_API,
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
    until="vLLM's V1 runner is gone",
)
def new_rejection_sampler(original, cls, sampler, spec_config=None, *args, **kwargs):
    if cls.__name__ == "RejectionSampler" and _verifies_blocks(spec_config):
        from vllm_hsd.runner_v1.stock_drafters import StockDraftSampler

        cls = StockDraftSampler
    return _new(original, cls, sampler, spec_config, *args, **kwargs)


@replaces(
    "vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer.__init__",
    ("self", "vllm_config", "device", "pass_hidden_states_to_model", "runner"),
    why="keeps a drafter's probabilities for block verification; vLLM keeps them for 'standard'",
    until="vLLM's V1 runner is gone",
)
def init_base_proposer(original, self, vllm_config, *args, **kwargs):
    original(self, vllm_config, *args, **kwargs)
    config = vllm_config.speculative_config
    if _verifies_blocks(config) and config.draft_sample_method == "probabilistic":
        self._enable_probabilistic_draft_probs = True


def _new(original, cls, *args, **kwargs):
    return original(cls) if original is object.__new__ else original(cls, *args, **kwargs)


def _is_cascade(config) -> bool:
    return getattr(config, "method", None) == "hsd"


def _verifies_blocks(config) -> bool:
    return (
        getattr(config, "rejection_sample_method", None) == "block"
        and config.method in STOCK_METHODS
    )
