"""Ablations on the tiny family: what each choice does to the tokens per target call.

    python benchmarks/ablations/run.py [--only NAME ...] [--out results/ablations]

Everything but the number of drafts runs through vLLM with method "hsd" on the target as trained
(not widened): the figures are counts, not times, and so hold on a busy machine. Each row is the
mean over RUNS batches of the same prompts with other seeds, +- their standard deviation. The
number of drafts (trees, which vLLM's runner cannot host) runs on the reference engine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from rich.progress import track

from vllm_hsd.engine_runs import EngineProcess, Run
from vllm_hsd.planner.theory import redundancy, target_utilisation

matplotlib.use("Agg")
import itertools

from matplotlib import pyplot as plt

MODELS = Path(__file__).parents[1] / "models"
RUNS, PROMPTS, TOKENS = 6, 16, 96
SMALL, MID = {"model": str(MODELS / "small")}, {"model": str(MODELS / "mid")}


@dataclass
class Variant:
    """One curve: an engine, and the points at which it runs.

    Attributes:
        levels: as in the JSON.
        keys: further keys of the cascade.
        points: (x, draft_lengths or None for those of the levels, temperature).
    """

    name: str
    levels: list[dict]
    points: list[tuple[float, list[int] | None, float]]
    draft: int = 8
    keys: dict = field(default_factory=dict)


def with_keys(level: dict, **keys) -> dict:
    return {**level, **keys}


def lengths(*values: int) -> list[tuple[float, list[int], float]]:
    return [(n, [n], 1.0) for n in values]


def experiments() -> dict[str, tuple[str, list[Variant]]]:
    """Name -> (label of x, variants)."""
    entropy = {"stopping": "entropy"}
    once = [(8, None, 1.0)]
    temperatures = [(t, None, t) for t in (0.0, 0.3, 0.6, 0.8, 1.0, 1.2)]
    verifiers = ("block", "standard")
    windows = [(n, [n], 1.0) for n in (4, 8, 12, 16)]
    stacked = [(n, [n, n], 1.0) for n in (4, 8, 12, 16)]
    small_below = with_keys(SMALL, num_tokens=8)
    return {
        "draft length x verifier": (
            "draft length",
            [
                Variant(v, [MID], lengths(2, 4, 6, 8, 12, 16), 16, {"verifier": v})
                for v in verifiers
            ],
        ),
        "temperature x verifier": (
            "temperature",
            [Variant(v, [MID], temperatures, 8, {"verifier": v}) for v in verifiers],
        ),
        "window size x rule": (
            "window size K",
            [
                Variant("fixed", [MID], windows, 16),
                Variant("entropy", [with_keys(MID, **entropy)], windows, 16),
                Variant("fixed, two levels", [with_keys(SMALL, num_tokens=16), MID], stacked, 16),
                Variant(
                    "entropy, two levels",
                    [with_keys(SMALL, num_tokens=16, **entropy), with_keys(MID, **entropy)],
                    stacked,
                    16,
                ),
            ],
        ),
        "pre-verify and self-verify": (
            "draft length",
            [
                Variant("SD, small", [SMALL], once),
                Variant("SD, mid", [MID], once),
                Variant("self-verify, small", [with_keys(SMALL, **entropy)], once),
                Variant("self-verify, mid", [with_keys(MID, **entropy)], once),
                Variant("pre-verify", [small_below, with_keys(MID, max_rounds=1)], once),
                Variant(
                    "pre-verify and self-verify",
                    [with_keys(small_below, **entropy), with_keys(MID, max_rounds=1)],
                    once,
                ),
                Variant(
                    "three stages (HSDDW)",
                    [with_keys(small_below, **entropy), with_keys(MID, **entropy)],
                    once,
                ),
            ],
        ),
        "early-exit pairs": (
            "upper exit",
            [
                Variant(
                    f"lower exit {low}" if low else "one exit",
                    [{"early_exit": low, "num_tokens": 3}] * bool(low) + [{"early_exit": high}],
                    [(high, None, 1.0)],
                )
                for low in (0, 1, 2, 3, 4)
                for high in range(low + 1, 6)
            ],
        ),
        "tail": (
            "draft length",
            [
                Variant(
                    f"tail {tail}",
                    [with_keys(SMALL, num_tokens=3), MID],
                    once,
                    keys={"horizontal_tokens": tail},
                )
                for tail in (0, 2, 4)
            ],
        ),
        "draft temperature, target at 0.6": (
            "draft temperature",
            [
                Variant("mid", [with_keys(MID, temperature_scale=t / 0.6)], [(t, None, 0.6)])
                for t in (0.5, 0.6, 0.7, 0.8)
            ],
        ),
    }


def measure(variant: Variant, prompts: list[str], log: Path) -> Iterator[dict]:
    """One row per point."""
    cascade = {
        "method": "hsd",
        "num_speculative_tokens": variant.draft,
        "levels": variant.levels,
        **variant.keys,
    }
    with EngineProcess(variant.name, MODELS / "target", cascade, log) as engine:
        for x, draft_lengths, temperature in variant.points:
            if draft_lengths is not None:
                engine.use(draft_lengths)
            runs = [
                engine.generate(prompts, temperature, TOKENS, seed=1000 * i) for i in range(RUNS)
            ]
            yield {"variant": variant.name, "x": x, "temperature": temperature, **figures(runs)}


def figures(runs: list[Run]) -> dict[str, float]:
    """Counts of several runs of one point, as the columns of a row."""
    efficiency = [run.tokens / run.target_calls for run in runs]
    calls, tokens = sum(run.target_calls for run in runs), sum(run.tokens for run in runs)
    accepted = sum(run.accepted for run in runs)
    levels = [
        {key: sum(run.levels[i][key] for run in runs) for key in ("drafted", "accepted")}
        for i in range(len(runs[0].levels))
    ]
    # What a level hands up holds the tokens that it accepted from the level below.
    generated = levels[0]["drafted"] + sum(
        upper["drafted"] - lower["accepted"] for lower, upper in itertools.pairwise(levels)
    )
    return {
        "block_efficiency": float(np.mean(efficiency)),
        "block_efficiency_sd": float(np.std(efficiency, ddof=1)),
        "redundancy": redundancy(accepted, int(generated)),
        "target_utilisation": target_utilisation(calls, tokens),
        "generated_per_target_call": generated / calls,
    }


def measure_number_of_drafts(prompts: list[str]) -> Iterator[dict]:
    """Block efficiency of K drafts of four tokens on the reference engine."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from vllm_hsd.reference import HuggingFaceLevel, ReferenceEngine, TreePlan

    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    models = {n: AutoModelForCausalLM.from_pretrained(MODELS / n) for n in ("target", "small")}
    for draw in ("iid", "without_replacement"):
        for drafts in (1, 2, 4, 11):
            engine = ReferenceEngine(
                HuggingFaceLevel(models["target"]),
                [HuggingFaceLevel(models["small"])],
                draft_tree=TreePlan(widths=(drafts, 1, 1, 1), draw=draw),
            )
            results = [
                engine.generate(tokenizer(prompt).input_ids, TOKENS // 2, seed=i)
                for i, prompt in enumerate(prompts[:8])
            ]
            efficiency = [result.block_efficiency for result in results]
            calls = sum(result.target_calls for result in results)
            tokens = sum(len(result.token_ids) for result in results)
            yield {
                "variant": draw,
                "x": drafts,
                "temperature": 1.0,
                "block_efficiency": tokens / calls,
                "block_efficiency_sd": float(np.std(efficiency, ddof=1) / len(efficiency) ** 0.5),
                "target_utilisation": target_utilisation(calls, tokens),
                "generated_per_target_call": sum(result.drafted for result in results) / calls,
            }


def plot(rows: pd.DataFrame, labels: dict[str, str], path: Path) -> None:
    """One panel per ablation: block efficiency over x."""
    names = list(labels)
    figure, axes = plt.subplots((len(names) + 1) // 2, 2, figsize=(12, 3.2 * len(names) / 2 + 1))
    for axis, name in zip(axes.flat, names, strict=False):
        own = rows[rows.ablation == name]
        axis.set(title=name, xlabel=labels[name], ylabel="tokens per target call")
        if own.x.nunique() == 1:
            # One point per variant: the variants are the axis.
            axis.errorbar(own.variant, own.block_efficiency, own.block_efficiency_sd, fmt="o")
            axis.tick_params("x", rotation=20, labelsize=7)
            axis.set_xlabel(f"{labels[name]} {own.x.iloc[0]:g}")
            continue
        for variant, part in own.groupby("variant", sort=False):
            axis.errorbar(
                part.x, part.block_efficiency, part.block_efficiency_sd, marker="o", label=variant
            )
        axis.legend(fontsize=7)
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results/ablations"))
    parser.add_argument("--only", nargs="*", help="names of the ablations to run")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    prompts = [
        json.loads(line)["prompt"] for line in (MODELS / "prompts.jsonl").read_text().splitlines()
    ][:PROMPTS]
    chosen = {k: v for k, v in experiments().items() if not options.only or k in options.only}
    labels = {name: label for name, (label, _) in chosen.items()}
    jobs = [(name, variant) for name, (_, variants) in chosen.items() for variant in variants]
    rows = [
        {"ablation": name, **row}
        for name, variant in track(jobs, "ablations")
        for row in measure(variant, prompts, options.out / "engine.log")
    ]
    pd.DataFrame(rows).to_csv(options.out / "ablations.csv", index=False, float_format="%.4f")
    drafts = "number of drafts (reference engine)"
    if not options.only or drafts in options.only:
        labels[drafts] = "drafts K"
        rows += [{"ablation": drafts, **row} for row in measure_number_of_drafts(prompts)]
    table = pd.DataFrame(rows)
    table.to_csv(options.out / "ablations.csv", index=False, float_format="%.4f")
    plot(table, labels, options.out / "ablations.png")
    print(table.to_string(index=False, float_format=lambda value: f"{value:.3f}"))


if __name__ == "__main__":
    main()
