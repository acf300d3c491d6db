"""Times of the verification kernels, compared with vLLM's samplers and the copy speed.

Every case is checked before it is timed: on the device against the reference, and again when
replayed from a CUDA graph. Times are medians of cold-cache runs (L2 is overwritten in between).
Calls that can be captured are timed as CUDA graphs. The floor is the time to read, at the copy
bandwidth measured here, the rows that any verifier must read once (see kernels/README.md).

On a CPU the same functions run so that this item can be tested; the times mean nothing there.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.items import Finding, Setting
from benchmarks.kernels.drafts import Drafts
from tests.support import vllm_sampler
from vllm_hsd.kernels import naive as reference

NOISE = 1.5
Call = Callable[[], object]
# Calls before those that count.
WARM_UP = 3

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


class NotTimed(SystemExit):
    """What was to be timed is wrong; the message says how."""


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
    waiting = []

    def timed(vocabulary: int, n: int, batch: int, temperature: float) -> dict[str, Any]:
        drafts = Drafts.make(vocabulary, batch, n, temperature, noise=NOISE, device=setting.device)
        case = {"vocabulary": vocabulary, "draft": n, "batch": batch, "temperature": temperature}
        case["case"] = f"V={vocabulary}, n={n}, T={temperature:g}"
        # Of the process in which the part was run, as the floors are.
        case["copy_bytes_per_s"] = bandwidth
        return {"rows": [case | row for row in measure(drafts, v2, bandwidth, repeats, flush)]}

    for case in cases:
        name = "V {}, n {}, batch {}, T {:g}".format(*case)
        part = setting.part(name, partial(timed, *case), RESERVE)
        if part is None:
            waiting.append(name)
        else:
            rows += part["rows"]
    lines = [f"Copy: {bandwidth / 1e12:.2f} TB/s read and written.", *_lines(rows)]
    return Finding(lines, rows, left_out, waiting)


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


def samplers(drafts: Drafts, v2) -> dict[str, Callable[[], object]]:
    """The timed calls by name; each one verifies the whole batch."""
    choices: dict[str, Callable[[], object]] = {}
    for method in ("block", "standard"):
        for lse in (True, False):
            name = f"{method}, lse given" if lse else method
            choices[name] = lambda m=method, given=lse: drafts.ours(m, given)
    if v2 is not None:
        rejection_sample, apply_temperature, _ = v2
        arguments = drafts.vllm_arguments
        scaled = drafts.temperature[0].item() not in (0.0, 1.0)

        def stock(block: bool):
            logits = drafts.target
            if scaled:
                # As vLLM's sampler does where a temperature is neither 0 nor 1.
                logits = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
                apply_temperature(logits, arguments["expanded_idx_mapping"], drafts.temperature)
            return rejection_sample(logits, **arguments, use_block_verification=block)

        choices["vLLM V2 block"] = lambda: stock(True)
        choices["vLLM V2 standard"] = lambda: stock(False)
    return choices


def check_case(drafts: Drafts, count: int) -> None:
    """Tokens of the first `count` requests against the reference.

    Raises:
        NotTimed: more than one differs. A uniform within rounding distance of a boundary may fall
            on its other side.
    """
    n = drafts.n
    count = min(count, drafts.batch)
    for method in ("block", "standard"):
        expected = reference.verify_chain(
            drafts.target[: count * (n + 1)].cpu(),
            drafts.draft[: count * n].cpu(),
            drafts.tokens[: count * n].cpu(),
            torch.arange(count + 1) * n,
            drafts.temperature[:count].cpu(),
            drafts.seeds[:count].cpu(),
            torch.zeros(count, dtype=torch.int64),
            max_draft_tokens=n,
            method=method,
        ).token_ids
        for lse in (True, False):
            got = drafts.ours(method, lse).token_ids[:count].cpu()
            wrong = int((got != expected).any(1).sum())
            if wrong > 1:
                temperature = drafts.temperature[0].item()
                raise NotTimed(
                    f"{method}, T={temperature:g}, V={drafts.target.shape[1]}, n={n}: {wrong} of "
                    f"{count} requests differ from the reference; not timed."
                )


def measure(drafts: Drafts, v2, bandwidth: float, repeats: int, flush) -> list[dict]:
    """A row for each sampler that is here.

    Raises:
        NotTimed: a kernel's tokens are wrong, or differ when replayed.
    """
    check_case(drafts, 8)
    rows = []
    for name, call in samplers(drafts, v2).items():
        replay = capture(call, flush.device)
        ours = name.startswith(("block", "standard"))
        if ours and replay is None:
            raise NotTimed(f"{name} could not be captured in a CUDA graph.")
        if ours and not replay().token_ids.equal(call().token_ids):
            raise NotTimed(f"{name}: a graph replay gives other tokens.")
        row = {"sampler": name, "graph": replay is not None, "floor_us": None}
        row["of_copy_bandwidth"] = None
        row |= spread_us(replay or call, repeats, flush)
        if ours:
            needed = drafts.needed_bytes(call().num_accepted, name.endswith("given"))
            row["floor_us"] = 1e6 * needed / bandwidth
            row["of_copy_bandwidth"] = row["floor_us"] / row["us"]
        rows.append(row)
    return rows


def capture(call: Call, device: torch.device) -> Call | None:
    """The call as a replay of a CUDA graph, None where it cannot be captured."""
    if device.type == "cpu":
        return call
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = call()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return lambda: (graph.replay(), result)[1]


def spread_us(call: Call, repeats: int, flush: torch.Tensor) -> dict[str, float]:
    """Median and quartiles in microseconds; `flush` is overwritten before every call."""
    times = []
    for _ in range(WARM_UP + repeats):
        flush.zero_()
        times.append(1e6 * _seconds(call, flush.device))
    low, middle, high = statistics.quantiles(times[WARM_UP:], n=4)
    return {"us": middle, "us_q25": low, "us_q75": high}


def copy_bandwidth(size: int, repeats: int, flush: torch.Tensor) -> float:
    """Bytes per second read and written by a device copy of `size` bytes."""
    source = torch.empty(size, dtype=torch.uint8, device=flush.device)
    target = torch.empty_like(source)
    return 2 * size / (spread_us(lambda: target.copy_(source), repeats, flush)["us"] / 1e6)


def _seconds(call: Call, device: torch.device) -> float:
    if device.type == "cpu":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3
