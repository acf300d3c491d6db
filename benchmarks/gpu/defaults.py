"""Engines as users start them: no argument but the models and the cascade.

vLLM then compiles every model, captures graphs of whole and of partial steps, caches prefixes,
takes hundreds of requests at once and applies the model's own sampling parameters. A step that
waits for the device, and a kernel that is compiled after the start, end the engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import engines
from benchmarks.gpu.items import Finding, Setting
from vllm_hsd.errors import UserError

TOKENS, TOY_TOKENS = 64, 6
# The second batch is more than drafts (`spec_config.MAX_BATCH_SIZE`); each begins alike.
BATCHES, TOY_BATCHES = (30, 100, 30), (2, 3)
# Of Qwen3's generation_config.json.
SAMPLING = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
STRICT = {"observability_config": {"jit_monitor_mode": "error"}}
SYNC_CHECK = {"VLLM_GPU_SYNC_CHECK": "error"}
# Random weights have no tokenizer.
WEIGHTS = {"load_format": "dummy", "skip_tokenizer_init": True}


def run(setting: Setting) -> Finding:
    """Two and three levels below an 8B target."""
    engines.require_vllm()
    target, mid, small = (engines.shaped(setting, size) for size in ("8B", "1.7B", "0.6B"))
    Path(target, "generation_config.json").write_text(json.dumps({"do_sample": True, **SAMPLING}))
    two = {"model": small, "num_tokens": 3}, {"model": mid}
    configs = {
        "two levels": engines.cascade(8, *two),
        "three levels, adaptive": engines.cascade(
            8, {"ngram": {"max": 4}, "num_tokens": 2}, *two, adaptive=True
        ),
    }
    lines, left_out = [], []
    for name, cascade in configs.items():
        arguments = {"model": target, "speculative_config": cascade, **WEIGHTS}
        strict = {} if setting.toy else STRICT
        with engines.engine(
            setting,
            f"defaults {name}",
            arguments | strict,
            environment={} if setting.toy else SYNC_CHECK,
        ) as process:
            try:
                counts = [_generate(process, setting, size) for size in _batches(setting)]
            except UserError as error:
                pytest.fail(f"{name}: {error}")
            seen = engines.described(process)
        requests = sum(_batches(setting))
        if sum(counts) != requests * (TOY_TOKENS if setting.toy else TOKENS):
            pytest.fail(f"{name}: {sum(counts)} tokens of {requests} requests.")
        described = ", ".join(f"{key} {value}" for key, value in seen.items())
        lines.append(f"{name}: {requests} requests of {sum(counts)} tokens; {described}.")
        if reason := engines.eager_reason(seen):
            left_out.append(f"CUDA graphs of proposals, {name}: {reason}.")
    return Finding(lines, left_out=left_out)


def _batches(setting: Setting) -> tuple[int, ...]:
    return TOY_BATCHES if setting.toy else BATCHES


def _generate(process: Any, setting: Setting, size: int) -> int:
    """Tokens of `size` requests with the model's sampling parameters, every second one seeded."""
    sampling = process.call(_sampling)
    if not setting.toy and {key: sampling[key] for key in SAMPLING} != SAMPLING:
        pytest.fail(f"the model's sampling parameters are {sampling}, not {SAMPLING}.")
    tokens = TOY_TOKENS if setting.toy else TOKENS
    params = [
        {**sampling, "max_tokens": tokens, "ignore_eos": True, **({"seed": i} if i % 2 else {})}
        for i in range(size)
    ]
    # A prefix of 40 tokens that all share, so that blocks of it are found in the cache.
    prompts = [[3 + k % 50 for k in range(40)] + [3 + i % 50] * (1 + i % 7) for i in range(size)]
    return sum(map(len, process.generate(prompts, params).token_ids))


def _sampling(llm: Any) -> dict[str, Any]:
    defaults = llm.get_default_sampling_params()
    return {key: getattr(defaults, key) for key in SAMPLING}
