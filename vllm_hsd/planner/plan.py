"""From a profile to a cascade: search on the graph, then exact prediction of the best finds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vllm_hsd.errors import UserError
from vllm_hsd.planner import optimize
from vllm_hsd.planner.latency import Cascade, Prediction, predict
from vllm_hsd.planner.optimize import Graph
from vllm_hsd.planner.profile import Profile
from vllm_hsd.planner.recorded import Verifier
from vllm_hsd.planner.simulate import Coins, simulate
from vllm_hsd.planner.theory import survival_table

Acceptance = Literal["recorded", "independent"]

# The graph knows no lag and takes a batch's requests to be alike: what it ranks within this
# factor of its best is predicted exactly.
CLOSE = 1.1
# At most so many plans per depth are predicted.
KEPT = 8
# Candidates whose best cascade is shown beside the chosen one.
SHOWN = 8
# Batches with rounds are simulated for so many steps in all.
SIMULATED = {"replicas": 300, "steps": 3}


@dataclass(frozen=True)
class Wanted:
    """What a plan is made for.

    Attributes:
        batch: requests per step.
        max_levels: most drafters; None: any number.
        max_budget: longest draft of any level; None: as long as the profile covers.
        verifier: how the target and the levels verify.
        acceptance: from recorded ratios, or independent with the mean rates.
        output_tokens: tokens per request; None: endless text.
    """

    batch: int = 1
    max_levels: int | None = None
    max_budget: int | None = None
    verifier: Verifier = "block"
    acceptance: Acceptance = "recorded"
    output_tokens: int | None = None


@dataclass(frozen=True)
class Option:
    """A cascade that was predicted."""

    cascade: Cascade
    prediction: Prediction

    @property
    def ms(self) -> float:
        return self.prediction.ms_per_token


@dataclass(frozen=True)
class Choice:
    """The best cascade, and the best of each kind that lost.

    Attributes:
        best: the fastest option.
        none: no speculation.
        single: the best single drafter.
        others: (what it is, option) of further losers, best of its kind.
    """

    wanted: Wanted
    best: Option
    none: Option
    single: Option
    others: tuple[tuple[str, Option], ...]


class Planner:
    """Predictions and searches for one profile and one purpose.

    Raises:
        UserError: a profile without costs, or a wish that it cannot serve.
    """

    def __init__(self, profile: Profile, wanted: Wanted):
        if profile.costs is None:
            raise UserError(
                "the profile holds no costs; run `vllm-hsd profile` where vLLM is installed."
            )
        self.profile, self.wanted, self.costs = profile, wanted, profile.costs
        size = profile.max_tokens if wanted.max_budget is None else wanted.max_budget
        if not 1 <= size <= profile.max_tokens:
            raise UserError(
                f"the largest budget is {size}, but the profile covers 1 to "
                f"{profile.max_tokens} tokens."
            )
        if wanted.batch < 1:
            raise UserError(f"the batch size is {wanted.batch}: it must be at least 1.")
        measured = self.costs.batch_sizes()
        if wanted.batch not in measured:
            raise UserError(
                f"batch size {wanted.batch} was not measured, only "
                f"{', '.join(map(str, measured)) or 'none in common'}: profile again with "
                f"--batch-sizes {wanted.batch}."
            )
        self.size = size
        if wanted.acceptance == "recorded":
            survival = profile.survival_tables(wanted.verifier)
        else:
            survival = survival_table(profile.rate_matrix(), profile.max_tokens)
        self.survival = survival[:, :, : size + 1, : size + 1, : size + 1]
        members = len(profile.candidates)
        draft = [self.costs.turn(i, "draft", wanted.batch, 1) for i in range(members)]
        self.order = np.argsort(draft, kind="stable")
        self.graph = self._graph(np.array(draft)[self.order])

    def _graph(self, draft: np.ndarray) -> Graph:
        order = np.append(self.order, len(self.order))
        roles = ["verify"] * len(self.order) + ["target"]
        verify = np.stack(
            [
                self.costs.turns(int(i), role, self.wanted.batch, self.size + 1)
                for i, role in zip(order, roles, strict=True)
            ]
        )
        plain = self.costs.turn(-1, "plain", self.wanted.batch, 1)
        survival = self.survival[np.ix_(order, order)]
        return optimize.build_graph(draft, verify, plain, survival, capped=True)

    def cascade(self, plan: optimize.Plan) -> Cascade:
        """A plan of the graph in terms of the profile's candidates."""
        levels = tuple(int(self.order[level]) for level in plan.levels)
        exits = (
            position
            for position, level in enumerate(levels)
            if self.profile.candidates[level].early_exit
        )
        return Cascade(levels, plan.draft_lengths, shares_target_kv=frozenset(exits))

    def predict(self, cascade: Cascade) -> Prediction:
        """Exact for one request, and for a batch without rounds; else by simulation."""
        wanted = self.wanted
        if wanted.batch == 1 or len(cascade.levels) < 2:
            return predict(
                cascade,
                self.costs,
                self.survival,
                batch=wanted.batch,
                output_tokens=wanted.output_tokens,
            )
        # The same coins for every plan, so that plans differ by themselves and not by luck.
        world = Coins(cascade, self.survival, np.random.default_rng(0))
        return simulate(cascade, self.costs, world, batch=wanted.batch, **SIMULATED)

    def choose(self) -> Choice:
        """Search, predict what comes close, and keep the best of every kind."""
        models = len(self.order)
        deepest = models if self.wanted.max_levels is None else min(models, self.wanted.max_levels)
        found: dict[Cascade, Option] = {}

        def best_of(plans: list[optimize.Plan]) -> Option | None:
            options = []
            for plan in plans:
                cascade = self.cascade(plan)
                if cascade not in found:
                    found[cascade] = Option(cascade, self.predict(cascade))
                options.append(found[cascade])
            return min(options, key=lambda option: option.ms, default=None)

        none = best_of([optimize.Plan((), (), 0.0)])
        by_depth = []
        for depth in range(1, deepest + 1):
            option = best_of(self._near_best(self.graph, depth, exactly=True))
            if option is None:
                break
            by_depth.append((f"best of {depth} levels", option))
            if option.ms > CLOSE * min(other.ms for _, other in by_depth):
                break  # of what is deeper, only the graph's own best is predicted
        best_of(self._near_best(self.graph, deepest))
        using = []
        for model in self._shown():
            plans = self._near_best(through(self.graph, model), deepest, kept=2)
            name = self.profile.candidates[self.order[model]].name
            if option := best_of(plans):
                using.append((f"best with {name}", option))
        if not by_depth:
            raise UserError(f"max_levels is {self.wanted.max_levels}: allow at least 1 level.")
        best = min(found.values(), key=lambda option: option.ms)
        singles = [option for option in found.values() if len(option.cascade.levels) == 1]
        single = min(singles, key=lambda option: option.ms)
        others, seen = [], {best.cascade, none.cascade, single.cascade}
        for name, option in [*by_depth[1:], *using]:
            if option.cascade not in seen:
                seen.add(option.cascade)
                others.append((name, option))
        others.sort(key=lambda other: other[1].ms)
        return Choice(self.wanted, best, none, single, tuple(others))

    def _near_best(
        self, graph: Graph, depth: int, kept: int = KEPT, exactly: bool = False
    ) -> list[optimize.Plan]:
        plans = optimize.solve(graph, k=kept, max_levels=depth, exactly=exactly)
        plans = [plan for plan in plans if plan.levels]
        return [p for p in plans if p.cost <= CLOSE * plans[0].cost]

    def _shown(self) -> Iterator[int]:
        """Graph indices of the candidates that do best on their own."""
        alone = self.graph.target_cost + self.graph.target_multiplier * self.graph.alone
        return iter(np.argsort(alone.min(1), kind="stable")[:SHOWN].tolist())


def through(graph: Graph, model: int) -> Graph:
    """The graph without the cascades that leave `model` out."""
    cost, alone = graph.cost.copy(), graph.alone.copy()
    target_cost = graph.target_cost.copy()
    cost[model + 1 :, :model] = np.inf
    alone[model + 1 :] = np.inf
    target_cost[:model] = np.inf
    return replace(graph, cost=cost, alone=alone, target_cost=target_cost, target_alone=np.inf)


def label(profile: Profile, cascade: Cascade) -> str:
    """For people: `small 3 > mid 8 > target`."""
    steps = [
        f"{profile.candidates[level].name} {budget}"
        for level, budget in zip(cascade.levels, cascade.draft_lengths, strict=True)
    ]
    return " > ".join([*steps, profile.names[-1]])


def why_slower(profile: Profile, option: Option, best: Option) -> str:
    """What costs an option more time per token than the best one."""
    times: dict[str, list[float]] = {}
    for column, this in enumerate((option, best)):
        prediction = this.prediction
        members = [*this.cascade.levels, len(profile.candidates)]
        for member, ms in zip(members, prediction.level_ms, strict=True):
            times.setdefault(profile.names[member], [0.0, 0.0])[column] += (
                ms * prediction.ms_per_token / prediction.ms_per_step
            )
    name, (here, there) = max(times.items(), key=lambda item: item[1][0] - item[1][1])
    text = f"{name} takes {here:.3g} ms/token (chosen: {there:.3g})"
    emitted = option.prediction.tokens_per_step, best.prediction.tokens_per_step
    if name == profile.names[-1] and emitted[0] < emitted[1]:
        text += f" and emits {emitted[0]:.2f} tokens per call (chosen: {emitted[1]:.2f})"
    return text


def cascade_file(profile: Profile, choice: Choice, source: Path) -> dict[str, Any]:
    """What the plugin reads from `{"method": "hsd", "cascade": "cascade.json"}`.

    The last level has no budget of its own: it fills num_speculative_tokens.
    """
    cascade, wanted = choice.best.cascade, choice.wanted
    levels = [profile.candidates[level].level() for level in cascade.levels]
    for level, budget in zip(levels[:-1], cascade.draft_lengths, strict=False):
        level["num_tokens"] = budget
    return {
        "schema": 1,
        "num_speculative_tokens": cascade.draft_lengths[-1],
        "levels": levels,
        "verifier": wanted.verifier,
        "planned_for": {
            "target": profile.target,
            "profile": str(source),
            "batch_size": wanted.batch,
            "temperature": profile.sampling.temperature,
            "top_p": profile.sampling.top_p,
            "ms_per_token": round(choice.best.ms, 4),
            "tokens_per_target_call": round(choice.best.prediction.tokens_per_step, 3),
            "speedup_over_none": round(choice.none.ms / choice.best.ms, 3),
            "speedup_over_single": round(choice.single.ms / choice.best.ms, 3),
            "machine": profile.machine,
            "versions": profile.versions,
        },
    }


def landscape(planner: Planner, levels: tuple[int, ...]) -> list[tuple[tuple[int, ...], Option]]:
    """Options of all draft_lengths for given levels, in the graph's order, that can be run."""
    exits = frozenset(
        i for i, level in enumerate(levels) if planner.profile.candidates[level].early_exit
    )
    found = []
    for draft_lengths in itertools.combinations(range(1, planner.size + 1), len(levels)):
        cascade = Cascade(levels, draft_lengths, shares_target_kv=exits)
        found.append((draft_lengths, Option(cascade, planner.predict(cascade))))
    return found
