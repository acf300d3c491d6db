"""Engines for the items: random weights in the shapes of real models, and the tiny family."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import MODELS, on_worker
from benchmarks.gpu.items import Setting
from vllm_hsd.plugin import register
from vllm_hsd.tools.engine import EngineProcess

TINY = {name: str(MODELS / name) for name in ("small", "mid", "target")}
# A fixed program costs the same whatever its weights are, so random ones of these shapes do:
# (hidden, intermediate, layers, heads, tied embeddings) of the Qwen3 family's configurations.
SHAPES = {
    "0.6B": (1024, 3072, 28, 16, True),
    "1.7B": (2048, 6144, 28, 16, True),
    "8B": (4096, 12288, 36, 32, False),
    "32B": (5120, 25600, 64, 64, False),
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 151936,
}
TOY = {"head_dim": 32, "num_key_value_heads": 1, "vocab_size": 64, "bos_token_id": 0}
# Random weights are loaded in seconds; without torch.compile an engine is up in time.
DUMMY_ARGS = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "enable_prefix_caching": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}
# Several engines fit on a GPU; the utilization is what vLLM wants to be free at least.
SMALL_CACHE = {"kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.1}
# Package of vLLM's V2 runner.
V2 = "vllm.v1.worker.gpu."
# float32 needs an attention backend that takes it.
TINY_ARGS = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 32,
    **SMALL_CACHE,
    "enable_prefix_caching": False,
    "attention_backend": "TRITON_ATTN",
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}


def require_vllm() -> None:
    """Skip the item where no vLLM can run engines."""
    spec = importlib.util.find_spec("vllm")
    found = [Path(each) for each in (spec and spec.submodule_search_locations) or []]
    if not found:
        pytest.skip("vLLM is not installed (docs/gpu-proof.md says what it takes).")
    if not any(found[0].glob("_C*.so")):
        pytest.skip(f"vLLM in {found[0]} has no compiled extensions.")


def shaped(setting: Setting, size: str) -> str:
    """Directory of a configuration without weights."""
    directory = setting.output / "models" / size
    directory.mkdir(parents=True, exist_ok=True)
    shape = (64, 128, 2, 2, False) if setting.toy else SHAPES[size]
    hidden, intermediate, layers, heads, tied = shape
    config = QWEN3 | {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "max_window_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }
    if setting.toy:
        config |= TOY | {"eos_token_id": 1}
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return str(directory)


def parameters(size: str) -> int:
    """Of a shape."""
    hidden, intermediate, layers, heads, tied = SHAPES[size]
    head, kv = QWEN3["head_dim"], QWEN3["num_key_value_heads"]
    layer = hidden * head * (2 * heads + 2 * kv) + 3 * hidden * intermediate
    return layers * layer + QWEN3["vocab_size"] * hidden * (1 if tied else 2)


def engine(
    setting: Setting,
    name: str,
    arguments: dict[str, Any],
    *,
    environment: dict[str, str] | None = None,
    prepare: Callable[[], object] | None = None,
) -> EngineProcess:
    """An engine that logs next to the item's log.

    Args:
        arguments: of `vllm.LLM`; those of the setting take their place.
        environment, prepare: in addition to the setting's.
    """
    options = dict(setting.engine_options)
    # `register` so that the plugin need not be installed.
    calls = [options.pop("prepare", None), register, prepare]
    variables = options.pop("environment", {}) | (environment or {})
    return EngineProcess(
        {**arguments, **setting.engine_args},
        name,
        log=setting.log(name.replace(" ", "_")),
        environment=variables,
        prepare=partial(_in_turn, [call for call in calls if call is not None]),
        **options,
    )


def cascade(tokens: int, *levels: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """A speculative configuration of method hsd."""
    return {"method": "hsd", "num_speculative_tokens": tokens, "levels": list(levels), **keys}


def draft_model(model: str, tokens: int, rule: str) -> dict[str, Any]:
    """A speculative configuration of vLLM's own drafter with sampled drafts."""
    return {
        "method": "draft_model",
        "model": model,
        "num_speculative_tokens": tokens,
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": rule,
    }


def described(process: EngineProcess) -> dict[str, Any]:
    """What serves in an engine: classes, attention, CUDA graphs."""
    return process.call(on_worker, _describe)


def eager_reason(seen: dict[str, Any]) -> str | None:
    """Why a cascade's proposals are not replayed from CUDA graphs, None if they are."""
    if seen["proposal_graphs"]:
        return None
    return "proposals ran eagerly: none was captured, see the engine's log"


def _describe(worker: Any) -> dict[str, Any]:
    runner = worker.model_runner
    speculator = getattr(runner, "speculator", None)
    graphs = getattr(speculator, "graphs", None)
    modules = [base.__module__ for base in type(runner).__mro__]
    return {
        "runner": "V2" if any(name.startswith(V2) for name in modules) else "V1",
        "drafter": type(speculator).__name__,
        "verifier": type(getattr(runner, "rejection_sampler", None)).__name__,
        "cudagraph_mode": worker.vllm_config.compilation_config.cudagraph_mode.name,
        "proposal_graphs": len(getattr(graphs, "graphs", ())),
    }


def _in_turn(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        call()
