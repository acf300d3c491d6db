"""What `adaptive` would draft, replayed on recorded text: greedy, exact in tokens, at given times.

    python -m benchmarks.studies.simulated_budget --prompts DIR    # or `make bench-budget`

Records once the greedy answers of two targets, and at each of their places the likeliest token of
the family's 0.5B and its probability; then `replayed_serving` serves them. So the budget can be
compared, in seconds, with every fixed configuration, in any order of prompts, cold or warm, with
one stream of requests or several. Writes simulated_budget.csv: over the best fixed configuration of
each set, chosen with hindsight.
"""

import argparse
import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, write_csv
from benchmarks.models.qwen_coder import qwen_coder
from benchmarks.models.smollm2 import smollm2
from benchmarks.studies import demo, edits
from benchmarks.studies.demo_cascade import PROMPTS
from benchmarks.studies.replayed_serving import LENGTH, Answer, Fixed, Server, Times
from vllm_hsd.tools.dtype import cpu_defaults
from vllm_hsd.tools.planner.prompts import Prompt, read_prompts

SETS = "alpaca", "gsm8k", "humaneval", "mt_bench", "qa", "sum"
NUM_PROMPTS, MAX_TOKENS, NUM_ORDERS = 5, 96, 12
STREAMS, ANSWERS = (1, 4, 16, 64), 6  # answers of each of several streams
FIXED: dict[str, Fixed] = {
    "no speculation": ((), ()),
    "suffix 8": ((0,), (8,)),
    **{f"0.5B {n}": ((1,), (n,)) for n in (2, 3, 4)},
    "suffix 4 < 0.5B 4": ((0, 1), (4, 4)),
    "suffix 8 < 0.5B 8": ((0, 1), (8, 8)),
}


@dataclass(frozen=True)
class Models:
    """A target, its drafter if there is one, and times of machines that serve them."""

    target: Callable[[], Path]
    small: Callable[[], Path] | None
    machines: dict[str, Times]

    @property
    def fixed(self) -> dict[str, Fixed]:
        """Configurations of fixed lengths."""
        return {k: f for k, f in FIXED.items() if self.small is not None or 1 not in f[0]}


MODELS = {
    "Qwen2.5-Coder": Models(
        partial(qwen_coder, "1.5B"),
        partial(qwen_coder, "0.5B"),
        {
            "measured": Times(),
            "dear tokens": Times(slope=0.12),
            "cheap tokens": Times(slope=0.02),
            "small drafter": Times(small=0.020, read=0.001),
            "large drafter": Times(small=0.065),
        },
    ),
    "SmolLM2": Models(smollm2, None, {"measured": Times(target=0.0144, slope=0.27, search=0.0005)}),
}


def record(models: Models, prompts: dict[str, list[Prompt]], path: Path) -> None:
    """Let the models answer, and write what both say."""
    from vllm import LLM, SamplingParams

    target_model = str(models.target())
    engine = cpu_defaults(
        target_model,
        {
            "max_model_len": 4096,
            "enforce_eager": True,
            "seed": 0,
            "kv_cache_memory_bytes": 1 << 29,
        },
    )
    sets = [name for name, chats in prompts.items() for _ in chats]
    chats: Any = [chat for own in prompts.values() for chat in own]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    target = LLM(target_model, **engine)
    answers: list[dict[str, Any]] = [
        {"prompt": list(found.prompt_token_ids or ()), "tokens": list(found.outputs[0].token_ids)}
        for found in target.chat(chats, params)
    ]
    del target
    if models.small is not None:
        small = LLM(str(models.small()), enable_prefix_caching=False, **engine)
        one = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        for answer in answers:
            text: Any = {"prompt_token_ids": answer["prompt"] + answer["tokens"]}
            said: Any = small.generate([text], one)[0].prompt_logprobs
            rows = said[len(answer["prompt"]) :]
            best = [max(row.items(), key=lambda each: each[1].logprob) for row in rows]
            answer |= {"small": [t for t, _ in best], "sure": [exp(p.logprob) for _, p in best]}
    lines = [json.dumps({"set": n} | each) for n, each in zip(sets, answers, strict=True)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines))


def by_set(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    """The answers of each set."""
    sets = dict.fromkeys(a.set for a in answers)
    return {name: [a for a in answers if a.set == name] for name in sets}


def orders(answers: Sequence[Answer]) -> dict[str, list[list[Answer]]]:
    """Streams that each begin cold: all sets mixed, some times; a set each; an answer each."""
    return {
        "mixed": [random.Random(i).sample(answers, len(answers)) for i in range(NUM_ORDERS)],
        "a set": list(by_set(answers).values()),
        "one answer": [[each] for each in answers],
    }


def one_stream(models: Models, answers: Sequence[Answer], times: Times) -> list[dict[str, Any]]:
    """The budget over the best fixed configuration of each set, and that one over none."""

    def total(seconds: dict[Answer, float], name: str) -> float:
        return sum(seconds[a] for a in answers if a.set == name)

    def run(orders: list[list[Answer]], fixed: Fixed | None) -> dict[Answer, float]:
        found: defaultdict[Answer, list[float]] = defaultdict(list)
        for order in orders:
            server = Server(times, fixed, drafts=models.small is not None)
            for answer in order:
                found[answer].append(server.answer([answer]))
        return {key: float(np.mean(seconds)) for key, seconds in found.items()}

    fixed = {name: run([list(answers)], levels) for name, levels in models.fixed.items()}
    table = []
    for order, streams in orders(answers).items():
        own = run(streams, None)
        for name in by_set(answers):
            seconds = {each: total(found, name) for each, found in fixed.items()}
            table.append(_row(order, name, seconds, total(own, name)))
    return table


def several_streams(
    models: Models, answers: Sequence[Answer], times: Times, streams: int
) -> list[dict[str, Any]]:
    """The same of so many requests at a time, one following the other; all sets, and each alone.

    Cold, and once more when the server has answered as many.
    """
    table = []
    for name, own in {"all": list(answers), **by_set(answers)}.items():
        queue = random.Random(0).choices(own, k=ANSWERS * max(streams, 4))
        seconds = {
            each: Server(times, fixed, streams).answer(queue)
            for each, fixed in models.fixed.items()
        }
        server = Server(times, None, streams, models.small is not None)
        for order in "cold", "warm":
            table.append(_row(order, name, seconds, server.answer(queue)))
    return table


def _row(order: str, name: str, fixed: dict[str, float], adaptive: float) -> dict[str, Any]:
    best = min(fixed, key=lambda each: fixed[each])
    return {
        "order": order,
        "set": name,
        "best_fixed": best,
        "best_over_none": round(fixed["no speculation"] / fixed[best], 3),
        "adaptive_over_best": round(fixed[best] / adaptive, 3),
        "adaptive_over_none": round(fixed["no speculation"] / adaptive, 3),
    }


def recorded(name: str, prompts: dict[str, list[Prompt]], output: Path) -> list[Answer]:
    """Answers of one family, recorded if they are not; of other prompts, anew."""
    digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:12]
    path = output / f"answers_{name}_{digest}.jsonl"
    if not path.exists():
        record(MODELS[name], prompts, path)
    answers = [Answer(**json.loads(line)) for line in path.read_text().splitlines()]
    return [each for each in answers if len(each.tokens) > LENGTH]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=Path, help="a directory of JSON lines files of the sets")
    parser.add_argument("--output", type=Path, default=RESULTS / "simulated_budget")
    options = parser.parse_args()
    texts = {**demo.read_prompts(PROMPTS), "edits of functions": edits.prompts()}
    prompts: dict[str, list[Prompt]] = {
        k: [[{"role": "user", "content": t}] for t in own] for k, own in texts.items()
    }
    for name in SETS:
        prompts[name] = read_prompts(options.prompts / f"{name}.jsonl" if options.prompts else name)
    few = {name: chats[:NUM_PROMPTS] for name, chats in prompts.items()}
    table = []
    for name, models in MODELS.items():
        answers = recorded(name, few, options.output)
        for machine, times in models.machines.items():
            for streams in STREAMS:
                found = one_stream(models, answers, times) if streams == 1 else []
                found += several_streams(models, answers, times, streams)
                given = {"models": name, "times": machine, "streams": streams}
                table += [given | row for row in found]
                for order in dict.fromkeys(row["order"] for row in found):
                    kinds = (row for row in found if row["order"] == order and row["set"] != "all")
                    own = [row["adaptive_over_best"] for row in kinds]
                    mean = np.exp(np.log(own).mean())
                    print(
                        f"{name}, {machine}, {streams}, {order}: {mean:.3f}, least {min(own):.2f}"
                    )
    write_csv(options.output / "simulated_budget.csv", table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
