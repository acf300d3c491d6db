"""From a profile to a cascade: search on the graph, then prediction of the best finds."""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_hsd.errors import UserError
from vllm_hsd.tools.planner.optimize import Graph, measured_graph, solve
from vllm_hsd.tools.planner.predict import Measured, Prediction, Selection, predict
from vllm_hsd.tools.planner.profile import Profile
from vllm_hsd.tools.planner.survival import Verifier

# The graph ignores uncached tokens and takes a batch's requests to be alike: what it ranks within
# this factor of its best is predicted.
CLOSE = 1.1
# At most so many cascades per depth are predicted.
KEPT = 8
# Candidates whose best cascade is shown next to the chosen one.
SHOWN = 8


@dataclass(frozen=True)
class Constraints:
    """What a cascade is chosen for.

    Attributes:
        batch: requests per step.
        max_levels: most drafters; None: any number.
        max_draft_tokens: longest draft of any level; None: as long as the profile covers.
        output_tokens: tokens per request; None: endless text.
    """

    batch: int = 1
    max_levels: int | None = None
    max_draft_tokens: int | None = None
    verifier: Verifier = "block"
    output_tokens: int | None = None


@dataclass(frozen=True)
class Plan:
    """The best cascade, and the best of each kind that lost.

    Attributes:
        best: the fastest cascade.
        none: no speculation.
        single: the best single drafter.
        others: (what it is, prediction) of further losers, best of its kind.
    """

    constraints: Constraints
    best: Prediction
    none: Prediction
    single: Prediction
    others: tuple[tuple[str, Prediction], ...]


class Search:
    """Predictions and the choice for one profile under some constraints.

    Attributes:
        seconds: spent so far on building the graph, on solving it, and on exact predictions.

    Raises:
        UserError: a profile without latencies, or constraints that it cannot meet.
    """

    def __init__(self, profile: Profile, constraints: Constraints):
        if profile.latencies is None:
            raise UserError(
                "the profile holds no latencies: run `vllm-hsd profile` on a CPU, without "
                "--skip-timing; on a GPU compare cascades by `vllm-hsd bench`."
            )
        self.profile, self.constraints = profile, constraints
        longest = profile.max_draft_tokens
        self.size = longest if (given := constraints.max_draft_tokens) is None else given
        if not 1 <= self.size <= longest:
            raise UserError(
                f"--max-draft-tokens is {self.size}, but the profile covers 1 to {longest} tokens."
            )
        batch, measured = constraints.batch, profile.latencies.batch_sizes()
        if batch < 1:
            raise UserError(f"--batch-sizes has {batch}: a batch holds at least 1 request.")
        if batch not in measured:
            raise UserError(
                f"batch size {batch} was not measured, only "
                f"{', '.join(map(str, measured)) or 'none in common'}: profile again with "
                f"--batch-sizes {batch}."
            )
        if constraints.max_levels is not None and constraints.max_levels < 1:
            raise UserError(f"--max-levels is {constraints.max_levels}: allow at least 1 level.")
        self.measured = Measured(
            profile.latencies,
            profile.acceptance(constraints.verifier).shortened(self.size),
            frozenset(i for i, c in enumerate(profile.candidates) if not c.level.keeps_cache),
            frozenset(i for i, c in enumerate(profile.candidates) if c.level.reads_target_states),
        )
        self.seconds = dict.fromkeys(("graph", "search", "predictions"), 0.0)
        with self._timed("graph"):
            self.graph = measured_graph(self.measured, batch)

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - began

    def predict(self, selection: Selection) -> Prediction:
        """One cascade under the constraints."""
        batch, tokens = self.constraints.batch, self.constraints.output_tokens
        with self._timed("predictions"):
            return predict(selection, self.measured, batch=batch, output_tokens=tokens)

    def choose(self) -> Plan:
        """Search, predict what comes close, and keep the best of every kind."""
        nodes, limit = len(self.graph.order), self.constraints.max_levels
        deepest = nodes if limit is None else min(nodes, limit)
        found: dict[Selection, Prediction] = {}
        time_of = operator.attrgetter("ms_per_token")

        def best_of(selections: list[Selection]) -> Prediction | None:
            for selection in selections:
                if selection not in found:
                    found[selection] = self.predict(selection)
            return min((found[s] for s in selections), key=time_of, default=None)

        none = self.predict(Selection((), ()))
        by_depth: list[tuple[str, Prediction]] = []
        for depth in range(1, deepest + 1):
            option = best_of(self._near_best(self.graph, depth, exactly=True))
            if option is None:
                break
            by_depth.append((f"best of {depth} levels", option))
            if time_of(option) > CLOSE * min(time_of(other) for _, other in by_depth):
                break  # of what is deeper, only the graph's own best is predicted
        best_of(self._near_best(self.graph, deepest))
        using = []
        for node in self.graph.best_singles()[:SHOWN]:
            selections = self._near_best(self.graph.through(node), deepest, kept=2)
            if option := best_of(selections):
                name = self.profile.candidates[self.graph.order[node]].name
                using.append((f"best with {name}", option))
        best = min([none, *found.values()], key=time_of)
        singles = [option for option in found.values() if len(option.selection.levels) == 1]
        single = min(singles, key=time_of)
        others = {each.selection: (name, each) for name, each in [*using[::-1], *by_depth[:0:-1]]}
        for option in (best, none, single):
            others.pop(option.selection, None)
        listed = sorted(others.values(), key=lambda other: time_of(other[1]))
        return Plan(self.constraints, best, none, single, tuple(listed))

    def _near_best(
        self, graph: Graph, depth: int, kept: int = KEPT, exactly: bool = False
    ) -> list[Selection]:
        with self._timed("search"):
            every = solve(graph, kept, depth, exactly=exactly)
        found = [(selection, cost) for selection, cost in every if selection.levels]
        return [selection for selection, cost in found if cost <= CLOSE * found[0][1]]
