"""The recursion over the levels of a cascade, independent of the runner that hosts it.

Level 0 drafts token by token; every level above verifies what the one below offers and keeps the
token that its own verification draws (hierarchical speculative decoding, optimal_hierarchy_gsp,
Algorithm 1), so each emitted token carries the emitting level's row as its proposal row. All
requests of a batch run together and progress raggedly: what is per request is a numpy array.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from vllm_hsd.verify import verify_chain
from vllm_hsd.verify.residual import Mass

logger = logging.getLogger(__name__)


class Level(Protocol):
    """A drafter: something that turns tokens into next-token logits, with a cache it fills."""

    def forward(
        self,
        tokens: np.ndarray,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        num_logits: np.ndarray,
    ) -> torch.Tensor | None:
        """Feed `tokens[rows[i], starts[i] : starts[i] + counts[i]]` of every request i.

        Args:
            tokens: [table rows, max length] int32, the host's table of token ids.
            rows: [batch] int64, row of each request in `tokens`.
            starts, counts: [batch] int64, positions to compute; the cache is valid before them.
            num_logits: [batch] int64, how many of the last computed positions yield logits.

        Returns:
            [sum(num_logits), V] logits, request after request; None when all counts are zero.
        """


@dataclass
class LevelPlan:
    """How one level takes part: its budget, its verifier and its law.

    Attributes:
        budget: tokens handed to the level above per call.
        verifier: "hierarchical" or "tokenwise", how it verifies the level below.
        rounds: most drafts asked from below per call; None means until the budget is full.
        temperature_scale: factor on the request's temperature for this level's law.
    """

    budget: int
    verifier: str = "hierarchical"
    rounds: int | None = None
    temperature_scale: float = 1.0


@dataclass
class LevelStats:
    """Counts of one level since the last `take`; `drafted` tokens were offered to the next up."""

    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    forwards: int = 0
    forward_seconds: float = 0.0


@dataclass
class DraftBatch:
    """The requests that a cascade drafts for in one step; batch row i is one request.

    Attributes:
        tokens: [table rows, max length] int32; drafts are written behind `length`.
        rows: [batch] int64, row of each request in `tokens`.
        length: [batch] int64, committed tokens.
        kv: [levels, batch] int64, positions whose cache entries are valid; updated in place.
        eos: [batch] int64, token that ends the request, -1 for none; drafts end with it.
        greedy: every request takes the argmax: rows are one-hot and never built.
        law: (logits [n, V], request of each row [n], level) -> probabilities [n, V], the law that
            a level samples from and is verified by.
        coins: (requests [b], counts [b], level) -> [sum(counts)] float64 uniforms, each used once.
    """

    tokens: np.ndarray
    rows: np.ndarray
    length: np.ndarray
    kv: np.ndarray
    eos: np.ndarray
    greedy: bool
    law: Callable[[torch.Tensor, np.ndarray, int], torch.Tensor]
    coins: Callable[[np.ndarray, np.ndarray, int], torch.Tensor]
    end: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.length.copy()


@dataclass
class Proposal:
    """A ragged draft with the law that each of its tokens was drawn from.

    Attributes:
        token_ids: [batch, width] int64; request i owns the first counts[i].
        counts: [batch] int64.
        source: [batch, width] int64, row of `laws` that token was drawn from.
        laws: [n, V] float32 proposal rows; None when all rows are one-hot.
    """

    token_ids: np.ndarray
    counts: np.ndarray
    source: np.ndarray
    laws: torch.Tensor | None

    def flat_token_ids(self) -> np.ndarray:
        """[sum(counts)] int64, request after request."""
        return self.token_ids[_filled(self.counts, self.token_ids.shape[1])]

    def flat_laws(self) -> torch.Tensor | None:
        """[sum(counts), V] proposal rows, request after request."""
        if self.laws is None:
            return None
        index = torch.from_numpy(self.source[_filled(self.counts, self.source.shape[1])])
        return self.laws.index_select(0, index.to(self.laws.device))


class Cascade:
    """Levels 0..K-1, cheapest first, drafting for a target.

    Args:
        levels: the drafters.
        plans: one `LevelPlan` per level.
    """

    def __init__(self, levels: Sequence[Level], plans: Sequence[LevelPlan]) -> None:
        self.levels = list(levels)
        self.plans = list(plans)
        self.stats = [LevelStats() for _ in self.levels]
        self.warned: set[int] = set()

    def propose(self, batch: DraftBatch, want: np.ndarray) -> Proposal:
        """Draft `want[i]` tokens (zero or more) for every request of the batch.

        Returns:
            the top level's buffer; `counts[i] <= want[i]`, less where a draft ended with eos or
            the rounds ran out.
        """
        everyone = np.arange(len(want))
        proposal = self._draft(batch, len(self.levels) - 1, everyone, want)
        self.stats[-1].drafted += int(proposal.counts.sum())
        self.stats[-1].rounds += int((proposal.counts > 0).sum())
        return proposal

    def take_stats(self) -> list[LevelStats]:
        """The counts since the last call, one entry per level; they start again at zero."""
        taken, self.stats = self.stats, [LevelStats() for _ in self.levels]
        return taken

    def ingest(self, batch: DraftBatch, requests: np.ndarray, end: np.ndarray) -> None:
        """Bring every level's cache of `requests` up to the positions `end`, without drafting."""
        for level, valid in enumerate(batch.kv):
            behind = valid[requests] < end
            if behind.any():
                who, upto = requests[behind], end[behind]
                none = np.zeros(len(who), dtype=np.int64)
                self._timed_forward(batch, level, who, upto - valid[who], none)
                valid[who] = upto

    def _draft(
        self, batch: DraftBatch, level: int, requests: np.ndarray, ask: np.ndarray
    ) -> Proposal:
        if level == 0:
            return self._draft_lowest(batch, requests, ask)
        return self._draft_verified(batch, level, requests, ask)

    def _draft_lowest(self, batch: DraftBatch, requests: np.ndarray, ask: np.ndarray) -> Proposal:
        buffer = _Buffer(len(requests), int(ask.max(initial=0)))
        open_ = ask > 0
        while open_.any():
            active = np.flatnonzero(open_)
            who = requests[active]
            one = np.ones(len(who), dtype=np.int64)
            logits = self._forward(batch, 0, who, one)
            if batch.greedy:
                laws, drawn = None, logits.argmax(-1)
            else:
                laws = self._laws(batch, logits, who, 0)
                drawn = Mass(laws).draw(batch.coins(who, one, 0).to(laws.device))
            drawn = drawn.cpu().numpy()
            batch.tokens[batch.rows[who], batch.end[who]] = drawn
            batch.end[who] += 1
            buffer.append(active, drawn[:, None], one, laws, np.arange(len(who)))
            open_[active] = (buffer.counts[active] < ask[active]) & (drawn != batch.eos[who])
        return buffer.proposal()

    def _draft_verified(
        self, batch: DraftBatch, level: int, requests: np.ndarray, ask: np.ndarray
    ) -> Proposal:
        plan, below = self.plans[level], self.stats[level - 1]
        buffer = _Buffer(len(requests), int(ask.max(initial=0)))
        open_ = ask > 0
        rounds = 0
        while open_.any() and (plan.rounds is None or rounds < plan.rounds):
            active = np.flatnonzero(open_)
            who = requests[active]
            start = batch.end[who]
            # One place is kept for the token that this level's own verification draws.
            room = ask[active] - buffer.counts[active] - 1
            draft = self._draft(
                batch, level - 1, who, np.minimum(self.plans[level - 1].budget, room)
            )
            logits = self._forward(batch, level, who, draft.counts + 1)
            tokens, accepted, laws = self._verify(batch, level, who, draft, logits)
            emitted = accepted + 1
            batch.tokens[batch.rows[who], start + accepted] = tokens[np.arange(len(who)), accepted]
            batch.end[who] = start + emitted
            # What was computed behind the last accepted token belongs to rejected tokens.
            batch.kv[: level + 1, who] = np.minimum(batch.kv[: level + 1, who], start + accepted)
            first_law = np.cumsum(draft.counts + 1) - (draft.counts + 1)
            buffer.append(active, tokens, emitted, laws, first_law)
            below.drafted += int(draft.counts.sum())
            below.accepted += int(accepted.sum())
            below.rounds += int((draft.counts > 0).sum())
            rounds += 1
            ended = (tokens == batch.eos[who][:, None]) & (tokens >= 0)
            open_[active] = (buffer.counts[active] < ask[active]) & ~ended.any(1)
        return buffer.proposal()

    def _verify(
        self, batch: DraftBatch, level: int, who: np.ndarray, draft: Proposal, logits: torch.Tensor
    ) -> tuple[np.ndarray, np.ndarray, torch.Tensor | None]:
        """Verify the draft from below; token ids [batch, width + 1], accepted [batch], laws."""
        counts = draft.counts
        if batch.greedy:
            laws, method, uniforms = None, "greedy", None
        else:
            laws = self._laws(batch, logits, np.repeat(who, counts + 1), level)
            method, uniforms = self.plans[level].verifier, batch.coins(who, counts + 1, level)
        result = verify_chain(
            logits if laws is None else laws,
            draft.flat_laws(),
            torch.from_numpy(draft.flat_token_ids()).to(logits.device),
            counts.tolist(),
            method=method,
            uniforms=uniforms,
        )
        return result.token_ids.cpu().numpy(), result.num_accepted.cpu().numpy(), laws

    def _laws(
        self, batch: DraftBatch, logits: torch.Tensor, requests: np.ndarray, level: int
    ) -> torch.Tensor:
        """The level's laws; uniform where its logits are not finite, which is then its law."""
        laws = batch.law(logits, requests, level)
        usable = (laws.sum(-1) - 1).abs() < 1e-3
        if not usable.all():
            if level not in self.warned:
                self.warned.add(level)
                logger.warning(
                    "levels[%d] gives logits that are not finite; it drafts at random there, "
                    "which costs acceptance: check its weights and dtype.",
                    level,
                )
            laws[~usable] = 1 / laws.shape[1]
        return laws

    def _forward(
        self, batch: DraftBatch, level: int, who: np.ndarray, num_logits: np.ndarray
    ) -> torch.Tensor:
        """Logits of the last positions of `who`; the level's cache is then valid to the end."""
        logits = self._timed_forward(
            batch, level, who, batch.end[who] - batch.kv[level, who], num_logits
        )
        batch.kv[level, who] = batch.end[who]
        return logits

    def _timed_forward(
        self,
        batch: DraftBatch,
        level: int,
        who: np.ndarray,
        counts: np.ndarray,
        num_logits: np.ndarray,
    ) -> torch.Tensor | None:
        began = time.perf_counter()
        logits = self.levels[level].forward(
            batch.tokens, batch.rows[who], batch.kv[level, who], counts, num_logits
        )
        stats = self.stats[level]
        stats.forwards += 1
        stats.forward_seconds += time.perf_counter() - began
        return logits


class _Buffer:
    """Tokens of a level's call as they come, with the place of each one's law."""

    def __init__(self, batch: int, width: int) -> None:
        self.token_ids = np.zeros((batch, width), dtype=np.int64)
        self.source = np.zeros((batch, width), dtype=np.int64)
        self.counts = np.zeros(batch, dtype=np.int64)
        self.laws: list[torch.Tensor] = []
        self.num_laws = 0

    def append(
        self,
        active: np.ndarray,
        token_ids: np.ndarray,
        emitted: np.ndarray,
        laws: torch.Tensor | None,
        first_law: np.ndarray,
    ) -> None:
        """Add the first emitted[j] of token_ids[j] to request active[j].

        Their laws are the rows first_law[j], first_law[j] + 1, ... of `laws`.
        """
        which, offset = ragged_arange(emitted)
        place = self.counts[active][which] + offset
        self.token_ids[active[which], place] = token_ids[which, offset]
        self.source[active[which], place] = self.num_laws + first_law[which] + offset
        self.counts[active] += emitted
        if laws is not None:
            self.laws.append(laws)
            self.num_laws += len(laws)

    def proposal(self) -> Proposal:
        laws = None
        if self.laws:
            laws = self.laws[0] if len(self.laws) == 1 else torch.cat(self.laws)
        return Proposal(self.token_ids, self.counts, self.source, laws)


def ragged_arange(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For counts [2, 0, 3]: owners [0, 0, 2, 2, 2] and offsets [0, 1, 0, 1, 2]."""
    owners = np.repeat(np.arange(len(counts)), counts)
    offsets = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    return owners, offsets


def _filled(counts: np.ndarray, width: int) -> np.ndarray:
    return np.arange(width) < counts[:, None]
