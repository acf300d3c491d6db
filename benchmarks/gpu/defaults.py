"""Engines as users start them: no argument but the models and the cascade.

vLLM then compiles every model, captures graphs of whole and of partial steps, caches prefixes,
takes hundreds of requests at once and applies the model's own sampling parameters. A step that
waits for the device, and a kernel that is compiled after the start, end the engine.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import engines
from benchmarks.gpu.items import Finding, Setting
from vllm_hsd.errors import UserError

TOKENS, TOY_TOKENS = 64, 6
# (requests, one of how many has a seed). One such request that is filtered sends its whole batch
# through vLLM's own processing, so some batches have none. The second one is more than drafts
# (`sizes.MAX_BATCH_SIZE`).
BATCHES, TOY_BATCHES = ((30, 0), (100, 2), (30, 0), (9, 2), (1, 0)), ((2, 2), (3, 0))
# Besides the model's own parameters, requests without filters and greedy ones.
PLAIN: list[dict[str, Any]] = [{}, {}, {"top_k": -1, "top_p": 1.0}, {"temperature": 0.0}, {}]
# In which one engine is up, compiled, and has answered.
SECONDS = 200
# Of Qwen3's generation_config.json.
SAMPLING = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
STRICT = {"jit_monitor_mode": "error"}
SYNC_CHECK = {"VLLM_GPU_SYNC_CHECK": "error"}
# Random weights have no tokenizer.
WEIGHTS = {"load_format": "dummy", "skip_tokenizer_init": True}


def configurations(small: str, mid: str) -> dict[str, dict[str, Any]]:
    """Speculative configurations by name, of two drafters."""
    two = {"model": small, "num_tokens": 3}, {"model": mid}
    ngram = {"ngram": {"max": 4}}
    three = {**ngram, "num_tokens": 2}, *two
    found = {"sources": [ngram, {"model": small}], "num_tokens": 3}
    return {
        "sources below a model": engines.cascade(8, found, {"model": mid}),
        "three levels, adaptive": engines.cascade(8, *three, adaptive=True),
        "ends by entropy": engines.cascade(8, three[0], {"model": mid, "stopping": "entropy"}),
    }


def run(setting: Setting) -> Finding:
    """Cascades below an 8B target, with what is forgotten when a prompt comes."""
    engines.require_vllm()
    target, mid, small = (engines.shaped(setting, size) for size in ("8B", "1.7B", "0.6B"))
    Path(target, "generation_config.json").write_text(json.dumps({"do_sample": True, **SAMPLING}))
    lines, left_out, waiting = [], [], []
    for name, cascade in configurations(small, mid).items():
        arguments = {"model": target, "speculative_config": cascade, **WEIGHTS}
        part = setting.part(name, partial(_served, setting, name, arguments), SECONDS)
        if part is None:
            waiting.append(name)
            continue
        lines.append(part["line"])
        if part["eager"]:
            left_out.append(f"CUDA graphs of proposals, {name}: {part['eager']}.")
    return Finding(lines, left_out=left_out, waiting=waiting)


def _served(setting: Setting, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """An engine's answers to batches of requests with seeds, without, and of both kinds."""
    strict, environment = ({}, {}) if setting.toy else (STRICT, SYNC_CHECK)
    label = f"defaults {name}"
    with engines.engine(setting, label, arguments | strict, environment=environment) as process:
        try:
            counts = [_generate(process, setting, *batch) for batch in _batches(setting)]
        except UserError as error:
            pytest.fail(f"{name}: {error}")
        seen = engines.described(process)
    requests = sum(size for size, _ in _batches(setting))
    described = ", ".join(f"{key} {value}" for key, value in seen.items())
    line = f"{name}: {requests} requests of {sum(counts)} tokens; {described}."
    return {"line": line, "eager": engines.eager_reason(seen)}


def _batches(setting: Setting) -> tuple[tuple[int, int], ...]:
    return TOY_BATCHES if setting.toy else BATCHES


def _generate(process: Any, setting: Setting, size: int, seeded: int) -> int:
    """Tokens of `size` requests with the model's sampling parameters, one of `seeded` with a seed.

    With 0 none has one. They end one after another, so that batches of all sizes are served.
    """
    sampling = process.call(_sampling)
    if not setting.toy and {key: sampling[key] for key in SAMPLING} != SAMPLING:
        pytest.fail(f"the model's sampling parameters are {sampling}, not {SAMPLING}.")
    tokens = [TOY_TOKENS if setting.toy else TOKENS + 3 * (i % 5) for i in range(size)]
    params = [
        {**sampling, "max_tokens": tokens[i], "ignore_eos": True}
        | ({"seed": i} if seeded and i % seeded == 0 else {})
        | (PLAIN[i % len(PLAIN)] if not setting.toy else {})
        for i in range(size)
    ]
    # A prefix of 40 tokens that all share, so that blocks of it are found in the cache.
    prompts = [[3 + k % 50 for k in range(40)] + [3 + i % 50] * (1 + i % 7) for i in range(size)]
    lengths = [len(text) for text in process.generate(prompts, params).token_ids]
    if lengths != tokens:
        pytest.fail(f"{sum(lengths)} tokens of {size} requests in place of {sum(tokens)}.")
    return sum(lengths)


def _sampling(llm: Any) -> dict[str, Any]:
    defaults = llm.get_default_sampling_params()
    return {key: getattr(defaults, key) for key in SAMPLING}
