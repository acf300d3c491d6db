"""What the theory's two assumptions change: acceptance that is independent, and calls of one price.

    python -m benchmarks.paper_tables.assumptions profile.json

Table 5 of "Fast Inference via Hierarchical Speculative Decoding": time per token of a hierarchy
with real or independent acceptance and real or constant costs, predicted from one profile, for the
best cascade of every depth. "Independent" accepts each token with the pair's mean rate; a
"constant" call costs what it takes at its full length, whatever is left to compute.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, options, write_csv
from vllm_hsd.tools.cli.plan import label
from vllm_hsd.tools.planner.latencies import Latencies, LatencyTable
from vllm_hsd.tools.planner.optimize import solve
from vllm_hsd.tools.planner.predict import Measured, Selection, predict
from vllm_hsd.tools.planner.profile import Profile, load_profile
from vllm_hsd.tools.planner.search import Constraints, Search
from vllm_hsd.tools.planner.survival import Acceptance, independent_survival


def independent(profile: Profile, acceptance: Acceptance) -> Acceptance:
    """Every model's drafts accepted with the pair's rate; lookups, which have none, as measured."""
    rates = [[0.0 if rate is None else rate for rate in row] for row in profile.rates]
    longest = acceptance.survival.shape[-1] - 1
    return dataclasses.replace(acceptance, survival=independent_survival(rates, longest))


def constant(measured: Measured, selection: Selection) -> Latencies:
    """Every call of a level at the price of its full length: a drafter's of one token."""
    lengths = [0, *selection.draft_lengths]
    forward = [LatencyTable(batch_sizes=[1], tokens=[1], ms=[[0.0]])] * len(
        measured.latencies.forward
    )
    for place, model in enumerate((*selection.levels, -1)):
        role = measured.role(place, model) if model >= 0 else "target"
        ms = measured.latencies.call(model, role, 1, lengths[place] + 1)
        forward[model] = LatencyTable(batch_sizes=[1], tokens=[1], ms=[[ms]])
    return Latencies(forward=forward)


def table(profile: Profile, deepest: int) -> Iterator[dict[str, Any]]:
    """A row for the best cascade of every depth: milliseconds per token in the four settings."""
    search = Search(profile, Constraints())
    real = search.measured
    assumed = independent(profile, real.acceptance)
    for depth in range(1, deepest + 1):
        found = [
            s for s, _ in solve(search.graph, 8, depth, exactly=True) if len(s.levels) == depth
        ]
        if not found:
            return
        best = min(found, key=lambda selection: search.predict(selection).ms_per_token)
        row: dict[str, Any] = {"cascade": label(profile, best)}
        for costs in ("real", "constant"):
            latencies = real.latencies if costs == "real" else constant(real, best)
            for name, acceptance in (("real", real.acceptance), ("independent", assumed)):
                given = Measured(latencies, acceptance, real.cacheless, real.reread)
                row[f"{name}_acceptance_{costs}_costs"] = predict(best, given).ms_per_token
        yield row


def main() -> None:
    parser = options(__doc__, RESULTS / "paper_tables")
    parser.add_argument("profile", type=Path, help="file of `vllm-hsd profile`")
    parser.add_argument("--deepest", type=int, default=4, help="most levels")
    chosen = parser.parse_args()
    rows = list(table(load_profile(chosen.profile), chosen.deepest))
    write_csv(chosen.output / "assumptions.csv", rows)
    for row in rows:
        print(*(f"{v:.2f}" if isinstance(v, float) else v for v in row.values()), sep="\t")


if __name__ == "__main__":
    main()
