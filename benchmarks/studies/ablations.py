"""Ablations on the tiny models: what each choice does to the block efficiency.

    python -m benchmarks.studies.ablations [--only NAME ...] [--output results/ablations]

Everything runs through vLLM with method "hsd" on the target as trained
(not zero-padded): the figures are counts, not times, and so hold on a busy machine. Each row is the
mean over RUNS batches of the same prompts, +- their standard deviation. The number of drafts runs
on the reference engine, too, which can also draw them without replacement.

Columns: block efficiency (tokens per target call, prefill included), redundancy (share of drafted
tokens that were thrown away) and target utilization (target calls per token); the last two are
those of "Hierarchical Speculative Decoding with Dynamic Window", section "Further Discussion".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from benchmarks import plot
from benchmarks.columns import Table, counts
from benchmarks.common import ENGINE_ARGS, MODELS, RESULTS, options, prompts
from benchmarks.studies.configs import fixed
from vllm_hsd.tools.engine import EngineProcess

RUNS, PROMPTS, TOKENS = 6, 16, 96
# "Overcoming Joint Intractability with Lossless Hierarchical Speculative Decoding", Table 2.
DRAFTS = (1, 2, 4, 11)
SMALL, MID = {"model": str(MODELS / "small")}, {"model": str(MODELS / "mid")}


@dataclass
class Variant:
    """One curve: an engine, and the points at which it runs.

    Attributes:
        levels: as in the JSON.
        keys: further keys of the cascade.
        points: (x, draft_lengths or None for those of the levels, temperature).
        engine: further arguments of the engine.
    """

    name: str
    levels: list[dict]
    points: list[tuple[float, list[int] | None, float]]
    draft: int = 8
    keys: dict = field(default_factory=dict)
    engine: dict = field(default_factory=dict)


def lengths(*values: int) -> list[tuple[float, list[int], float]]:
    return [(n, [n], 1.0) for n in values]


def experiments() -> dict[str, tuple[str, list[Variant]]]:
    """Name -> (label of x, variants)."""
    entropy = {"stopping": "entropy"}
    once = [(8, None, 1.0)]
    temperatures = [(t, None, t) for t in (0.0, 0.3, 0.6, 0.8, 1.0, 1.2)]
    verifiers = ("block", "standard")
    single = [(n, [n], 1.0) for n in (4, 8, 12, 16)]
    stacked = [(n, [n, n], 1.0) for n in (4, 8, 12, 16)]
    small_below = {**SMALL, "num_tokens": 8}
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
        "early stopping": (
            "longest draft K",
            [
                Variant("fixed", [MID], single, 16),
                Variant("entropy", [{**MID, **entropy}], single, 16),
                Variant("fixed, two levels", [{**SMALL, "num_tokens": 16}, MID], stacked, 16),
                Variant(
                    "entropy, two levels",
                    [{**SMALL, "num_tokens": 16, **entropy}, {**MID, **entropy}],
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
                Variant("self-verify, small", [{**SMALL, **entropy}], once),
                Variant("self-verify, mid", [{**MID, **entropy}], once),
                Variant("pre-verify", [small_below, {**MID, "max_rounds": 1}], once),
                Variant(
                    "pre-verify and self-verify",
                    [{**small_below, **entropy}, {**MID, "max_rounds": 1}],
                    once,
                ),
                Variant(
                    "three stages (HSDDW)",
                    [{**small_below, **entropy}, {**MID, **entropy}],
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
        "horizontal cascade": (
            "draft length",
            [
                Variant(
                    f"{unverified} unverified tokens",
                    [{**SMALL, "num_tokens": 3}, MID],
                    once,
                    keys={"horizontal_tokens": unverified},
                )
                for unverified in (0, 2, 4)
            ],
        ),
        "number of drafts": (
            "drafts K",
            [
                Variant(
                    name,
                    [{**SMALL, "branches": count}],
                    [(count, None, 1.0)],
                    4,
                    {"verifier": verifier},
                    # Every further draft has a block of its own below the longest text.
                    {"block_size": 32, "max_model_len": 1024},
                )
                for name, verifier in (("traversal", "block"), ("token by token", "standard"))
                for count in DRAFTS
            ],
        ),
        "draft temperature, target at 0.6": (
            "draft temperature",
            [
                Variant("mid", [{**MID, "temperature_scale": t / 0.6}], [(t, None, 0.6)])
                for t in (0.5, 0.6, 0.7, 0.8)
            ],
        ),
    }


def measure(variant: Variant, texts: list[str], log: Path) -> Iterator[dict[str, Any]]:
    """One row per point."""
    cascade = fixed(*variant.levels, length=variant.draft, **variant.keys)
    engine_args = {
        **ENGINE_ARGS,
        **variant.engine,
        "model": str(MODELS / "target"),
        "speculative_config": cascade,
    }
    with EngineProcess(engine_args, variant.name, log=log) as engine:
        for x, draft_lengths, temperature in variant.points:
            if draft_lengths is not None:
                engine.select_levels(range(len(draft_lengths)), draft_lengths)
            runs = [engine.generate(texts, sampling(temperature)) for _ in range(RUNS)]
            yield {
                "configuration": variant.name,
                "x": x,
                "batch_size": len(texts),
                "temperature": temperature,
                "batches": len(runs),
                **counts(runs),
                "max_tokens": TOKENS,
            }


def sampling(temperature: float) -> list[dict[str, Any]]:
    """Sampling parameters of every prompt."""
    shared = {"temperature": temperature, "max_tokens": TOKENS, "ignore_eos": True}
    return [shared] * PROMPTS


def measure_number_of_drafts(texts: list[str]) -> Iterator[dict[str, Any]]:
    """Block efficiency with K drafts of four tokens on the reference engine."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from vllm_hsd.tools.reference import HuggingFaceLevel, ReferenceEngine, TreeOptions

    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    models = {n: AutoModelForCausalLM.from_pretrained(MODELS / n) for n in ("target", "small")}
    for draw in ("iid", "without_replacement"):
        for drafts in DRAFTS:
            engine = ReferenceEngine(
                HuggingFaceLevel(models["target"]),
                [HuggingFaceLevel(models["small"])],
                draft_tree=TreeOptions(widths=(drafts, 1, 1, 1), draw=draw),
            )
            results = [
                engine.generate(tokenizer(prompt).input_ids, TOKENS // 2, seed=i)
                for i, prompt in enumerate(texts[:8])
            ]
            efficiency = [result.block_efficiency for result in results]
            calls = sum(result.target_calls for result in results)
            tokens = sum(len(result.token_ids) for result in results)
            yield {
                "configuration": draw,
                "x": drafts,
                "temperature": 1.0,
                "block_efficiency": tokens / calls,
                "block_efficiency_sd": float(np.std(efficiency, ddof=1) / len(efficiency) ** 0.5),
                "target_utilization": calls / tokens,
                "generated_per_target_call": sum(result.drafted for result in results) / calls,
            }


def main() -> None:
    parser = options(__doc__, RESULTS / "ablations")
    parser.add_argument("--only", nargs="*", help="names of the ablations to run")
    chosen = parser.parse_args()
    texts = prompts(PROMPTS)
    found = {k: v for k, v in experiments().items() if not chosen.only or k in chosen.only}
    labels = {name: label for name, (label, _) in found.items()}
    jobs = [(name, variant) for name, (_, variants) in found.items() for variant in variants]
    rows = [
        {"group": name, **row}
        for name, variant in track(jobs, "ablations")
        for row in measure(variant, texts, chosen.output / "engine.log")
    ]
    drafts = "number of drafts (reference engine)"
    if not chosen.only or drafts in chosen.only:
        labels[drafts] = "drafts K"
        rows += [{"group": drafts, **row} for row in measure_number_of_drafts(texts)]
    table = Table(chosen.output / "ablations.csv")
    table.path.unlink(missing_ok=True)
    table.add(rows)
    plot.lines(
        rows,
        table.path.with_suffix(".png"),
        x="x",
        measures={"block_efficiency": "tokens per target call"},
        panel="group",
        error="block_efficiency_sd",
        wrap=2,
        labels=labels,
    )
    for row in rows:
        counts = f"{row['block_efficiency']:6.3f} +- {row['block_efficiency_sd']:.3f}"
        place = f"{row['x']:5g} temperature {row['temperature']:g}"
        print(f"{row['group']:36} {row['configuration']:28} {place} {counts}")


if __name__ == "__main__":
    main()
