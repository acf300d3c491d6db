"""Intercepts `create_speculative_config`: parses our keys and picks our classes.

Importing this module imports nothing of vLLM: the plugin does so in processes that never use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_hsd.errors import UserError, quoted
from vllm_hsd.host.hooks import REGISTRY, install
from vllm_hsd.host.registry import PLUGIN_ISSUE

ENTRANCE = "vllm.engine.arg_utils.EngineArgs.create_speculative_config"
FILTER = "vllm.v1.sample.ops.topk_topp_sampler.apply_top_k_top_p_triton"
# Of method "hsd", which no method of vLLM's has.
_OWN_KEYS = {"levels", "cascade"}


@REGISTRY.replaces(
    ENTRANCE,
    "self target_model_config target_parallel_config",
    why="reads method 'hsd' and rejection_sample_method; LLM() and `vllm serve` both call it",
    until="vLLM lets a plugin register a speculative method",
    issue=PLUGIN_ISSUE,
)
def create_speculative_config(original, self, target_model_config, target_parallel_config):
    if not _may_be_ours(self):
        return original(self, target_model_config, target_parallel_config)
    raw = _speculative_keys(self)
    if raw.get("method") == "hsd" or raw.get("rejection_sample_method") == "hierarchical":
        return _served(raw, target_model_config, target_parallel_config, self)
    if own := sorted(_OWN_KEYS & raw.keys()):
        raise UserError(
            f'speculative_config has the key {quoted(own[0])}, which needs "method": "hsd" '
            f"(given: {quoted(raw.get('method'))})."
        )
    return original(self, target_model_config, target_parallel_config)


@REGISTRY.replaces(
    FILTER,
    ("logits k p mask_value", "logits k p mask_value has_topp_only_rows"),
    why="on a CPU filters as vLLM does there without Triton: at low temperatures its kernel keeps "
    "every token whatever top_p is",
    until="vLLM's kernel filters at every temperature",
)
def apply_top_k_top_p_triton(original, logits, k, p, *rest, **options):
    if logits.device.type != "cpu":
        return original(logits, k, p, *rest, **options)
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    return apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)


def runner_mistake() -> str | None:
    """One sentence where vLLM's V2 runner, on which everything here runs, cannot."""
    import vllm.envs as envs
    from vllm.triton_utils import HAS_TRITON

    if envs.VLLM_USE_V2_MODEL_RUNNER is False:
        return (
            "VLLM_USE_V2_MODEL_RUNNER=0 asks for vLLM's V1 runner, and vllm-hsd runs on V2: "
            "unset it."
        )
    if envs.VLLM_USE_RUST_FRONTEND:
        return "VLLM_USE_RUST_FRONTEND=1: that front end checks no keys of requests: unset it."
    if HAS_TRITON:
        return None
    from vllm.platforms import current_platform

    from vllm_hsd.kernels.cpu_backend import toolchain

    if current_platform.is_cpu() and (missed := toolchain.missing()):
        return f"vllm-hsd compiles kernels for this CPU, and {missed}."
    return (
        "vLLM found no Triton for this machine: install vllm-hsd with its extra [cpu] or [cuda], "
        "and leave 'hsd' in VLLM_PLUGINS if that is set."
    )


def _may_be_ours(arguments) -> bool:
    """Whether the engine's arguments mention this package, or are no configuration at all."""
    given = arguments.speculative_config
    if given is None or isinstance(given, Mapping):
        given = given or {}
        mentioned = [arguments.spec_method, *given, *given.values()]
        return any(name in mentioned for name in ("hsd", "hierarchical", *_OWN_KEYS))
    return True


def _speculative_keys(arguments) -> dict[str, Any]:
    """Speculative configuration of the engine's arguments, spelled with underscores."""
    from vllm_hsd.config.cascade_config import read_speculative_config

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


def _served(raw: dict[str, Any], model_config, parallel_config, arguments) -> Any:
    """The configuration that is served.

    Raises:
        UserError: it cannot.
    """
    if mistake := runner_mistake():
        raise UserError(mistake)
    install()
    if parallel_config.use_ubatching:
        raise UserError(
            "dual batch overlap does not run with speculation on vLLM's V2 runner: remove it."
        )
    if raw.get("method") != "hsd":
        from vllm_hsd.host.stock_config import HierarchicalConfig

        return HierarchicalConfig.create(raw, model_config, parallel_config)
    from vllm_hsd.host.spec_config import CascadeSpeculativeConfig

    return CascadeSpeculativeConfig.create(raw, model_config, parallel_config, arguments)
