"""Where vLLM's configuration becomes ours, and which model runner serves it.

On CUDA a configuration of ours is served by vLLM's V2 runner, elsewhere by V1;
`VLLM_USE_V2_MODEL_RUNNER` decides otherwise. Importing this module imports nothing of vLLM: the
plugin does so in processes that never use it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

from vllm_hsd.errors import UserError
from vllm_hsd.registry import PLUGIN_ISSUE
from vllm_hsd.shared_hooks import REGISTRY

logger = logging.getLogger(__name__)

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
    if raw.get("method") == "hsd":
        return _cascade_class().create(raw, *target, self)
    if verifier == "hierarchical":
        return _stock_class().create(raw, *target)
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


def _cascade_class() -> Any:
    if runner() == "V2":
        _install_v2()
        from vllm_hsd.runner_v2 import spec_config as v2

        return v2.V2CascadeConfig
    _install_v1()
    from vllm_hsd.runner_v1 import spec_config as v1

    return v1.V1CascadeConfig


def _stock_class() -> Any:
    if runner() == "V2":
        _install_v2()
        from vllm_hsd.runner_v2 import stock_config as v2

        return v2.V2BlockVerificationConfig
    _install_v1()
    from vllm_hsd.runner_v1 import stock_config as v1

    return v1.V1BlockVerificationConfig


def _install_v1() -> None:
    from vllm_hsd.runner_v1 import hooks

    hooks.install()


def _install_v2() -> None:
    from vllm_hsd.runner_v2 import hooks

    hooks.install()


def _serve_block_verification(config) -> None:
    """Let the V1 runner verify blocks where it would run; V2 has block verification of its own."""
    from vllm_hsd.runner_v1 import hooks

    if config.method not in hooks.STOCK_METHODS:
        return
    try:
        hooks.install()
    except UserError as error:
        logger.warning("rejection_sample_method 'block' is left to vLLM: %s", error)
        return
    from vllm_hsd.runner_v1.stock_config import BlockVerificationConfig

    # vLLM's own object, of a class whose arrival in another process installs the hooks there.
    config.__class__ = BlockVerificationConfig
