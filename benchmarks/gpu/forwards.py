"""Time of one forward pass of models of several sizes by the number of tokens: the cost model.

vLLM's own dummy runs of a decoding batch, with its CUDA graphs, on random weights: one token for
each request, so N tokens cost what N tokens of any uniform decoding batch cost, but for attention.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

from benchmarks.common import on_worker
from benchmarks.gpu import engines
from benchmarks.gpu.items import Finding, Setting

MODELS = ("0.6B", "1.7B", "8B")
COUNTS = (1, 2, 3, 5, 9, 17, 33, 64, 128, 256)
REPEATS = 30
# Tokens that each request has in its cache.
CONTEXT = 512


def run(setting: Setting) -> Finding:
    """Times of one pass of every size over each number of tokens."""
    engines.require_vllm()
    counts, repeats = ((1, 2), 2) if setting.toy else (COUNTS, REPEATS)
    rows, lines, waiting = [], [], []

    def timed(size: str) -> dict[str, Any]:
        arguments = engines.DUMMY_ARGS | {
            "model": engines.shaped(setting, size),
            "max_num_seqs": max(counts),
        }
        context = 8 if setting.toy else CONTEXT
        with engines.engine(setting, f"forwards {size}", arguments) as process:
            return {"rows": process.call(on_worker, _times, counts, context, repeats)}

    for size in MODELS:
        part = setting.part(size, partial(timed, size))
        if part is None:
            waiting.append(size)
            continue
        found = part["rows"]
        rows += [{"model": size, "tokens": n, **row} for n, row in zip(counts, found, strict=True)]
        one = found[0]["ms"]
        ratios = ", ".join(
            f"{n}: {row['ms'] / one:.2f}" for n, row in zip(counts, found, strict=True) if n > 1
        )
        lines.append(f"{size}: one token {one:.2f} ms; of that, tokens at once cost {ratios}.")
    return Finding(lines, rows, waiting=waiting)


def _times(
    worker: Any, counts: tuple[int, ...], context: int, repeats: int
) -> list[dict[str, float]]:
    import torch

    rows = []
    for count in counts:
        times = []
        for _ in range(repeats + 3):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            began = time.perf_counter()
            worker.model_runner._dummy_run(count, uniform_decode=True, context_len=context)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - began))
        low, middle, high = statistics.quantiles(times[3:], n=4)
        rows.append({"ms": middle, "ms_q25": low, "ms_q75": high})
    return rows
