"""Latency landscape of a profile: predicted ms per token by the draft that the target verifies.

Every single drafter, and the best pair.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from benchmarks.common import write_csv
from vllm_hsd.planner.predict import Selection
from vllm_hsd.planner.search import Option, Search


def landscape(search: Search, levels: tuple[int, ...]) -> list[Option]:
    """Predictions of given levels, cheapest first, with all draft lengths that can be run."""
    return [
        Option(selection, search.predict(selection))
        for lengths in itertools.combinations(range(1, search.size + 1), len(levels))
        for selection in [Selection(levels, lengths)]
    ]


def plot_landscape(search: Search, directory: Path) -> None:
    """Write landscape.png and landscape.csv."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    profile, choice = search.profile, search.choose()
    lines = [(candidate,) for candidate in search.graph.order]
    options = [choice.best, *(option for _, option in choice.others)]
    if pairs := [option for option in options if len(option.selection.levels) == 2]:
        lines.append(min(pairs, key=lambda option: option.ms).selection.levels)
    figure, axes = plt.subplots(figsize=(7, 4.5))
    rows = []
    for levels in lines:
        best: dict[int, tuple[float, tuple[int, ...]]] = {}
        for option in landscape(search, levels):
            lengths = option.selection.draft_lengths
            best[lengths[-1]] = min(best.get(lengths[-1], (np.inf, ())), (option.ms, lengths))
        name = " > ".join(profile.candidates[level].name for level in levels)
        rows += [
            {
                "levels": name,
                "num_speculative_tokens": top,
                "draft_lengths": " ".join(map(str, lengths)),
                "ms_per_token": ms,
            }
            for top, (ms, lengths) in best.items()
        ]
        axes.plot(list(best), [ms for ms, _ in best.values()], marker="o", label=name)
    axes.axhline(choice.none.ms, color="gray", linestyle="--", label="no speculation")
    axes.set_xlabel("tokens that the target verifies per step")
    axes.set_ylabel("predicted ms per token")
    axes.set_title(f"{profile.names[-1]}, batch size {search.constraints.batch}")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(directory / "landscape.png", dpi=120)
    plt.close(figure)
    write_csv(directory / "landscape.csv", rows)
