"""vLLM starts and decodes on its V2 runner, without drafts and with a cascade."""

from __future__ import annotations

import time

import pytest

from benchmarks.gpu import engines
from benchmarks.gpu.items import Finding, Setting

TOKENS = 32
PROMPT = [3, 5, 7, 11, 13, 17, 19, 23]


def run(setting: Setting) -> Finding:
    """Two engines with random weights."""
    engines.require_vllm()
    target, drafter = (engines.shaped(setting, size) for size in ("1.7B", "0.6B"))
    configs = {
        "no speculation": None,
        "cascade": engines.cascade(4, {"ngram": {"max": 3}, "num_tokens": 2}, {"model": drafter}),
    }
    lines, left_out = [], []
    for name, speculative in configs.items():
        began = time.monotonic()
        arguments = engines.DUMMY_ARGS | {"model": target, "max_num_seqs": 8}
        arguments |= {"speculative_config": speculative} | engines.SMALL_CACHE
        with engines.engine(setting, f"boot {name}", arguments) as process:
            process.wait()
            up = time.monotonic() - began
            seen = engines.described(process)
            params = {"temperature": 1, "max_tokens": TOKENS, "ignore_eos": True}
            found = process.generate([PROMPT] * 4, params)
        if seen["runner"] != "V2":
            pytest.fail(f"{name}: vLLM's {seen['runner']} runner serves, not V2.")
        if [len(ids) for ids in found.token_ids] != [TOKENS] * 4:
            pytest.fail(f"{name}: {[len(i) for i in found.token_ids]} tokens of {TOKENS}.")
        lines.append(
            f"{name}: up after {up:.0f} s; {', '.join(f'{k} {v}' for k, v in seen.items())}."
        )
        reason = speculative and engines.eager_reason(seen)
        if reason:
            left_out.append(f"CUDA graphs of proposals: {reason}.")
    return Finding(lines, left_out=left_out)
