"""Intercepts `create_speculative_config`: parses our keys and picks the V1 or V2 classes.

On CUDA a configuration of ours is served by vLLM's V2 runner, or by V1 where V2 cannot; elsewhere
by V1. `VLLM_USE_V2_MODEL_RUNNER` decides otherwise. Importing this module imports nothing of vLLM:
the plugin does so in processes that never use it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any, Literal

from vllm_hsd.errors import NeedsV1, UserError
from vllm_hsd.registry import PLUGIN_ISSUE
from vllm_hsd.shared_hooks import REGISTRY, STOCK_METHODS, install

logger = logging.getLogger(__name__)

_COST_OF_V1 = (
    "that drafts between steps on V1, without CUDA graphs of the drafters and without asynchronous "
    "scheduling"
)
ENTRANCE = "vllm.engine.arg_utils.EngineArgs.create_speculative_config"


@REGISTRY.replaces(
    ENTRANCE,
    ("self", "target_model_config", "target_parallel_config"),
    why="reads method 'hsd' and rejection_sample_method; LLM() and `vllm serve` both call it",
    until="vLLM lets a plugin register a speculative method",
    issue=PLUGIN_ISSUE,
)
def create_speculative_config(original, self, target_model_config, target_parallel_config):
    if not _may_be_ours(self):
        return original(self, target_model_config, target_parallel_config)
    raw = _speculative_keys(self)
    verifier = raw.get("rejection_sample_method")
    target = target_model_config, target_parallel_config
    if raw.get("method") == "hsd" or verifier == "hierarchical":
        return _served(raw, *target, self)
    parsed = original(self, *target)
    if verifier == "block":
        _serve_block_verification(parsed)
    return parsed


def runner() -> Literal["V1", "V2"]:
    """The model runner that configurations of this package are made for."""
    import vllm.envs as envs
    from vllm.platforms import current_platform

    if envs.VLLM_USE_V2_MODEL_RUNNER is not None:
        return "V2" if envs.VLLM_USE_V2_MODEL_RUNNER else "V1"
    if not current_platform.is_cuda():
        return "V1"
    from vllm.triton_utils import HAS_TRITON

    return "V2" if HAS_TRITON else "V1"


def _may_be_ours(arguments) -> bool:
    """Whether the engine's arguments mention this package, or are no configuration at all."""
    given = arguments.speculative_config
    if given is None or isinstance(given, Mapping):
        mentioned = [arguments.spec_method, *(given or {}).values()]
        return any(name in mentioned for name in ("hsd", "hierarchical", "block"))
    return True


def _speculative_keys(arguments) -> dict[str, Any]:
    """Speculative configuration of the engine's arguments, spelled with underscores."""
    from vllm_hsd.config import read_speculative_config

    raw = read_speculative_config(arguments.speculative_config)
    flags = {
        "method": ("--spec-method", arguments.spec_method),
        "model": ("--spec-model", arguments.spec_model),
        "num_speculative_tokens": ("--spec-tokens", arguments.spec_tokens),
    }
    for key, (flag, value) in flags.items():
        if value is None:
            continue
        if key in raw:
            raise UserError(f"{flag} and the key {key} of speculative_config exclude each other.")
        raw[key] = value
    return raw


def _served(raw: dict[str, Any], target_model_config, target_parallel_config, arguments) -> Any:
    """The configuration for the runner that serves it: V1 where V2 cannot, as vLLM does it, unless
    `VLLM_USE_V2_MODEL_RUNNER` insists.
    """
    import vllm.envs as envs

    given = raw, target_model_config, target_parallel_config, arguments
    first = runner()
    try:
        return _made_for(first, *given)
    except NeedsV1 as error:
        if first == "V1" or envs.VLLM_USE_V2_MODEL_RUNNER:
            raise
        served = _made_for("V1", *given)
        # vLLM logs it: "Model Runner V2 does not yet support %s; using the V1 model runner instead"
        served.hsd_feature = f"this speculative configuration ({error.reason}) {_COST_OF_V1}"
        return served


def _made_for(name: str, raw: dict[str, Any], model_config, parallel_config, arguments) -> Any:
    install(name)
    if name == "V2" and parallel_config.use_ubatching:
        raise NeedsV1(
            "dual batch overlap does not run with speculation on vLLM's V2 runner: remove it or "
            "set VLLM_USE_V2_MODEL_RUNNER=0."
        )
    if raw.get("method") != "hsd":
        from vllm_hsd import stock_config

        stock = getattr(stock_config, f"{name}BlockVerificationConfig")
        return stock.create(raw, model_config, parallel_config)
    module = importlib.import_module(f"vllm_hsd.runner_{name.lower()}.spec_config")
    cascade = getattr(module, f"{name}CascadeConfig")
    return cascade.create(raw, model_config, parallel_config, arguments)


def _serve_block_verification(config) -> None:
    """Let the V1 runner verify blocks where it would run; V2 has block verification of its own."""
    if config.method not in STOCK_METHODS["V1"]:
        return
    try:
        install("V1")
    except UserError as error:
        logger.warning("rejection_sample_method 'block' is left to vLLM: %s", error)
        return
    from vllm_hsd.stock_config import BlockVerificationConfig

    # vLLM's own object, of a class whose arrival in another process installs the hooks there.
    config.__class__ = BlockVerificationConfig
