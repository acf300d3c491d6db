"""A number of requests, so many of them at a time: as one ends, the next one starts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Spreads the lengths of answers.
STRIDE = 37


@dataclass
class Served:
    """What an engine did.

    Attributes:
        num_tokens: of all requests.
        seconds: from the first request to the last token.
        first_token_seconds: seconds to it, of every request.
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


def serve(
    llm: Any, prompts: Sequence[list[int]], streams: int, params: Mapping[str, Any]
) -> Served:
    """Answer every prompt, `streams` at a time; runs in the engine's process.

    Answers differ in length, by their number: those of one length begin and end together for ever
    without speculation, and all prompts share a step then.

    Args:
        llm: vLLM's `LLM`.
        prompts: token ids.
        params: arguments of `vllm.SamplingParams`; `max_tokens` is the mean.
    """
    from vllm.sampling_params import RequestOutputKind

    from vllm_hsd.host.metrics import counted_since, level_counts
    from vllm_hsd.tools.engine import vllm_params

    engine, mean = llm.llm_engine, params["max_tokens"]
    before, began = level_counts(), time.perf_counter()
    requests: list[_Request] = []

    def start() -> None:
        number = len(requests)
        if number == len(prompts):
            return
        requests.append(_Request(time.perf_counter()))
        tokens = mean // 2 + 1 + STRIDE * number % mean
        own = {**params, "max_tokens": tokens, "output_kind": RequestOutputKind.DELTA}
        prompt = {"prompt_token_ids": list(prompts[number])}
        engine.add_request(str(number), prompt, vllm_params(llm, own))

    for _ in range(streams):
        start()
    while engine.has_unfinished_requests():
        for output in engine.step():
            now = time.perf_counter()
            request, new = requests[int(output.request_id)], len(output.outputs[0].token_ids)
            if new:
                request.first, request.last = request.first or now, now
                request.tokens += new
            if output.finished:
                start()
    return Served(
        sum(request.tokens for request in requests),
        time.perf_counter() - began,
        [request.first - request.arrived for request in requests],
        [(r.last - r.first) / (r.tokens - 1) for r in requests if r.tokens > 1],
        counted_since(before),
    )
