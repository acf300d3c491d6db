"""Pictures of a plan, each with its numbers as CSV beside it."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_hsd.errors import UserError
from vllm_hsd.planner.plan import Choice, Planner, landscape


def plot_plan(planner: Planner, choice: Choice, folder: Path) -> list[Path]:
    """Draw the latency landscape and the rate matrix; returns the files written.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise UserError("--plot needs matplotlib: pip install 'vllm-hsd[bench]'.") from None
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    return [
        *_landscape(planner, choice, folder / f"latency-batch{choice.wanted.batch}.png"),
        *_rates(planner, folder / "rates.png"),
    ]


def _landscape(planner: Planner, choice: Choice, path: Path) -> list[Path]:
    """ms/token over the top budget: every single drafter, and the best pair."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    rows = []
    lines = [(int(model),) for model in planner.order]
    pairs = [o for o in (choice.best, *(o for _, o in choice.others)) if len(o.cascade.levels) == 2]
    if pairs:
        lines.append(min(pairs, key=lambda option: option.ms).cascade.levels)
    for levels in lines:
        best: dict[int, tuple[float, tuple[int, ...]]] = {}
        for draft_lengths, option in landscape(planner, levels):
            best[draft_lengths[-1]] = min(
                best.get(draft_lengths[-1], (np.inf, ())), (option.ms, draft_lengths)
            )
        name = " > ".join(planner.profile.candidates[level].name for level in levels)
        rows += [
            (name, *map(str, (top, draft_lengths, ms))) for top, (ms, draft_lengths) in best.items()
        ]
        axes.plot(list(best), [ms for ms, _ in best.values()], marker="o", label=name)
    axes.axhline(choice.none.ms, color="grey", linestyle="--", label="no speculation")
    axes.plot(
        choice.best.cascade.draft_lengths[-1:], [choice.best.ms][: len(choice.best.cascade.draft_lengths)],
        marker="*", markersize=16, color="black", linestyle="", label="chosen",
    )  # fmt: skip
    axes.set_xlabel("tokens that the target verifies per call")
    axes.set_ylabel("predicted ms per token")
    axes.set_title(f"{planner.profile.names[-1]}, batch size {choice.wanted.batch}")
    axes.legend(fontsize="small")
    _save(figure, path)
    table = path.with_suffix(".csv")
    _write(table, ["levels", "num_speculative_tokens", "draft_lengths", "ms_per_token"], rows)
    return [path, table]


def _rates(planner: Planner, path: Path) -> list[Path]:
    import matplotlib.pyplot as plt

    names, rates = planner.profile.names, planner.profile.rate_matrix()
    figure, axes = plt.subplots(figsize=(1.5 + 0.7 * len(names),) * 2)
    axes.imshow(rates, vmin=0, vmax=1, cmap="Blues")
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(names)), names)
    if len(names) <= 16:
        for (i, j), rate in np.ndenumerate(rates):
            axes.text(j, i, f"{rate:.2f}", ha="center", va="center", color="black")
    axes.set_title("acceptance rates")
    _save(figure, path)
    table = path.with_suffix(".csv")
    _write(table, ["", *names], [(name, *row) for name, row in zip(names, rates, strict=True)])
    return [path, table]


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _write(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(header)
        writer.writerows(rows)
