"""Measured points of the map: the tiny family at several widenings, one engine each.

    python -m benchmarks.planner.cascade_points

Mid and target are zero-padded to several sizes (benchmarks/models/zero_pad.py), which changes their
costs and not their text. In one engine per widening, single drafters and cascades take turns on the
same prompts, and the best of each kind are compared; the planner predicts the same selections from
the times of these very runs and from acceptance measured once. Writes cascade_points.csv, a row
when it is done; points that the file has already are left out.
"""

import os

# One thread per engine: what is measured is then comparable on shared cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from typing import Any

import numpy as np

from benchmarks.columns import Table
from benchmarks.common import MODELS, RESULTS, options
from benchmarks.models.zero_pad import padded_to
from benchmarks.planner.check_predictions import (
    ENGINE,
    own_latencies,
    run_for_real,
    spent_and_emitted,
    summary,
)
from vllm_hsd.tools.planner.acceptance import Acceptances, measure_acceptance
from vllm_hsd.tools.planner.models import ModelSet
from vllm_hsd.tools.planner.predict import Measured, Selection, predict
from vllm_hsd.tools.planner.profile import Sampling
from vllm_hsd.tools.planner.prompts import encode, read_prompts
from vllm_hsd.tools.planner.survival import Acceptance
from vllm_hsd.tools.planner.task import Task, candidates
from vllm_hsd.tools.planner.timing import Timing

# Parameters of mid and target.
WIDENINGS = ((1e6, 300e6), (10e6, 300e6), (30e6, 300e6), (10e6, 100e6))
SINGLES = [
    Selection((level,), (length,))
    for level, lengths in ((0, (3, 6, 9, 12)), (1, (4, 8, 12)))
    for length in lengths
]
PAIRS = [Selection((0, 1), lengths) for lengths in ((2, 6), (4, 8), (4, 12), (7, 8), (11, 12))]
MAX_DRAFT = 12


def padded(name: str, params: float) -> str:
    """A model of the family at the cost of `params` parameters."""
    return str(MODELS / name if params <= 1e6 else padded_to(MODELS / name, params))


def deviations(group: list[dict]) -> np.ndarray:
    """[prompts] each prompt's part in the relative error of ms per token; answers are paired."""
    spent, emitted = spent_and_emitted(group)
    return spent / spent.sum() - emitted / emitted.sum()


def point(
    mid_params: float, target_params: float, found: Acceptances, task: Task, timing: Timing
) -> dict[str, Any]:
    """A row: costs, rates, and the best cascade over the best single drafter."""
    every = [*SINGLES, *PAIRS]
    groups, _ = run_for_real(every, timing, len(timing.prompts))
    latencies = own_latencies(timing, groups)
    measured = Measured(latencies, Acceptance(found.tables["block"]))
    real = [summary(group, 1) for group in groups[:-1]]
    predicted = [
        predict(each, measured, output_tokens=task.text_tokens).ms_per_token for each in every
    ]
    of_single = range(len(SINGLES))
    of_pair = range(len(SINGLES), len(every))
    single = min(of_single, key=lambda i: real[i][0])
    pair = min(of_pair, key=lambda i: real[i][0])
    target_ms = latencies.call(-1, "target", 1, 1)
    mid_ms = latencies.call(1, "verify", 1, 1)
    ratio = real[single][0] / real[pair][0]
    return {
        "mid_parameters": int(mid_params),
        "target_parameters": int(target_params),
        "mid_cost": mid_ms / target_ms,
        "small_cost": latencies.call(0, "draft", 1, 1) / mid_ms,
        "target_slope": (latencies.call(-1, "target", 1, 9) / target_ms - 1) / 8,
        "mid_at_target": float(found.rates[2, 1]),
        "small_at_mid": float(found.rates[1, 0]),
        "small_at_target": float(found.rates[2, 0]),
        "best_single": f"{('small', 'mid')[every[single].levels[0]]} "
        f"{every[single].draft_lengths[0]}",
        "single_ms_per_token": real[single][0],
        "best_cascade": "small {} > mid {}".format(*every[pair].draft_lengths),
        "cascade_ms_per_token": real[pair][0],
        "plain_ms_per_token": latencies.call(-1, "plain", 1, 1),
        "measured_ratio": ratio,
        "standard_error": ratio
        * float(np.linalg.norm(deviations(groups[single]) - deviations(groups[pair]))),
        "predicted_ratio": min(predicted[i] for i in of_single)
        / min(predicted[i] for i in of_pair),
        "largest_difference": max(abs(p / r[0] - 1) for p, r in zip(predicted, real, strict=True)),
    }


def main() -> None:
    parser = options(__doc__, RESULTS / "planner")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    plain = candidates(models=[str(MODELS / name) for name in ("small", "mid")])
    models = ModelSet(str(MODELS / "target"), plain)
    texts = read_prompts(MODELS / "prompts.jsonl")
    contexts = [encode(models.tokenizer, text, 256) for text in texts]
    settings: dict[str, Any] = {
        "sampling": Sampling(temperature=1.0),
        "max_draft_tokens": MAX_DRAFT,
        "text_tokens": args.tokens,
        "engine_args": ENGINE,
        "clock": "cpu",
    }
    task = Task(str(MODELS / "target"), plain, **settings)
    found = measure_acceptance(models, contexts, task)
    vocabulary = models.vocabulary
    del models
    table = Table(args.output / "cascade_points.csv")
    for mid_params, target_params in WIDENINGS:
        if table.has(mid_parameters=int(mid_params), target_parameters=int(target_params)):
            continue
        wide = candidates(models=[str(MODELS / "small"), padded("mid", mid_params)])
        task = Task(padded("target", target_params), wide, **settings)
        timing = Timing(task, contexts[: args.prompts], vocabulary, args.output)
        row = point(mid_params, target_params, found, task, timing)
        print({k: f"{v:.3g}" if isinstance(v, float) else v for k, v in row.items()})
        table.add([row], tuple(row))


if __name__ == "__main__":
    main()
