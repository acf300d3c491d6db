"""A fixed number of requests under way for a fixed time: as one ends, the next one starts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Spreads the lengths of answers.
STRIDE = 37


@dataclass
class Served:
    """What an engine did in that time.

    Attributes:
        num_tokens: of all requests.
        seconds: the time.
        first_token_seconds: seconds to it, of every request that got one.
        per_token: seconds of a token after the first one, of every request with two or more.
        levels: counts of every level of a cascade, cheapest first; empty for other methods.
    """

    num_tokens: int = 0
    seconds: float = 0.0
    first_token_seconds: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    levels: list[dict[str, float]] = field(default_factory=list)


@dataclass
class _Request:
    arrived: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0


def keep_streams(
    llm: Any,
    prompts: Sequence[list[int]],
    streams: int,
    seconds: float,
    params: Mapping[str, Any],
) -> Served:
    """Serve `streams` requests at a time for `seconds`; runs in the engine's process.

    Answers differ in length, by their number: those of one length begin and end together for ever
    without speculation, and all prompts share a step then.

    Args:
        llm: vLLM's `LLM`.
        prompts: token ids, taken in order and again from the first one.
        params: arguments of `vllm.SamplingParams`; `max_tokens` is the mean.
    """
    from vllm.sampling_params import RequestOutputKind

    from vllm_hsd.host.metrics import counted_since, level_counts
    from vllm_hsd.tools.engine import vllm_params

    engine = llm.llm_engine
    mean = params["max_tokens"]
    before = level_counts()
    requests: dict[str, _Request] = {}
    ended: list[_Request] = []
    began = time.perf_counter()

    def start() -> None:
        number = len(requests) + len(ended)
        requests[str(number)] = _Request(time.perf_counter())
        prompt = {"prompt_token_ids": list(prompts[number % len(prompts)])}
        tokens = mean // 2 + 1 + STRIDE * number % mean
        own = {**params, "max_tokens": tokens, "output_kind": RequestOutputKind.DELTA}
        sampling = vllm_params(llm, own)
        engine.add_request(str(number), prompt, sampling)

    for _ in range(streams):
        start()
    while (now := time.perf_counter()) < began + seconds:
        for output in engine.step():
            now = time.perf_counter()
            request, new = requests[output.request_id], len(output.outputs[0].token_ids)
            if new:
                request.first, request.last = request.first or now, now
                request.tokens += new
            if output.finished:
                ended.append(requests.pop(output.request_id))
                start()
    engine.abort_request(list(requests))
    while engine.has_unfinished_requests():
        engine.step()
    served = Served(seconds=now - began)
    for request in [*ended, *requests.values()]:
        served.num_tokens += request.tokens
        if request.tokens:
            served.first_token_seconds.append(request.first - request.arrived)
        if request.tokens > 1:
            served.per_token.append((request.last - request.first) / (request.tokens - 1))
    served.levels = counted_since(before)
    return served
