"""When does a cascade pay? The map, and what is published, placed on it.

    python -m benchmarks.planner.cascade_map

Writes cascade_map.csv and .png: speed-up of the best cascade of two drafters over the best single
one by the mid model's cost, the small one's, and their acceptance; and cascade_published.csv: what
papers say, with what the map says where they give enough. docs/when-cascades-pay.md reads them.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq

from benchmarks.common import RESULTS, options, write_csv
from benchmarks.planner.two_levels import Drafters, best, small_at_target
from benchmarks.plot import saved_figure

# Costs of the mid model over the target's, and of the small model over the mid one's.
MID_COSTS = np.geomspace(0.02, 0.6, 12)
SMALL_COSTS = np.geomspace(0.01, 0.9, 12)
MID_AT_TARGET = (0.7, 0.8, 0.9)
SMALL_AT_MID = (0.4, 0.6, 0.8)
# What each further token adds to a forward pass: nothing on a memory-bound machine, and about what
# a compute-bound CPU took (59 ms over 9 tokens, 37 over one: benchmarks/notes).
SLOPES = (0.0, 0.07)
X_TICKS, Y_TICKS = (0.02, 0.05, 0.1, 0.2, 0.5), (0.01, 0.03, 0.1, 0.3, 0.9)


@dataclass(frozen=True)
class Published:
    """A cascade of a paper.

    Attributes:
        ratio: its speed-up over the paper's best single drafter.
        mid_cost, small_cost: as in `Drafters`; None where the paper gives nothing to infer it from.
        mid_at_target, small_at_target: acceptance rates, likewise.
        basis: where the figures stand, and how costs and rates follow.
    """

    name: str
    ratio: float
    basis: str
    mid_cost: float | None = None
    small_cost: float | None = None
    mid_at_target: float | None = None
    small_at_target: float | None = None


def rate_of(accepted: float, drafted: float) -> float:
    """Independent acceptance rate at which so many of a mean draft length are accepted."""
    whole = int(drafted)

    def excess(rate: float) -> float:
        sums = sum(rate**t for t in range(1, whole + 1))
        return sums + (drafted - whole) * rate ** (whole + 1) - accepted

    return float(brentq(excess, 1e-6, 1 - 1e-9))


def single_drafter(utilization: float, redundancy: float, speedup: float) -> tuple[float, float]:
    """(cost of a draft token, acceptance rate) of a paper's run with one drafter.

    With eta target calls per token and a share sigma of drafts thrown away, a target call accepts
    1 / eta - 1 of (1 / eta - 1) / (1 - sigma) drafts, and speedup = 1 / (eta (1 + drafts * cost)).
    """
    accepted = 1 / utilization - 1
    drafted = accepted / (1 - redundancy)
    return (1 / (speedup * utilization) - 1) / drafted, rate_of(accepted, drafted)


def published() -> list[Published]:
    """The papers' cascades over their own best single drafters."""
    gsp = "Fast Inference via Hierarchical Speculative Decoding"
    window = "Hierarchical Speculative Decoding with Dynamic Windows"
    layers = f"{gsp}, Table 3; costs: layers that run"
    found = [
        Published("LayerSkip 7B, layers 7, 9 of 32", 1.76 / 1.62, layers, 9 / 32, 7 / 9),
        Published("LayerSkip 13B, layers 7, 18 of 40", 1.41 / 1.20, layers, 18 / 40, 7 / 18),
        Published("LayerSkip 70B, layers 7, 23 of 80", 1.77 / 1.58, layers, 23 / 80, 7 / 23),
        Published("Gemma2 9B CNN-DM, layers 0, 2 of 42", 1.06 / 1.03, f"{gsp}, Table 3"),
        Published("Gemma2 9B XSUM, layers 0, 1 of 42", 1.15 / 1.08, f"{gsp}, Table 3"),
        Published("T5-XXL, Max-Gram below base, GSM8K, T=1", 3.68 / 3.44, f"{gsp}, Table 4"),
        Published("T5-XXL, Max-Gram below base, MMLU, T=1", 4.06 / 3.61, f"{gsp}, Table 4"),
    ]
    mid_cost, mid_rate = single_drafter(0.1442, 0.3987, 2.40)
    small_cost, small_rate = single_drafter(0.4930, 0.8969, 1.69)
    for name, speedup in (("both verifications", 2.69), ("dynamic windows", 2.95)):
        found.append(
            Published(
                f"Llama-2 70B, 7B, 68M, {name}",
                speedup / 2.40,
                f"{window}, Table 4; costs and rates inferred from it",
                mid_cost,
                small_cost / mid_cost,
                mid_rate,
                small_rate,
            )
        )
    return found


def on_the_map(each: Published) -> dict[str, Any]:
    """A row; predicted at both ends of what small_at_mid may be where it is not published."""
    row: dict[str, Any] = {
        "family": each.name,
        "published_ratio": each.ratio,
        "mid_cost": each.mid_cost,
        "small_cost": each.small_cost,
        "mid_at_target": each.mid_at_target,
        "small_at_target": each.small_at_target,
        "predicted_low": None,
        "predicted_high": None,
        "basis": each.basis,
    }
    rates = each.mid_at_target, each.small_at_target
    costs = each.mid_cost, each.small_cost
    if None not in (*rates, *costs):
        mid, small = rates
        # Total variation obeys the triangle inequality.
        ends = max(mid + small - 1, 0.0), 1 - abs(mid - small)
        gains = [best(Drafters(*costs, mid, end, small)).ratio for end in ends]
        row["predicted_low"], row["predicted_high"] = min(gains), max(gains)
    return row


def cells(mid_costs=MID_COSTS, small_costs=SMALL_COSTS) -> list[dict[str, Any]]:
    """The map, a row for every cell."""
    rows = []
    for slope, a, b, c, s in itertools.product(
        SLOPES, MID_AT_TARGET, SMALL_AT_MID, mid_costs, small_costs
    ):
        outer = small_at_target(a, b)
        found = best(Drafters(float(c), float(s), a, b, outer, slope))
        rows.append(
            {
                "slope": slope,
                "mid_at_target": a,
                "small_at_mid": b,
                "small_at_target": outer,
                "mid_cost": float(c),
                "small_cost": float(s),
                "best_single": ("small", "mid")[found.single.levels[0]],
                "single_draft_length": found.single.draft_lengths[0],
                "single_speedup": found.single_speedup,
                "cascade_draft_lengths": " ".join(map(str, found.pair.draft_lengths)),
                "cascade_speedup": found.pair_speedup,
                "ratio": found.ratio,
            }
        )
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """A panel for every pair of acceptance rates."""
    with saved_figure(path, 11, 9.5) as figure:
        axes = figure.subplots(len(MID_AT_TARGET), len(SMALL_AT_MID), sharex=True, sharey=True)
        for (i, a), (j, b) in itertools.product(enumerate(MID_AT_TARGET), enumerate(SMALL_AT_MID)):
            axis = axes[i, j]
            grids = [_grid(rows, slope, a, b) for slope in SLOPES]
            x, y, ratio = grids[0]
            levels = [0.6, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.3, 1.5]
            shown = axis.contourf(x, y, ratio, levels, cmap="RdBu", norm=_norm(), extend="both")
            axis.contour(x, y, ratio, [1.0], colors="black")
            axis.contour(x, y, grids[1][2], [1.0], colors="black", linestyles="dashed")
            axis.set(xscale="log", yscale="log")
            axis.set_xticks(X_TICKS, [f"{tick:g}" for tick in X_TICKS])
            axis.set_yticks(Y_TICKS, [f"{tick:g}" for tick in Y_TICKS])
            axis.minorticks_off()
            axis.set_title(f"acceptance: mid {a:g}, small by mid {b:g}", fontsize="medium")
        for axis in axes[-1]:
            axis.set_xlabel("cost of mid / target")
        for axis in axes[:, 0]:
            axis.set_ylabel("cost of small / mid")
        figure.colorbar(shown, ax=axes, label="best cascade / best single drafter", shrink=0.7)


def _grid(rows: list[dict[str, Any]], slope: float, a: float, b: float):
    panel = [
        row
        for row in rows
        if (row["slope"], row["mid_at_target"], row["small_at_mid"]) == (slope, a, b)
    ]
    x = sorted({row["mid_cost"] for row in panel})
    y = sorted({row["small_cost"] for row in panel})
    at = {(row["mid_cost"], row["small_cost"]): row["ratio"] for row in panel}
    return x, y, np.array([[at[c, s] for c in x] for s in y])


def _norm():
    from matplotlib.colors import TwoSlopeNorm

    return TwoSlopeNorm(1.0, 0.6, 1.5)


def main() -> None:
    args = options(__doc__, RESULTS / "planner").parse_args()
    rows = cells()
    write_csv(args.output / "cascade_map.csv", rows)
    plot(rows, args.output / "cascade_map.png")
    families = [on_the_map(each) for each in published()]
    write_csv(args.output / "cascade_published.csv", families)
    for row in families:
        predicted = ""
        if row["predicted_low"] is not None:
            predicted = f", the map says {row['predicted_low']:.2f} to {row['predicted_high']:.2f}"
        print(f"{row['family']}: published {row['published_ratio']:.2f}{predicted}")
    print(f"wrote {args.output}/cascade_map.csv, .png and cascade_published.csv")


if __name__ == "__main__":
    main()
