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

from vllm_hsd.errors import UserError
from vllm_hsd.planner.costs import Costs
from vllm_hsd.planner.optimize import gain_table

Floats = NDArray[np.float64]
Behind = tuple[int, ...]


@dataclass(frozen=True)
class Cascade:
    """Levels cheapest first, as indices of a profile's candidates.

    Attributes:
        levels: model index of each level; empty: no speculation.
        draft_lengths: tokens that each level hands up.
        rounds: most rounds of each level per request from above; None: no limit. Level 0 has
            no rounds.
        tail: unverified tokens of level 0 after the top level's buffer; num_speculative_tokens
            is the top level's budget plus the tail.
        shares_target_kv: levels (positions in `levels`) that run on the target's own KV
            cache, hence never lag behind it.
    """

    levels: tuple[int, ...]
    draft_lengths: tuple[int, ...]
    rounds: tuple[int | None, ...] = ()
    tail: int = 0
    shares_target_kv: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if len(self.levels) != len(self.draft_lengths):
            raise UserError(
                f"a cascade of {len(self.levels)} levels needs as many draft_lengths, "
                f"not {len(self.draft_lengths)}."
            )
        if any(budget < 1 for budget in self.draft_lengths) or self.tail < 0:
            raise UserError("draft_lengths must be at least 1 and the tail at least 0.")

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


def target_gains(cascade: Cascade, survival: Floats) -> list[list[Floats]]:
    """P(a step emits g tokens) by length of the top level's buffer and of the tail.

    Args:
        survival: [M + 1 (verifier), M + 1 (drafter), T + 1 (budget), T + 1 (position),
            T + 1 (t)], as in `laws.Laws`; acceptance in the tail is taken as independent of
            acceptance in the buffer.

    Returns:
        gains[n][m][g] for n <= the top budget and m <= the tail, g = 0..n + m + 1.
    """
    top, drafter = survival[-1, cascade.levels[-1], :, 0], survival[-1, cascade.levels[0], :, 0]
    gains = []
    for n in range(cascade.draft_lengths[-1] + 1):
        gains.append([])
        for m in range(cascade.tail + 1):
            alive = np.append(top[n, : n + 1], top[n, n] * drafter[m, 1 : m + 1])
            gains[n].append(np.append(0.0, alive - np.append(alive[1:], 0.0)))
    return gains


def level_gains(cascade: Cascade, survival: Floats) -> list[Floats]:
    """P(a round gains g tokens | made, n drafted) of every level above the lowest, upwards.

    Returns float64 [T + 1 (tokens made before), T + 1 (n), T + 2 (g)] each.
    """
    pairs = zip(cascade.levels, cascade.draft_lengths, cascade.levels[1:], strict=False)
    return [gain_table(survival[above, below, budget]) for below, budget, above in pairs]


def check_reach(cascade: Cascade, survival: Floats) -> None:
    """Refuse draft_lengths beyond the measured drafts and levels that are never asked.

    Raises:
        UserError: names the budget and the fix.
    """
    longest = survival.shape[-1] - 1
    if max((*cascade.draft_lengths, cascade.tail)) > longest:
        raise UserError(
            f"a budget of {max(cascade.draft_lengths)} tokens is longer than the {longest} tokens "
            f"that the profile covers: profile again with a larger --max-draft-tokens."
        )
    asked = cascade.draft_lengths[-1]
    for level in reversed(range(len(cascade.levels) - 1)):
        asked = min(cascade.draft_lengths[level], asked - 1)
        if asked < 1:
            raise UserError(
                f"level {level} would never draft, because the draft_lengths {cascade.draft_lengths} leave "
                f"the level above nothing to ask for: raise them towards the target."
            )


class _Chain:
    """Expected turns of one cascade at one batch size; `make` is memoised over its state."""

    def __init__(self, cascade: Cascade, costs: Costs, survival: Floats, batch: int):
        self.cascade = cascade
        self.depth = len(cascade.levels)
        self.gains = [gains.tolist() for gains in level_gains(cascade, survival)]
        self.target_gains = [
            [gains.tolist() for gains in row] for row in target_gains(cascade, survival)
        ]
        # A level is at most its whole step behind when it is next asked.
        longest = 2 * (sum(cascade.draft_lengths) + cascade.tail) + 2
        self.turns = [
            costs.turns(model, "draft" if level == 0 else "verify", batch, longest).tolist()
            for level, model in enumerate(cascade.levels)
        ]
        self.target_turns = costs.turns(-1, "target", batch, longest).tolist()
        self.memo: dict[tuple[int, int, Behind], tuple[Floats, dict]] = {}

    def nothing(self) -> Floats:
        """[2, K + 1] zeros: milliseconds and calls of each level, the target last."""
        return np.zeros((2, self.depth + 1))

    def make(self, level: int, want: int, behind: Behind) -> tuple[Floats, dict]:
        """Expected [2, K + 1] (ms, calls) of making `want` tokens and {(made, behind): P}."""
        key = level, want, behind
        if key not in self.memo:
            if want == 0:
                self.memo[key] = self.nothing(), {(0, behind): 1.0}
            else:
                self.memo[key] = (self._draft if level == 0 else self._verify)(*key)
        return self.memo[key]

    def _draft(self, level: int, want: int, behind: Behind) -> tuple[Floats, dict]:
        turns = self.turns[0]
        total = self.nothing()
        total[:, 0] = turns[behind[0] - 1] + (want - 1) * turns[0], want
        return total, {(want, (1,)): 1.0}

    def _verify(self, level: int, want: int, behind: Behind) -> tuple[Floats, dict]:
        total = self.nothing()
        turns, gains = self.turns[level], self.gains[level - 1]
        done: dict[tuple[int, Behind], float] = {}
        states = {(0, behind): 1.0}
        rounds = 0
        while states and rounds != self.cascade.limit(level):
            rounds += 1
            after: dict[tuple[int, Behind], float] = {}
            for (have, behind), chance in states.items():
                ask = min(self.cascade.draft_lengths[level - 1], want - have - 1)
                below, drafts = self.make(level - 1, ask, behind[:level])
                total += chance * below
                for (made, low), p in drafts.items():
                    p *= chance
                    total[0, level] += p * turns[behind[level] + made - 1]
                    total[1, level] += p
                    for kept in range(made + 1):
                        state = have + kept + 1, (*caught_up(low, made, kept), 1)
                        into = done if state[0] == want else after
                        if share := p * gains[have][made][kept + 1]:
                            into[state] = into.get(state, 0.0) + share
            states = after
        for state, chance in states.items():
            done[state] = done.get(state, 0.0) + chance
        return total, done

    def step(self, behind: Behind, want: int) -> tuple[Floats, dict[tuple[int, Behind], float]]:
        """One target call on `want` drafted tokens: expected [2, K + 1] and {(emitted, behind): P}.

        As in the cascade, the tail gives way to the top level's buffer down to one token of it.
        """
        cascade, top = self.cascade, self.depth - 1
        buffer = max(want - cascade.tail, 1) if want else 0
        spent, drafts = self.make(top, buffer, behind)
        total, after = spent.copy(), {}
        for (made, low), p in drafts.items():
            tail = min(want - made, cascade.tail)
            if tail:
                spent, ((_, drafter),) = self.make(0, tail, low[:1])
                total += p * spent
                low = (*drafter, *(lag + tail for lag in low[1:]))
            offered = made + tail
            total[0, -1] += p * self.target_turns[offered]
            total[1, -1] += p
            for kept in range(offered + 1):
                if share := p * self.target_gains[made][tail][kept + 1]:
                    lags = caught_up(low, offered, kept)
                    if cascade.shares_target_kv:
                        lags = tuple(
                            1 if level in cascade.shares_target_kv else lag
                            for level, lag in enumerate(lags)
                        )
                    state = kept + 1, lags
                    after[state] = after.get(state, 0.0) + share
        return total, after


def caught_up(behind: Behind, made: int, kept: int) -> Behind:
    """How far levels are behind once `kept` of `made` drafted tokens and one more stay.

    A level that was `lag` tokens behind the end of the draft has seen made - lag of them.
    """
    gone = made - kept - 1
    return tuple([lag - gone if lag > gone else 1 for lag in behind])


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
        survival: [M + 1, M + 1, T + 1, T + 1, T + 1], see `target_gains`.
        batch: requests per step.
        output_tokens: tokens per request, of which the prefill makes the first; drafts never
            pass the last one. None: endless text.

    Raises:
        UserError: draft_lengths beyond the table.
    """
    if not cascade.levels:
        ms = costs.turn(-1, "plain", batch, 1)
        return Prediction(ms, 1.0, ms, (ms,), (1.0,))
    check_reach(cascade, survival)
    chain = _Chain(cascade, costs, survival, batch)
    if output_tokens is None:
        spent, tokens = _long_run(chain)
        per_step = tokens
    else:
        total = _whole_request(chain, output_tokens - 1)
        steps = total[1, -1]
        spent, per_step = total / steps, (output_tokens - 1) / steps
    ms_per_step = float(spent[0].sum())
    return Prediction(
        ms_per_token=ms_per_step / per_step,
        tokens_per_step=float(per_step),
        ms_per_step=ms_per_step,
        level_ms=tuple(spent[0].tolist()),
        level_calls=tuple(spent[1].tolist()),
    )


def _long_run(chain: _Chain) -> tuple[Floats, float]:
    """Stationary means of a step: [2, K + 1] (ms, calls) and emitted tokens."""
    want = chain.cascade.draft_lengths[-1] + chain.cascade.tail
    found = {(1,) * chain.depth: 0}
    steps = []
    while len(steps) < len(found):
        spent, after = chain.step(list(found)[len(steps)], want)
        for _, lags in after:
            found.setdefault(lags, len(found))
        steps.append((spent, after))
    moves = np.zeros((len(steps), len(steps)))
    tokens = np.zeros(len(steps))
    for row, (_, after) in enumerate(steps):
        for (emitted, lags), chance in after.items():
            moves[row, found[lags]] += chance
            tokens[row] += chance * emitted
    # pi (P - I) = 0 and sum pi = 1, in the least-squares sense.
    system = np.vstack([moves.T - np.eye(len(steps)), np.ones(len(steps))])
    wanted = np.append(np.zeros(len(steps)), 1.0)
    weights = np.linalg.lstsq(system, wanted, rcond=None)[0]
    spent = np.tensordot(weights, np.stack([spent for spent, _ in steps]), axes=1)
    return spent, float(weights @ tokens)


def _whole_request(chain: _Chain, tokens: int) -> Floats:
    """Expected [2, K + 1] (ms, calls) until `tokens` are emitted; drafts never pass the end."""
    full = chain.cascade.draft_lengths[-1] + chain.cascade.tail
    total = chain.nothing()
    states = [{} for _ in range(tokens + 1)]  # states[left][behind]: P(ever there)
    states[tokens][(1,) * chain.depth] = 1.0
    for left in range(tokens, 0, -1):
        for behind, chance in states[left].items():
            spent, after = chain.step(behind, min(full, left - 1))
            total += chance * spent
            for (emitted, lags), p in after.items():
                there = states[left - emitted]
                there[lags] = there.get(lags, 0.0) + chance * p
    return total
