"""Predicted time per token of a given cascade: exact for the algorithm as this package runs it.

A level that owes `want` tokens and has `have` asks the level below for
min(budget below, want - have - 1) tokens, so that the accepted ones and the corrected or bonus
token never overshoot; with nothing to ask for, its own forward yields one token. A forward runs
over the tokens that the model has not seen yet (`behind`: at least the last one) and the draft.
Acceptance in a round depends only on the pair of models and the draft's length; given that,
the expectation below is exact: a Markov chain over how far each level is behind.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_hsd.planner.costs import Costs
from vllm_hsd.planner.errors import PlannerError
from vllm_hsd.planner.optimize import gain_table

Floats = NDArray[np.float64]
Behind = tuple[int, ...]


@dataclass(frozen=True)
class Cascade:
    """Levels cheapest first, as indices of a profile's candidates.

    Attributes:
        levels: model index of each level; empty: no speculation.
        budgets: tokens that each level hands up; the last one is num_speculative_tokens.
        rounds: most rounds of each level per request from above; None: no limit. Level 0 has
            no rounds.
        tail: unverified tokens of level 0 after the top level's buffer.
        shares_target_kv: levels (positions in `levels`) that run on the target's own KV
            cache, hence never lag behind it.
    """

    levels: tuple[int, ...]
    budgets: tuple[int, ...]
    rounds: tuple[int | None, ...] = ()
    tail: int = 0
    shares_target_kv: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if len(self.levels) != len(self.budgets):
            raise PlannerError(
                f"a cascade of {len(self.levels)} levels needs as many budgets, "
                f"not {len(self.budgets)}."
            )
        if any(budget < 1 for budget in self.budgets) or self.tail < 0:
            raise PlannerError("budgets must be at least 1 and the tail at least 0.")

    def limit(self, level: int) -> int | None:
        """Most rounds of a level, None for any number."""
        return self.rounds[level] if self.rounds else None


@dataclass(frozen=True)
class Prediction:
    """What a step of the target costs and yields in the long run.

    Attributes:
        ms_per_token: milliseconds per emitted token of one request.
        tokens_per_step: block efficiency, bonus token included.
        ms_per_step: milliseconds of a target call with all that led to it.
        level_ms: share of `ms_per_step` spent in each level, the target last [K + 1].
        level_calls: forwards of each level per target call, the target last [K + 1].
        stderr: standard error of ms_per_token; 0 where the prediction is exact.
    """

    ms_per_token: float
    tokens_per_step: float
    ms_per_step: float
    level_ms: tuple[float, ...]
    level_calls: tuple[float, ...]
    stderr: float = 0.0


def target_gains(cascade: Cascade, survival: Floats) -> Floats:
    """P(a step emits g tokens | the top level handed up n), [n, g], the tail included.

    Args:
        survival: [M + 1 (verifier), M + 1 (drafter), T + 1 (n), T + 1 (t)], as from
            `recorded.visited_survival`; acceptance in the tail is taken as independent of
            acceptance in the buffer.
    """
    top = survival[-1, cascade.levels[-1]]
    if not cascade.tail:
        return gain_table(top)
    size, tail = cascade.budgets[-1], cascade.tail
    gains = np.zeros((size + 1, size + tail + 2))
    after = survival[-1, cascade.levels[0], tail, : tail + 1]
    for n in range(size + 1):
        alive = np.append(top[n, :n], top[n, n] * after)
        gains[n, 1 : len(alive) + 1] = alive - np.append(alive[1:], 0.0)
    return gains


def check_reach(cascade: Cascade, survival: Floats) -> None:
    """Refuse budgets beyond the measured drafts and levels that are never asked.

    Raises:
        PlannerError: names the budget and the fix.
    """
    longest = survival.shape[-1] - 1
    if max((*cascade.budgets, cascade.tail)) > longest:
        raise PlannerError(
            f"a budget of {max(cascade.budgets)} tokens is longer than the {longest} tokens "
            f"that the profile covers: profile again with a larger --max-tokens."
        )
    asked = cascade.budgets[-1]
    for level in reversed(range(len(cascade.levels) - 1)):
        asked = min(cascade.budgets[level], asked - 1)
        if asked < 1:
            raise PlannerError(
                f"level {level} would never draft, because the budgets {cascade.budgets} leave "
                f"the level above nothing to ask for: raise them towards the target."
            )


class _Chain:
    """Expected turns of one cascade at one batch size; `make` is memoised over its state."""

    def __init__(self, cascade: Cascade, costs: Costs, survival: Floats, batch: int):
        self.cascade = cascade
        self.depth = len(cascade.levels)
        self.gains = [
            gain_table(survival[above, below])
            for below, above in zip(cascade.levels, cascade.levels[1:], strict=False)
        ]
        self.target_gains = target_gains(cascade, survival)
        # A level is at most its whole step behind when it is next asked.
        longest = 2 * (sum(cascade.budgets) + cascade.tail) + 2
        self.turns = [
            costs.turns(model, "draft" if level == 0 else "verify", batch, longest)
            for level, model in enumerate(cascade.levels)
        ]
        self.target_turns = costs.turns(-1, "target", batch, longest)
        self.memo: dict[tuple[int, int, Behind], tuple[Floats, dict]] = {}

    def spent(self, level: int, ms: float, calls: float = 1.0) -> Floats:
        """[2, K + 1]: milliseconds and calls, all in one level."""
        out = np.zeros((2, self.depth + 1))
        out[:, level] = ms, calls
        return out

    def make(self, level: int, want: int, behind: Behind) -> tuple[Floats, dict]:
        """Expected [2, K + 1] (ms, calls) of making `want` tokens and {(made, behind): P}."""
        key = level, want, behind
        if key not in self.memo:
            self.memo[key] = (self._draft if level == 0 else self._verify)(*key)
        return self.memo[key]

    def _draft(self, level: int, want: int, behind: Behind) -> tuple[Floats, dict]:
        turns = self.turns[0]
        ms = turns[behind[0] - 1] + (want - 1) * turns[0]
        return self.spent(0, ms, want), {(want, (1,)): 1.0}

    def _verify(self, level: int, want: int, behind: Behind) -> tuple[Floats, dict]:
        total = self.spent(level, 0.0, 0.0)
        done: dict[tuple[int, Behind], float] = {}
        states = {(0, behind): 1.0}
        rounds = 0
        while states and rounds != self.cascade.limit(level):
            rounds += 1
            after: dict[tuple[int, Behind], float] = {}
            for (have, behind), chance in states.items():
                ask = min(self.cascade.budgets[level - 1], want - have - 1)
                below, drafts = self._ask(level - 1, ask, behind[:level])
                total += chance * below
                for (made, low), p in drafts.items():
                    turn = self.turns[level][behind[level] + made - 1]
                    total += self.spent(level, chance * p * turn, chance * p)
                    for kept in range(made + 1):
                        reached = have + kept + 1
                        state = reached, (*caught_up(low, made, kept), 1)
                        into = done if reached == want else after
                        share = chance * p * self.gains[level - 1][made, kept + 1]
                        if share:
                            into[state] = into.get(state, 0.0) + share
            states = after
        for state, chance in states.items():
            done[state] = done.get(state, 0.0) + chance
        return total, done

    def _ask(self, level: int, want: int, behind: Behind) -> tuple[Floats, dict]:
        if want == 0:
            return self.spent(level, 0.0, 0.0), {(0, behind): 1.0}
        return self.make(level, want, behind)

    def step(self, behind: Behind) -> tuple[Floats, float, dict[Behind, float]]:
        """One target call: expected [2, K + 1], tokens, and P of how far behind it leaves."""
        cascade, top = self.cascade, self.depth - 1
        spent, drafts = self.make(top, cascade.budgets[top], behind)
        total, tokens, after = spent.copy(), 0.0, {}
        for (made, low), p in drafts.items():
            if cascade.tail:
                spent, outcome = self.make(0, cascade.tail, low[:1])
                total += p * spent
                ((_, drafter),) = outcome
                low = (*drafter, *(lag + cascade.tail for lag in low[1:]))
            offered = made + cascade.tail
            turn = self.target_turns[offered]
            total += self.spent(self.depth, p * turn, p)
            for kept in range(offered + 1):
                share = p * self.target_gains[made, kept + 1]
                if share:
                    tokens += share * (kept + 1)
                    state = tuple(
                        1 if level in cascade.shares_target_kv else lag
                        for level, lag in enumerate(caught_up(low, offered, kept))
                    )
                    after[state] = after.get(state, 0.0) + share
        return total, tokens, after


def caught_up(behind: Behind, made: int, kept: int) -> Behind:
    """How far levels are behind once `kept` of `made` drafted tokens and one more stay.

    A level that was `lag` tokens behind the end of the draft has seen made - lag of them.
    """
    return tuple(max(lag + kept + 1 - made, 1) for lag in behind)


def predict(
    cascade: Cascade,
    costs: Costs,
    survival: Floats,
    *,
    batch: int = 1,
    output_tokens: int | None = None,
) -> Prediction:
    """Time per token of one cascade, exact under round-wise acceptance for batch size 1.

    At larger batch sizes the requests are taken to need equally many rounds; use
    `simulate.simulate` where they differ (a batch waits for its slowest request).

    Args:
        cascade: its model indices point into `costs.forward` and `survival`.
        costs: times, the target last.
        survival: [M + 1, M + 1, T + 1, T + 1], see `target_gains`.
        batch: requests per step.
        output_tokens: tokens per request; the last step's surplus is then not counted as
            emitted, and the first token counts as the prefill's. None: endless text.

    Raises:
        PlannerError: budgets beyond the table.
    """
    if not cascade.levels:
        ms = costs.turn(-1, "plain", batch, 1)
        return Prediction(ms, 1.0, ms, (ms,), (1.0,))
    check_reach(cascade, survival)
    chain = _Chain(cascade, costs, survival, batch)
    spent, tokens = _long_run(chain)
    ms_per_step = float(spent[0].sum())
    per_step = tokens
    if output_tokens is not None:
        gains = chain.target_gains
        offered = cascade.budgets[-1]
        per_step = (output_tokens - 1) / _steps(gains[offered], output_tokens - 1)
    return Prediction(
        ms_per_token=ms_per_step / per_step,
        tokens_per_step=per_step,
        ms_per_step=ms_per_step,
        level_ms=tuple(spent[0].tolist()),
        level_calls=tuple(spent[1].tolist()),
    )


def _long_run(chain: _Chain) -> tuple[Floats, float]:
    """Stationary means of a step: [2, K + 1] (ms, calls) and emitted tokens."""
    start = (1,) * chain.depth
    found = {start: 0}
    steps = []
    while len(steps) < len(found):
        behind = list(found)[len(steps)]
        spent, tokens, after = chain.step(behind)
        for state in after:
            found.setdefault(state, len(found))
        steps.append((spent, tokens, after))
    moves = np.zeros((len(steps), len(steps)))
    for row, (_, _, after) in enumerate(steps):
        for state, chance in after.items():
            moves[row, found[state]] += chance
    # pi (P - I) = 0 and sum pi = 1, in the least-squares sense.
    system = np.vstack([moves.T - np.eye(len(steps)), np.ones(len(steps))])
    wanted = np.append(np.zeros(len(steps)), 1.0)
    weights = np.linalg.lstsq(system, wanted, rcond=None)[0]
    spent = np.tensordot(weights, np.stack([step[0] for step in steps]), axes=1)
    return spent, float(weights @ [step[1] for step in steps])


def _steps(gain: Floats, wanted: int) -> float:
    """Expected steps until `wanted` tokens are emitted, by renewal."""
    need = np.zeros(wanted + 1)
    for have in range(1, wanted + 1):
        reach = min(len(gain) - 1, have)
        need[have] = 1.0 + gain[1 : reach + 1] @ need[have - reach : have][::-1]
    return float(need[wanted])
