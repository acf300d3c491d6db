"""Time of a decoding step of a large target, with vLLM's drafters and with ours at equal K.

All weights are random: a fixed program costs the same whatever is accepted, so the step is what is
timed, not the token. A row is not written unless the engine gave every request its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu import engines
from benchmarks.gpu.items import Finding, Setting
from vllm_hsd.tools.engine import EngineProcess

K = 4
BATCHES = (1, 8, 32)
TOKENS, PROMPT_LENGTH, REPEATS = 64, 64, 5
NEEDED_32B = 100 << 30
# Every row of random weights is flat: the worst case of a filter by mass.
LAWS: dict[str, dict[str, float]] = {"temperature 1": {}, "top-p 0.95": {"top_p": 0.95}}
# In which an engine of 8B is up on a machine with cold caches and its steps are timed.
SECONDS = 90


@dataclass(frozen=True)
class Stack:
    """A way to draft.

    Attributes:
        k: draft tokens that the target verifies in each step.
    """

    name: str
    k: int
    config: dict[str, Any] | None


def stacks(setting: Setting) -> list[Stack]:
    """Most valuable first."""
    small, mid = (engines.shaped(setting, size) for size in ("0.6B", "1.7B"))
    ngram = {"ngram": {"max": 3}, "num_tokens": 2}
    suffix = {"suffix": {}, "num_tokens": 2}
    sources = {"sources": [{"ngram": {"max": 3}}, {"suffix": {}}], "num_tokens": 2}
    return [
        Stack("no speculation", 0, None),
        Stack("vLLM draft_model 0.6B", K, engines.draft_model(small, K, "block")),
        Stack("ours, one level 0.6B", K, engines.cascade(K, {"model": small})),
        Stack("vLLM's drafter, our verifier", K, engines.draft_model(small, K, "hierarchical")),
        Stack("ours, n-gram below 0.6B", K, engines.cascade(K, ngram, {"model": small})),
        Stack("ours, suffix below 0.6B", K, engines.cascade(K, suffix, {"model": small})),
        Stack("ours, sources below 0.6B", K, engines.cascade(K, sources, {"model": small})),
        Stack(
            "ours, 0.6B below 1.7B",
            K,
            engines.cascade(K, {"model": small, "num_tokens": 2}, {"model": mid}),
        ),
    ]


def run(setting: Setting) -> Finding:
    """A target of 8B."""
    return measure(setting, "8B")


def run_32b(setting: Setting) -> Finding:
    """A target of 32B, whose random weights take 65 GB."""
    engines.require_vllm()
    if not setting.toy:
        memory = torch.cuda.get_device_properties(0).total_memory
        if memory < NEEDED_32B:
            pytest.skip(f"needs {NEEDED_32B >> 30} GiB of GPU memory, has {memory >> 30}.")
    return measure(setting, "32B")


def measure(setting: Setting, target: str) -> Finding:
    """Rows for every stack that there is time for."""
    engines.require_vllm()
    batches, repeats, tokens = BATCHES, REPEATS, TOKENS
    if setting.toy:
        batches, repeats, tokens = (2,), 2, 4
    rows: list[dict[str, Any]] = []
    left_out, waiting = [], []

    def timed(stack: Stack) -> dict[str, Any]:
        arguments = engines.DUMMY_ARGS | {
            "model": engines.shaped(setting, target),
            "max_num_seqs": max(batches),
            "speculative_config": stack.config,
        }
        with engines.engine(setting, f"steps {target} {stack.name}", arguments) as process:
            found = [
                _row(process, stack, batch, tokens, repeats, law)
                for law in LAWS
                for batch in batches
            ]
            return {"rows": found, "eager": engines.eager_reason(engines.described(process))}

    for stack in stacks(setting):
        part = setting.part(stack.name, partial(timed, stack), SECONDS)
        if part is None:
            waiting.append(stack.name)
            continue
        rows += part["rows"]
        if stack.config and stack.config["method"] == "hsd" and part["eager"]:
            left_out.append(f"CUDA graphs of {stack.name}: {part['eager']}.")
    if not rows:
        pytest.fail(f"no engine was up and timed within {SECONDS} seconds.")
    lines = [f"Target {target}, random weights, K = {K}.", *_lines(rows)]
    return Finding(lines, rows, left_out, waiting)


def _row(
    process: EngineProcess, stack: Stack, batch: int, tokens: int, repeats: int, law: str
) -> dict[str, Any]:
    prompt = list(range(3, 3 + PROMPT_LENGTH)) if tokens == TOKENS else [3, 4, 5]
    prompts = [[*prompt, 3 + i] for i in range(batch)]
    params = {"temperature": 1, "max_tokens": tokens, "ignore_eos": True, **LAWS[law]}
    milliseconds, cpu = [], []
    for repeat in range(repeats + 1):
        found = process.generate(prompts, params)
        if [len(ids) for ids in found.token_ids] != [tokens] * batch:
            lengths = [len(ids) for ids in found.token_ids]
            pytest.fail(f"{stack.name}: {lengths} tokens in place of {tokens}; not timed.")
        if repeat == 0:
            continue  # compiles kernels
        first, last = np.array(found.first_token_seconds), np.array(found.last_token_seconds)
        steps = np.array(found.target_steps)
        milliseconds.append(float(1e3 * np.mean((last - first) / (steps - 1))))
        cpu.append(1e3 * found.cpu_seconds / max(found.target_steps))
    return {
        "stack": stack.name,
        "K": stack.k,
        "law": law,
        "batch": batch,
        "ms_per_step": float(np.median(milliseconds)),
        "ms_low": min(milliseconds),
        "ms_high": max(milliseconds),
        "cpu_ms_per_step": float(np.median(cpu)),
    }


def _lines(rows: list[dict[str, Any]]) -> list[str]:
    return [
        f"{row['stack']}, {row['law']}, batch {row['batch']}: {row['ms_per_step']:.2f} ms per step "
        f"({row['ms_low']:.2f}-{row['ms_high']:.2f}), CPU {row['cpu_ms_per_step']:.2f} ms."
        for row in rows
    ]
