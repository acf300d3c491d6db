"""Requests that join, leave and are preempted; afterwards each seeded one runs alone.

What a request says must not depend on its neighbours. A GPU rounds differently in other batches,
so a few texts may part at near ties.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from benchmarks.gpu import engines
from benchmarks.gpu.items import Finding, Setting

REQUESTS, SECONDS, ALONE = 600, 45.0, 24
TOY_REQUESTS, TOY_ALONE = 8, 2
# Requests above this get no drafts.
MAX_BATCH = 64
# Of the texts that may part from those of the requests alone.
MAY_PART = 0.05
# Few blocks, so that requests are preempted; chunks of prompts of at most 64 tokens.
CROWDED = {"max_num_seqs": MAX_BATCH, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 400}


def requests(count: int, longest: int, vocabulary: int) -> list[dict[str, Any]]:
    """Prompts and sampling parameters; every fifth is greedy, every seventh leaves early."""
    choose = random.Random(0)
    made = []
    for i in range(count):
        length = choose.randint(1, longest)
        made.append(
            {
                "prompt": [choose.randrange(3, vocabulary) for _ in range(length)],
                "params": {
                    "temperature": 0 if i % 5 == 0 else choose.choice([0.7, 1.0]),
                    "top_p": choose.choice([1.0, 0.9]),
                    "max_tokens": choose.randint(1, longest // 2),
                    "ignore_eos": True,
                    "seed": i,
                },
                "leaves": i % 7 == 3,
            }
        )
    return made


def run(setting: Setting, family: dict[str, str] = engines.TINY) -> Finding:
    """A crowd of requests, and each seeded one of a sample alone: texts are compared.

    Args:
        family: directories of target, mid and small.
    """
    engines.require_vllm()
    count, alone = (TOY_REQUESTS, TOY_ALONE) if setting.toy else (REQUESTS, ALONE)
    made = requests(count, 24 if setting.toy else 300, 60 if setting.toy else 250)
    levels = {"model": family["small"], "num_tokens": 2}, {"model": family["mid"]}
    arguments = engines.TINY_ARGS | CROWDED | {"model": family["target"]}
    arguments |= {"speculative_config": engines.cascade(5, *levels), "skip_tokenizer_init": True}
    with engines.engine(setting, "soak", arguments) as process:
        seen = process.call(soak, made, SECONDS)
        stayed = [i for i, text in enumerate(seen["texts"]) if text is not None]
        compared = stayed[:: max(1, len(stayed) // alone)][:alone]
        singles = [
            process.generate([made[i]["prompt"]], made[i]["params"]).token_ids[0] for i in compared
        ]
    short = [i for i in stayed if len(seen["texts"][i]) != made[i]["params"]["max_tokens"]]
    if short:
        pytest.fail(f"{len(short)} of {len(stayed)} requests ended without all their tokens.")
    if not setting.toy and not seen["preemptions"]:
        pytest.fail("no request was preempted: the soak was too easy.")
    parted = sum(seen["texts"][i] != text for i, text in zip(compared, singles, strict=True))
    if parted > MAY_PART * len(compared):
        pytest.fail(f"{parted} of {len(compared)} texts differ from those of requests alone.")
    return Finding(
        [
            f"{seen['added']} requests in {seen['seconds']:.0f} s, {len(stayed)} ended whole, "
            f"{seen['left']} left early, {seen['preemptions']:.0f} preemptions, "
            f"{seen['tokens']} tokens.",
            f"{len(compared) - parted} of {len(compared)} texts equal those of requests alone.",
            f"GPU memory allocated grew by {seen['grown'] / 2**20:.1f} MiB after the first half.",
        ]
    )


def soak(llm: Any, made: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Feed the engine; runs in its process. Requests that could not be added in time have none."""
    import torch
    from vllm import SamplingParams

    choose = random.Random(1)
    engine = llm.llm_engine
    texts: list[list[int] | None] = [None] * len(made)
    leaving: dict[int, int] = {}
    added = left = tokens = running = 0
    began, half = time.monotonic(), None
    while added < len(made) or engine.has_unfinished_requests():
        out_of_time = time.monotonic() - began > seconds
        if out_of_time and added < len(made):
            made = made[:added]
            continue
        for _ in range(choose.randint(0, 4)):
            if added < len(made) and running < 2 * MAX_BATCH:
                params = SamplingParams(**made[added]["params"], detokenize=False)
                engine.add_request(str(added), {"prompt_token_ids": made[added]["prompt"]}, params)
                if made[added]["leaves"]:
                    leaving[added] = choose.randint(1, 20)
                added, running = added + 1, running + 1
        for number in [n for n, steps in leaving.items() if steps == 0]:
            engine.abort_request([str(number)])
            del leaving[number]
            left, running = left + 1, running - 1
        leaving = {number: steps - 1 for number, steps in leaving.items()}
        for output in engine.step():
            if output.finished and output.outputs[0].finish_reason != "abort":
                number = int(output.request_id)
                running -= 1
                leaving.pop(number, None)
                texts[number] = list(output.outputs[0].token_ids)
                tokens += len(texts[number] or ())
        if half is None and added >= len(made) // 2:
            half = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    used = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    metrics = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {
        "texts": texts,
        "added": added,
        "left": left,
        "tokens": tokens,
        "seconds": time.monotonic() - began,
        "preemptions": metrics.get("vllm:num_preemptions", 0),
        "grown": used - (half or used),
    }
