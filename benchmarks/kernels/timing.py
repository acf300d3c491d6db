"""Cold-cache times of calls on a GPU, replayed from CUDA graphs where they can be captured.

On a CPU, under Triton's interpreter, the same functions run so that what uses them can be tested;
the times mean nothing there.
"""

import statistics
import time
from collections.abc import Callable

import torch

Call = Callable[[], object]
# Calls before those that count.
WARM_UP = 3


class NotTimed(SystemExit):
    """What was to be timed is wrong; the message says how."""


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
