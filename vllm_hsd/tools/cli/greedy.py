"""Greedy outputs of a comparison against those of no speculation.

In float32 they must be equal. In 16 bits the target itself rounds differently when it verifies
several tokens at once, so outputs may part where its own two best logits nearly tie, and nowhere
else: the engine without speculation gives the gap at each such place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from vllm_hsd.tools.cli.bench_jobs import NONE, Difference, Job, Results

# Context, and two tokens after it.
Place = tuple[Sequence[int], int, int]
# Largest gap of a near tie, in nats: a few rounding steps of logits near 20.
LARGEST_GAP = {"bfloat16": 0.5, "float16": 0.1}


def differences(results: Results, prompt_ids: Sequence[Sequence[int]]) -> list[Difference]:
    """First differences of all greedy outputs, in the order of the jobs.

    Outputs without speculation are compared with those of its own first round with these prompts.
    """
    found = []
    first: dict[tuple, Job] = {}
    for job in sorted(results.generations, key=lambda job: job.round):
        if job.config == 0:
            first.setdefault((job.batch_size, job.temperature, job.part, job.prompts), job)
    for job, generation in results.generations.items():
        if job.temperature > 0:
            continue
        reference = replace(job, config=0)
        if not job.config:
            reference = first[job.batch_size, job.temperature, job.part, job.prompts]
        expected = results.generations[reference].token_ids
        for i, (ours, theirs) in enumerate(zip(generation.token_ids, expected, strict=True)):
            pairs = list(zip_longest(ours, theirs, fillvalue=NONE))
            n = next((n for n, (our, their) in enumerate(pairs) if our != their), None)
            if n is not None:
                prompt = prompt_ids[job.prompts[i] % len(prompt_ids)]
                context = (*prompt, *theirs[:n])
                found.append(Difference(job, i, context, pairs[n][1], pairs[n][0]))
    return found


def with_gaps(
    gaps_at: Callable[[Sequence[Place]], list[float]], found: Sequence[Difference]
) -> list[Difference]:
    """The differences with their gaps, which `gaps_at` asks of the target without speculation."""
    places = {each: (each.context, each.expected, each.found) for each in found}
    asked = list(dict.fromkeys(place for place in places.values() if NONE not in place[1:]))
    gaps = dict(zip(asked, gaps_at(asked), strict=True)) if asked else {}
    return [replace(each, gap=gaps.get(place, math.inf)) for each, place in places.items()]


def gaps_of_target(llm: Any, places: Sequence[Place], alone: bool = False) -> list[float]:
    """Gap at each place; runs in the engine's process.

    Args:
        alone: no other token than the two counts: a grammar may have forbidden it.
    """
    from vllm import SamplingParams

    gaps = []
    for context, *pair in places:
        params = SamplingParams(
            temperature=0,
            max_tokens=1,
            logprob_token_ids=sorted(pair),
            allowed_token_ids=pair if alone else None,
            detokenize=False,
        )
        prompt: Any = {"prompt_token_ids": list(context)}
        output = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
        logprobs = {token: found.logprob for token, found in output.logprobs[0].items()}
        gaps.append(max(logprobs.values()) - min(logprobs[token] for token in pair))
    return gaps


def unexplained(found: Sequence[Difference], dtype: str) -> list[Difference]:
    """Those that are no near ties: in float32 all of them."""
    bound = LARGEST_GAP.get(dtype, -math.inf)
    return [each for each in found if not each.gap <= bound]


def sentences(results: Results, found: Sequence[Difference], dtype: str) -> list[str]:
    """What to say about the differences, one sentence per configuration that has any."""
    lines = []
    for index, name in enumerate(results.comparison.names):
        own = [each for each in found if each.job.config == index]
        if not own:
            continue
        jobs = [job for job in results.generations if job.config == index and not job.temperature]
        total = sum(len(job.prompts) for job in jobs)
        counted = f"{name}: {len(own)} of {total} greedy outputs differ from no speculation"
        if dtype not in LARGEST_GAP:
            lines.append(f"{counted}: in {dtype} they must be equal.")
            continue
        bad = unexplained(own, dtype)
        largest, bound = max(each.gap for each in bad or own), f"bound {LARGEST_GAP[dtype]:g}"
        lines.append(
            f"{counted}, {len(bad)} of them where nothing ties (gap up to {largest:.3f} nats, "
            f"{bound})."
            if bad
            else f"{counted}, each first where two tokens nearly tie for the target itself "
            f"(largest gap {largest:.3f} nats, {bound})."
        )
    return lines
