"""Times of the verification kernels, compared with vLLM's samplers and the copy speed."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from benchmarks.gpu.items import Finding, Setting
from benchmarks.kernels import bench_chain_verify as bench
from benchmarks.kernels.drafts import Drafts
from benchmarks.kernels.timing import copy_bandwidth
from tests.support import vllm_sampler

# (vocabulary, draft length, batch, temperature), most valuable first.
CASES = [
    (vocabulary, n, batch, temperature)
    for (vocabulary, n), temperature, batch in itertools.product(
        [(152064, 4), (152064, 8), (32000, 4)], [1.0, 0.7, 0.0], [1, 8, 64, 256]
    )
]
REPEATS = 30
TOY_CASES = [(70, 1, 2, 0.7)]
# Seconds that a case may take at the end of the item.
RESERVE = 15


def run(setting: Setting) -> Finding:
    """One row for each sampler and case; a case that fails its check ends the item."""
    torch.manual_seed(0)
    v2, left_out = None, []
    try:
        v2 = vllm_sampler.load_v2_sampler()
    except Exception as error:
        left_out.append(f"vLLM's sampler: {type(error).__name__}: {error}.")
    cases, repeats, size = (TOY_CASES, 2, 2**16) if setting.toy else (CASES, REPEATS, 2**30)
    # Larger than the last-level cache.
    flush = torch.empty(size // 4, dtype=torch.uint8, device=setting.device)
    bandwidth = copy_bandwidth(size, repeats, flush)
    rows: list[dict[str, Any]] = []
    for number, (vocabulary, n, batch, temperature) in enumerate(cases):
        if setting.time_left() < RESERVE:
            left_out.append(f"{len(cases) - number} of {len(cases)} cases: no time left.")
            break
        drafts = Drafts.make(
            vocabulary, batch, n, temperature, noise=bench.NOISE, device=setting.device
        )
        case = {"vocabulary": vocabulary, "draft": n, "batch": batch, "temperature": temperature}
        case["case"] = f"V={vocabulary}, n={n}, T={temperature:g}"
        measured = bench.measure(drafts, v2, bandwidth, repeats, flush)
        rows += [case | row for row in measured]
    rows = [row | {"copy_bytes_per_s": bandwidth} for row in rows]
    lines = [f"Copy: {bandwidth / 1e12:.2f} TB/s read and written.", *_lines(rows)]
    return Finding(lines, rows, left_out)


def _lines(rows: list[dict[str, Any]]) -> list[str]:
    """Block verification at each vocabulary's largest batch, and vLLM's there."""
    lines = []
    for (vocabulary, n), group in itertools.groupby(rows, lambda r: (r["vocabulary"], r["draft"])):
        cell = list(group)
        largest = max(row["batch"] for row in cell)
        for temperature in dict.fromkeys(row["temperature"] for row in cell):
            times = {
                row["sampler"]: row
                for row in cell
                if (row["batch"], row["temperature"]) == (largest, temperature)
            }
            ours = times.get("block, lse given")
            if ours is None:
                continue
            line = (
                f"V={vocabulary}, n={n}, batch {largest}, T={temperature:g}: {_us(ours)}, "
                f"{ours['of_copy_bandwidth']:.2f} of copy speed over one read of the inputs"
            )
            stock = times.get("vLLM V2 block")
            lines.append(line + (f"; vLLM's block verification {_us(stock)}." if stock else "."))
    return lines


def _us(row: dict[str, Any]) -> str:
    return f"{row['us']:.0f} us ({row['us_q25']:.0f}-{row['us_q75']:.0f})"
