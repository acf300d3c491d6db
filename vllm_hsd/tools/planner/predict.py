"""Predicted time per token of a cascade, as this package runs it: the planner's one evaluator.

A level that drafts `requested` tokens and has `drafted` of them already requests
min(draft length below, requested - drafted - 1) tokens of the level below, so that the accepted
ones and the recovered or bonus token never overshoot; with nothing requested from below, the level
decodes one token by itself. A forward runs over the draft and over the uncached tokens of its model
(at least the last one). Acceptance in a round depends only on the pair of models, the draft length
and the position; given that, the expectation is exact for one request: a Markov chain over the
uncached tokens of every level.

The requests of a batch share every forward: it runs over all of them, as often as the slowest one
needs and over as many tokens of each as of any, but the target's, which packs them. Requests are
independent, so none of B has more than t tokens in a round with probability P(at most t)^B.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_hsd.errors import UserError
from vllm_hsd.tools.planner.latencies import Latencies, Role
from vllm_hsd.tools.planner.survival import Acceptance, folded

Floats = NDArray[np.float64]
# Tokens that each level has not computed yet.
Uncached = tuple[int, ...]
# (tokens offered, P(offered so many, k of them accepted) for k = 0..offered) of one round.
Outcome = tuple[int, list[float]]


@dataclass(frozen=True)
class Selection:
    """Indices of a cascade's candidates, cheapest first (none: no speculation), and the tokens
    that each passes to the next; raises UserError unless there is a length >= 1 for each.
    """

    levels: tuple[int, ...]
    draft_lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.levels) != len(self.draft_lengths):
            raise UserError(
                f"a cascade of {len(self.levels)} levels needs as many draft lengths, "
                f"not {len(self.draft_lengths)}."
            )
        if any(length < 1 for length in self.draft_lengths):
            raise UserError("draft lengths must be at least 1.")


@dataclass(frozen=True)
class Measured:
    """What predictions are made from.

    Attributes:
        latencies, acceptance: of M candidates and the target, which is last.
        cacheless: candidates without a KV cache of their own, which never have uncached tokens.
        reread: heads, which read all that a step of the target keeps once more, with its states.
    """

    latencies: Latencies
    acceptance: Acceptance
    cacheless: frozenset[int] = frozenset()
    reread: frozenset[int] = frozenset()

    def role(self, level: int, model: int) -> Role:
        """What a candidate does at a level."""
        if level > 0:
            return "verify"
        return "lookup" if model in self.acceptance.lookups else "draft"


@dataclass(frozen=True)
class Prediction:
    """What a step of the target costs and yields in the long run with a cascade.

    Attributes:
        ms_per_token: milliseconds per emitted token of one request.
        tokens_per_step: block efficiency, bonus token included.
        ms_per_step: milliseconds of a target call with all that led to it.
        level_ms: share of `ms_per_step` spent in each level, the target last [K + 1].
        level_calls: forwards of each level per target call, the target last [K + 1].
    """

    selection: Selection
    ms_per_token: float
    tokens_per_step: float
    ms_per_step: float
    level_ms: tuple[float, ...]
    level_calls: tuple[float, ...]


def gain_table(survival: Floats) -> Floats:
    """P(exactly k tokens are accepted | n were drafted), [..., T + 1 (n), T + 1 (k)].

    Args:
        survival: P(at least t tokens are accepted), [..., T + 1]; 1 at t = 0.
    """
    # Nothing beyond the draft's end.
    alive = np.tril(np.repeat(survival[..., None, :], survival.shape[-1], axis=-2))
    return -np.diff(alive, axis=-1, append=0)


def round_outcomes(
    acceptance: Acceptance, verifier: int, drafter: int, draft_length: int
) -> list[list[list[Outcome]]]:
    """Outcomes of rounds by the verifier's position and by the tokens requested, 0..draft_length.

    Args:
        verifier: index of a model, -1 for the target.
    """
    requests = range(draft_length + 1)
    if drafter in acceptance.lookups:
        joint = acceptance.lookups[drafter][verifier, draft_length]
        tables = [folded(joint, requested).tolist() for requested in requests]
        return [
            [
                [(m, row[: m + 1]) for m, row in enumerate(each[place]) if any(row)]
                for each in tables
            ]
            for place in range(len(joint))
        ]
    gains = gain_table(acceptance.survival[verifier, drafter, draft_length]).tolist()
    return [[[(n, rows[n][: n + 1])] for n in requests] for rows in gains]


def check_draft_lengths(selection: Selection, acceptance: Acceptance) -> None:
    """Refuse (UserError) drafts longer than what was measured and levels that never draft."""
    lengths, longest = selection.draft_lengths, acceptance.survival.shape[-1] - 1
    if max(lengths) > longest:
        raise UserError(
            f"a draft of {max(lengths)} tokens is longer than the {longest} tokens that the "
            f"profile covers: profile again with a larger --max-draft-tokens."
        )
    requested = lengths[-1]
    for level in reversed(range(len(lengths) - 1)):
        requested = min(lengths[level], requested - 1)
        if requested < 1:
            raise UserError(
                f"level {level} would never draft, because the draft lengths {lengths} leave the "
                f"level above nothing to request: raise them toward the target."
            )


class _Chain:
    """Expected calls of one cascade at one batch size; `draft` remembers its states.

    What a draft of a level costs one request is an array [rounds, width]: in each of its rounds,
    first its own (calls over 1, 2, ... tokens) and then, flat, the array of the level below. Rounds
    are told apart for batches alone; for one request they are added up.
    """

    def __init__(self, selection: Selection, measured: Measured, batch: int):
        latencies, levels = measured.latencies, selection.levels
        self.draft_lengths, self.batch = selection.draft_lengths, batch
        self.depth = len(levels)
        self.outcomes = [
            round_outcomes(measured.acceptance, above, below, length)
            for below, length, above in zip(
                levels, selection.draft_lengths, (*levels[1:], -1), strict=True
            )
        ]
        self.looks_up = levels[0] in measured.acceptance.lookups
        self.reread = levels[0] in measured.reread
        self.cacheless = {i for i, level in enumerate(levels) if level in measured.cacheless}
        # At most a level's whole draft is uncached when it next drafts.
        self.own = 2 * sum(selection.draft_lengths) + 2
        called: list[tuple[int, Role]] = [(m, measured.role(i, m)) for i, m in enumerate(levels)]
        # [own (tokens - 1)] milliseconds of every level, the target last
        self.ms = [
            latencies.calls(model, role, batch, self.own)
            for model, role in [*called, (-1, "target")]
        ]
        self.rounds = selection.draft_lengths if batch > 1 else (1,) * self.depth
        self.width = [self.own]
        for rounds in self.rounds:
            self.width.append(self.own + rounds * self.width[-1])
        self.draft = functools.cache(self._draft)

    def _draft(
        self, level: int, requested: int, uncached: Uncached
    ) -> tuple[Floats, dict[Uncached, float]]:
        """What `requested` tokens of a level cost [rounds, width], and P(uncached after)."""
        cost = np.zeros((self.rounds[level], self.width[level]))
        if not requested:
            return cost, {uncached: 1.0}
        if level:
            return cost, self._draft_verified(cost, level, requested, uncached)
        for call in range(1 if self.looks_up else requested):
            tokens = 1 if call else uncached[0]
            cost[min(call, len(cost) - 1), tokens - 1] += 1
        return cost, {(1,): 1.0}

    def _draft_verified(
        self, cost: Floats, level: int, requested: int, uncached: Uncached
    ) -> dict[Uncached, float]:
        """Add up `cost`; returns P(uncached after)."""
        done: dict[Uncached, float] = defaultdict(float)
        states = {(0, uncached): 1.0}
        round_ = 0
        while states:
            after: dict[tuple[int, Uncached], float] = defaultdict(float)
            spent = cost[min(round_, len(cost) - 1)]
            for (drafted, missing), chance in states.items():
                below = min(self.draft_lengths[level - 1], requested - drafted - 1)
                for kept, state, p in self._verified(spent, chance, level, drafted, below, missing):
                    emitted = drafted + kept + 1
                    if emitted == requested:
                        done[state] += p
                    else:
                        after[emitted, state] += p
            states = after
            round_ += 1
        return done

    def _verified(
        self, spent: Floats, chance: float, level: int, drafted: int, asked: int, state: Uncached
    ) -> Iterator[tuple[int, Uncached, float]]:
        """(tokens accepted, uncached after, P) of a round of a level; the target is the last one.

        Adds to `spent` [width] what the round costs, which happens by `chance` in a `state` of the
        level and those below, `drafted` tokens after its draft began, with `asked` from below.
        """
        below, drafts = self.draft(level - 1, asked, state[:level])
        spent[self.own :] += chance * below.ravel()
        for low, p in drafts.items():
            for offered, accepted in self.outcomes[level - 1][drafted][asked]:
                share = chance * p * sum(accepted)
                spent[state[level] + offered - 1] += share
                for kept, q in enumerate(accepted):
                    if q:
                        yield kept, (*self._catch_up(low, offered, kept), 1), chance * p * q

    def _catch_up(self, uncached: Uncached, offered: int, kept: int) -> Uncached:
        """Uncached tokens once `kept` of `offered` drafted tokens and one more stay."""
        gone = offered - kept - 1
        after = [n - gone if n > gone else 1 for n in uncached]
        if self.looks_up:
            after[0] = 1
        return tuple(after)

    def step(
        self, uncached: Uncached, requested: int
    ) -> tuple[Floats, dict[tuple[int, Uncached], float]]:
        """What a target call on `requested` drafted tokens costs, P(emitted, uncached after)."""
        cost = np.zeros(self.width[-1])
        after: dict[tuple[int, Uncached], float] = defaultdict(float)
        missing = (*uncached, 1)
        for kept, caught_up, p in self._verified(cost, 1.0, self.depth, 0, requested, missing):
            levels = list(caught_up[:-1])
            if self.reread:
                levels[0] = kept + 1
            state = tuple(1 if i in self.cacheless else n for i, n in enumerate(levels))
            after[kept + 1, state] += p
        return cost, after

    def of_batch(self, cost: Floats) -> Floats:
        """[2, K + 1] milliseconds and calls of each level, the target last, from a step's cost."""
        found = []
        for level in reversed(range(self.depth + 1)):
            cost = cost.reshape(-1, self.width[level])
            found.append(self._shared(level, cost[:, : self.own]))
            cost = cost[:, self.own :]
        return np.array(found[::-1]).T

    def _shared(self, level: int, rounds: Floats) -> tuple[float, float]:
        """Milliseconds and calls of a level whose rounds [rounds, own] the requests share."""
        if self.batch > 1 and level < self.depth:
            idle = np.maximum(1 - rounds.sum(1, keepdims=True), 0.0)
            fewer = np.minimum(idle + np.cumsum(rounds, axis=1), 1.0) ** self.batch
            rounds = np.diff(fewer, prepend=idle**self.batch)
        return float((rounds @ self.ms[level]).sum()), float(rounds.sum())


def predict(
    selection: Selection,
    measured: Measured,
    *,
    batch: int = 1,
    output_tokens: int | None = None,
) -> Prediction:
    """Time per token of one cascade.

    Args:
        batch: requests per step.
        output_tokens: tokens per request, of which the prefill emits the first; drafts never
            pass the last one. None: endless text.
    """
    if not selection.levels:
        ms = measured.latencies.call(-1, "plain", batch, 1)
        return Prediction(selection, ms, 1.0, ms, (ms,), (1.0,))
    check_draft_lengths(selection, measured.acceptance)
    chain = _Chain(selection, measured, batch)
    if output_tokens is None:
        cost, per_step = _long_run(chain)
    else:
        cost, steps = _whole_request(chain, output_tokens - 1)
        cost, per_step = cost / steps, (output_tokens - 1) / steps
    spent = chain.of_batch(cost)
    ms_per_step = float(spent[0].sum())
    level_ms, level_calls = map(tuple, spent.tolist())
    ms = ms_per_step / per_step
    return Prediction(selection, ms, per_step, ms_per_step, level_ms, level_calls)


def _long_run(chain: _Chain) -> tuple[Floats, float]:
    """Stationary means of a step: what it costs, and emitted tokens."""
    found: dict[Uncached, int] = {(1,) * chain.depth: 0}
    order = list(found)
    steps: list[tuple[Floats, dict[tuple[int, Uncached], float]]] = []
    while len(steps) < len(order):
        cost, after = chain.step(order[len(steps)], chain.draft_lengths[-1])
        for _, uncached in after:
            if uncached not in found:
                found[uncached] = len(order)
                order.append(uncached)
        steps.append((cost, after))
    moves = np.zeros((len(steps), len(steps)))
    tokens = np.zeros(len(steps))
    for row, (_, after) in enumerate(steps):
        for (emitted, uncached), chance in after.items():
            moves[row, found[uncached]] += chance
            tokens[row] += chance * emitted
    # pi (P - I) = 0 and sum pi = 1, in the least-squares sense.
    system = np.vstack([moves.T - np.eye(len(steps)), np.ones(len(steps))])
    weights = np.linalg.lstsq(system, np.append(np.zeros(len(steps)), 1.0), rcond=None)[0]
    return weights @ np.stack([cost for cost, _ in steps]), float(weights @ tokens)


def _whole_request(chain: _Chain, tokens: int) -> tuple[Floats, float]:
    """Sums over the steps until `tokens` are emitted, past which no draft reaches: cost, steps."""
    total, steps = np.zeros(chain.width[-1]), 0.0
    # reached[left][uncached]: P(ever there)
    reached: list[dict[Uncached, float]] = [defaultdict(float) for _ in range(tokens + 1)]
    reached[tokens][(1,) * chain.depth] = 1.0
    for left in range(tokens, 0, -1):
        for state, chance in reached[left].items():
            cost, after = chain.step(state, min(chain.draft_lengths[-1], left - 1))
            total += chance * cost
            steps += chance
            for (emitted, uncached), p in after.items():
                reached[left - emitted][uncached] += chance * p
    return total, steps
