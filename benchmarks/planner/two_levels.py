"""Best cascade of two drafters against the best single one, by relative costs and acceptance.

Independent acceptance, constant or linearly rising costs; both sides are optimal over their draft
lengths, and both are predicted by the planner's exact predictor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_hsd.tools.planner.latencies import Latencies, LatencyTable
from vllm_hsd.tools.planner.optimize import measured_graph, solve
from vllm_hsd.tools.planner.predict import Measured, Selection, predict
from vllm_hsd.tools.planner.survival import Acceptance, independent_survival

MAX_DRAFT = 24
# Candidates by the graph's cost that the exact predictor decides between.
KEPT = 4
# Share of the sum of two models' disagreements that remains between the outer ones: the tiny
# family's 1 - .810 over (1 - .869) + (1 - .863), benchmarks/models/overlaps.csv.
COINCIDING = 0.71


def small_at_target(mid_at_target: float, small_at_mid: float, share: float = COINCIDING) -> float:
    """Acceptance of the small model's tokens by the target, from the two pairs around the mid.

    Args:
        share: 1 for the lowest that the triangle inequality of total variation allows.
    """
    outer, inner = 1 - mid_at_target, 1 - small_at_mid
    return 1 - min(1.0, max(share * (outer + inner), abs(outer - inner)))


@dataclass(frozen=True)
class Drafters:
    """A small and a mid drafter of a target whose forward pass of one token costs 1.

    Attributes:
        mid_cost: of a forward pass of the mid model.
        small_cost: of the small one, over the mid model's.
        mid_at_target, small_at_mid, small_at_target: acceptance rates.
        slope: what each further token adds to a forward pass of any model, over its cost.
    """

    mid_cost: float
    small_cost: float
    mid_at_target: float
    small_at_mid: float
    small_at_target: float
    slope: float = 0.0

    def measured(self, max_draft: int = MAX_DRAFT) -> Measured:
        """Input of the planner: the small model is 0, the mid one 1."""
        rates = np.zeros((3, 3))
        rates[1, 0], rates[2, 0] = self.small_at_mid, self.small_at_target
        rates[2, 1] = self.mid_at_target
        costs = (self.small_cost * self.mid_cost, self.mid_cost, 1.0)
        tables = [
            LatencyTable(batch_sizes=[1], tokens=[1, 2], ms=[[cost, cost * (1 + self.slope)]])
            for cost in costs
        ]
        return Measured(
            Latencies(forward=tables), Acceptance(independent_survival(rates, max_draft))
        )


@dataclass(frozen=True)
class Gain:
    """Time per token over the target's alone is 1 / speedup.

    Attributes:
        single, pair: the best of either kind, with its speed-up over no speculation.
    """

    single: Selection
    single_speedup: float
    pair: Selection
    pair_speedup: float

    @property
    def ratio(self) -> float:
        """Speed-up of the best cascade over the best single drafter."""
        return self.pair_speedup / self.single_speedup


def best(drafters: Drafters, max_draft: int = MAX_DRAFT) -> Gain:
    """The best single drafter and the best cascade of two, by the exact predictor."""
    measured = drafters.measured(max_draft)
    graph = measured_graph(measured, 1)

    def exactly(depth: int) -> tuple[float, Selection]:
        found = [selection for selection, _ in solve(graph, KEPT, depth, exactly=True)]
        return min(
            ((predict(s, measured).ms_per_token, s) for s in found if s.levels),
            key=lambda item: item[0],
        )

    (single_ms, single), (pair_ms, pair) = exactly(1), exactly(2)
    return Gain(single, 1 / single_ms, pair, 1 / pair_ms)
