"""What entropies tell of drafts: the figures of the dynamic windows' paper, on both turns of chats.

    python -m benchmarks.studies.entropies --prompts FILE

Figures 1, 6 and 8 of "HSDDW: Hierarchical Speculative Decoding with Dynamic Windows" on
Qwen2.5-Coder 1.5B and its 0.5B, with the ways of `benchmarks.studies.papers`: entropies of the
drafter at accepted and at rejected tokens, accepted tokens per step, and draft lengths over the
steps of one request. FILE is MT-Bench ("category", two "turns"); the second turn follows the answer
to the first. All are counts, which a busy machine does not change. Writes a row for every draft
that the target verified.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import plot
from benchmarks.common import RESULTS, on_worker, options, write_csv
from benchmarks.models.qwen_coder import qwen_coder
from benchmarks.studies.papers import windows
from vllm_hsd.tools.cli.options import numbers, progress
from vllm_hsd.tools.dtype import choose_dtype
from vllm_hsd.tools.engine import EngineProcess
from vllm_hsd.tools.planner.prompts import prompts_file

WAYS = ("standard", "self-verify", "dynamic windows")
Row = dict[str, Any]


def verdict(accepted: int, entropy: np.ndarray) -> Row:
    """Counts of a draft, and entropies (nats) of the drafter: the mean over accepted tokens, and
    that of the first rejected one; NaN where there is none or none was taken.

    Args:
        entropy: [drafted tokens] of the rows that they were drawn from.
    """
    drafted = len(entropy)
    return {
        "drafted": drafted,
        "accepted": accepted,
        "entropy_accepted": float(entropy[:accepted].mean()) if accepted else float("nan"),
        "entropy_rejected": float(entropy[accepted]) if accepted < drafted else float("nan"),
    }


def _listen(worker: Any) -> None:
    """Take a verdict of each draft when the next step begins; of one request."""
    speculator, worker.verdicts = worker.model_runner.speculator, []
    take_in, state = speculator._take_in, speculator.state

    def listening(batch: Any, slots: Any, num_sampled: Any, num_rejected: Any) -> None:
        (slot,), (sampled,) = slots.tolist(), num_sampled.tolist()
        if (row := int(state.row_of_slot[slot])) >= 0 and sampled:
            drafted = int(state.draft_length[row])
            entropy = np.full(drafted, np.nan)
            if speculator.thresholds is not None:
                entropy = speculator.thresholds.entropy[-1][row, :drafted].numpy().astype(float)
            worker.verdicts.append(verdict(min(sampled - 1, drafted), entropy))
        take_in(batch, slots, num_sampled, num_rejected)

    speculator._take_in = listening


def _take(worker: Any) -> list[Row]:
    taken, worker.verdicts = worker.verdicts, []
    return taken


def answers(
    engine: EngineProcess, tokenizer: Any, turns: Sequence[str], params: dict[str, Any]
) -> Iterator[list[Row]]:
    """The verdicts of each turn's answer."""
    chat: list[dict[str, str]] = []
    for text in turns:
        chat.append({"role": "user", "content": text})
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        found = engine.generate([tokenizer.encode(prompt, add_special_tokens=False)], params)
        chat.append({"role": "assistant", "content": found.texts[0]})
        yield engine.call(on_worker, _take)


def measure(chosen: argparse.Namespace, questions: Sequence[Row]) -> Iterator[Row]:
    """A row for every verified draft of every way, temperature, question and turn."""
    from transformers import AutoTokenizer

    model, small = (os.path.relpath(qwen_coder(size)) for size in ("1.5B", "0.5B"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    dtype = choose_dtype(model).dtype
    configs = windows({"model": small})
    for way in WAYS:
        engine_args = {
            "model": model,
            "dtype": dtype,
            "enforce_eager": True,
            "max_model_len": 2048,
            "kv_cache_memory_bytes": 1 << 28,
            "speculative_config": configs[way],
        }
        with EngineProcess(engine_args, way, log=chosen.output / "engine.log") as engine:
            engine.call(on_worker, _listen)
            for temperature in chosen.temperatures:
                params = {
                    "temperature": temperature,
                    "max_tokens": chosen.max_tokens,
                    "ignore_eos": True,
                    "seed": 0,
                }
                for number, question in enumerate(questions):
                    found = answers(engine, tokenizer, question["turns"], params)
                    place = {"way": way, "temperature": temperature, "question": number}
                    place["category"] = question["category"]
                    for turn, rows in enumerate(found, 1):
                        for step, row in enumerate(rows):
                            yield {**place, "turn": turn, "step": step, **row}
                progress(f"{way}, temperature {temperature:g}")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Entropies, accepted tokens, and the draft lengths of the first question's first turn."""
    temperatures = plot.values(rows, "temperature")
    with plot.saved_figure(path, 12.0, 3.2 * len(temperatures)) as figure:
        axes = figure.subplots(len(temperatures), 3, squeeze=False)
        for across, temperature in zip(axes, temperatures, strict=True):
            for way in WAYS:
                own = [r for r in rows if (r["way"], r["temperature"]) == (way, temperature)]
                first = [r["drafted"] for r in own if (r["question"], r["turn"]) == (0, 1)]
                accepted = [r["accepted"] for r in own]
                across[1].plot(np.bincount(accepted) / len(accepted), label=way)
                across[2].plot(first, label=way)
                for kind, style in (("accepted", "-"), ("rejected", "--")):
                    values = np.array([r[f"entropy_{kind}"] for r in own])
                    if len(values := np.sort(values[~np.isnan(values)])):
                        share = np.arange(1, len(values) + 1) / len(values)
                        across[0].plot(values, share, style, label=f"{way}, {kind}")
            across[0].set(xlabel="entropy of the drafter (nats)", ylabel="share below")
            across[1].set(xlabel="accepted tokens", ylabel="share of steps")
            across[2].set(xlabel="step", ylabel="drafted tokens")
            for each in across:
                each.set_title(f"temperature {temperature:g}")
                each.legend(fontsize="small")


def summary(rows: Sequence[Row], column: str) -> Iterator[str]:
    """A Markdown table: tokens per step by temperature and way, over the values of a column."""
    names = plot.values(rows, column)
    yield f"\n| tokens per step | {' | '.join(map(str, names))} |"
    yield "| --- |" + " --- |" * len(names)
    for temperature in plot.values(rows, "temperature"):
        for way in WAYS:
            own = [r for r in rows if (r["way"], r["temperature"]) == (way, temperature)]
            means = (np.mean([1 + r["accepted"] for r in own if r[column] == n]) for n in names)
            yield f"| {way}, {temperature:g} | {' | '.join(f'{mean:.2f}' for mean in means)} |"


def main() -> int:
    parser = options(__doc__, RESULTS / "entropies")
    parser.add_argument("--prompts", type=Path, default="mt_bench", help="file of MT-Bench")
    parser.add_argument("--each", type=int, default=2, help="questions of every category")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=numbers, default=[0.0, 1.0])
    chosen = parser.parse_args()
    chosen.output.mkdir(parents=True, exist_ok=True)
    every = [
        json.loads(line) for line in prompts_file(chosen.prompts).read_text().strip().split("\n")
    ]
    questions = [
        question
        for category in plot.values(every, "category")
        for question in [q for q in every if q["category"] == category][: chosen.each]
    ]
    rows = list(measure(chosen, questions))
    write_csv(chosen.output / "entropies.csv", rows)
    draw(rows, chosen.output / "entropies.png")
    for column in ("category", "turn"):
        print(*summary(rows, column), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
