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

from vllm_hsd.core.drafts import DraftBuffer, Proposal, joined, ragged_arange
from vllm_hsd.core.stopping import EntropyThresholds, row_entropy
from vllm_hsd.verify import verify_chain
from vllm_hsd.verify.residual import BlockedCDF

logger = logging.getLogger(__name__)


class Level(Protocol):
    """A drafter that turns tokens into next-token logits.

    Attributes:
        keeps_cache: it has a cache of its own, which must be filled for every committed token.
    """

    keeps_cache: bool

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


class LookupLevel(Protocol):
    """A lowest level that finds its drafts in the text: its proposal rows are one-hot."""

    def lookup(
        self, tokens: np.ndarray, rows: np.ndarray, ends: np.ndarray, ask: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Continue `tokens[rows[i], : ends[i]]` by at most ask[i] tokens.

        Returns:
            token ids [batch, max(ask)] int64 and how many of them hold, [batch] int64.
        """


@dataclass
class LevelOptions:
    """How one level takes part: its budget, its verifier, its law and its window.

    Attributes:
        draft_length: tokens handed to the level above per call.
        verifier: "block" or "standard", how it verifies the level below.
        max_rounds: most drafts asked from below per call; None means until the budget is full.
        stopping: "fixed", or "entropy" to stop behind a token drawn from an uncertain row; a level
            that verifies another one stops behind a round that shows such a row.
        temperature_scale: factor on the request's temperature for this level's law.
    """

    draft_length: int
    verifier: str = "block"
    max_rounds: int | None = None
    stopping: str = "fixed"
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
        probs: (logits [n, V], request of each row [n], level) -> probabilities [n, V], the law that
            a level samples from and is verified by.
        uniforms: (requests [b], counts [b], level) -> [sum(counts)] float64 uniforms, each used once.
        thresholds: where the entropy windows of this batch stand; updated in place.
    """

    tokens: np.ndarray
    rows: np.ndarray
    length: np.ndarray
    kv: np.ndarray
    eos: np.ndarray
    greedy: bool
    probs: Callable[[torch.Tensor, np.ndarray, int], torch.Tensor]
    uniforms: Callable[[np.ndarray, np.ndarray, int], torch.Tensor]
    thresholds: EntropyThresholds
    end: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.length.copy()


class Cascade:
    """Levels 0..K-1, cheapest first, drafting for a target.

    Args:
        levels: the drafters.
        plans: one `LevelOptions` per level.
        horizontal_tokens: tokens of level 0 that follow the top level's buffer unverified, with level 0's rows
            (the horizontal cascade).
    """

    def __init__(
        self,
        levels: Sequence[Level | LookupLevel],
        plans: Sequence[LevelOptions],
        horizontal_tokens: int = 0,
    ) -> None:
        self.levels = list(levels)
        self.plans = list(plans)
        self.horizontal_tokens = horizontal_tokens
        self.stats = [LevelStats() for _ in self.levels]
        self.warned: set[int] = set()

    def propose(self, batch: DraftBatch, want: np.ndarray) -> Proposal:
        """Draft `want[i]` tokens (zero or more) for every request of the batch.

        Returns:
            the top level's buffer; `counts[i] <= want[i]`, less where a draft ended with eos or
            the rounds ran out.
        """
        everyone = np.arange(len(want))
        top = np.where(want > 0, np.maximum(want - self.horizontal_tokens, 1), 0)
        proposal = self._draft(batch, len(self.levels) - 1, everyone, top)
        self.stats[-1].drafted += int(proposal.counts.sum())
        self.stats[-1].rounds += int((proposal.counts > 0).sum())
        if self.horizontal_tokens and top.any():
            proposal = self._with_horizontal_tokens(batch, proposal, want)
        return proposal

    def _with_horizontal_tokens(
        self, batch: DraftBatch, top: Proposal, want: np.ndarray
    ) -> Proposal:
        everyone = np.arange(len(want))
        last = top.token_ids[everyone, np.maximum(top.counts - 1, 0)]
        ended = (top.counts == 0) | (last == batch.eos)
        room = np.where(ended, 0, np.minimum(want - top.counts, self.horizontal_tokens))
        tail = self._draft(batch, 0, everyone, room)
        self.stats[0].drafted += int(tail.counts.sum())
        self.stats[0].rounds += int((tail.counts > 0).sum())
        return joined(top, tail)

    def record_acceptance(
        self, proposal: Proposal, rows: np.ndarray, accepted: np.ndarray, thresholds, requests
    ) -> None:
        """Take in what the target accepted of the rows of a proposal.

        Args:
            proposal: what `propose` returned.
            rows, accepted: [n] rows of the proposal and how many of their tokens were accepted.
            thresholds, requests: the entropy thresholds and, for each of the n, its column there.
        """
        own = np.minimum(accepted, proposal.verified[rows])
        self.stats[-1].accepted += int(own.sum())
        self.stats[0].accepted += int((accepted - own).sum())
        self._reject(len(self.levels) - 1, proposal, rows, accepted, thresholds, requests)

    def take_stats(self) -> list[LevelStats]:
        """The counts since the last call, one entry per level; they start again at zero."""
        taken, self.stats = self.stats, [LevelStats() for _ in self.levels]
        return taken

    def ingest(self, batch: DraftBatch, requests: np.ndarray, end: np.ndarray) -> None:
        """Bring every level's cache of `requests` up to the positions `end`, without drafting."""
        for level, valid in enumerate(batch.kv):
            if not self.levels[level].keeps_cache:
                continue
            behind = valid[requests] < end
            if behind.any():
                who, upto = requests[behind], end[behind]
                none = np.zeros(len(who), dtype=np.int64)
                self._timed_forward(batch, level, who, upto - valid[who], none)
                valid[who] = upto

    def _draft(
        self, batch: DraftBatch, level: int, requests: np.ndarray, ask: np.ndarray
    ) -> Proposal:
        if level > 0:
            return self._draft_verified(batch, level, requests, ask)
        if hasattr(self.levels[0], "lookup"):
            return self._draft_looked_up(batch, requests, ask)
        return self._draft_lowest(batch, requests, ask)

    def _draft_looked_up(
        self, batch: DraftBatch, requests: np.ndarray, ask: np.ndarray
    ) -> Proposal:
        rows, ends = batch.rows[requests], batch.end[requests]
        token_ids, counts = self.levels[0].lookup(batch.tokens, rows, ends, ask)
        owners, offsets = ragged_arange(counts)
        batch.tokens[rows[owners], ends[owners] + offsets] = token_ids[owners, offsets]
        batch.end[requests] += counts
        unknown = np.full(token_ids.shape, np.nan)
        return Proposal(token_ids, counts, np.zeros_like(token_ids), None, unknown, counts)

    def _draft_lowest(self, batch: DraftBatch, requests: np.ndarray, ask: np.ndarray) -> Proposal:
        buffer = DraftBuffer(len(requests), int(ask.max(initial=0)))
        open_ = ask > 0
        if not batch.greedy:
            # One toss for the whole draft; what an early end leaves over is never used.
            coins, first_coin = batch.uniforms(requests, ask, 0), np.cumsum(ask) - ask
        while open_.any():
            active = np.flatnonzero(open_)
            who = requests[active]
            one = np.ones(len(who), dtype=np.int64)
            logits = self._forward(batch, 0, who, one)
            entropy, uncertain = self._confidence(batch, 0, logits, who)
            if batch.greedy:
                laws, drawn = None, logits.argmax(-1)
            else:
                laws = self._laws(batch, logits, who, 0)
                coin = torch.from_numpy(first_coin[active] + buffer.counts[active])
                drawn = BlockedCDF(laws).draw(coins[coin].to(laws.device))
            drawn = drawn.cpu().numpy()
            batch.tokens[batch.rows[who], batch.end[who]] = drawn
            batch.end[who] += 1
            buffer.append(active, drawn[:, None], one, laws, np.arange(len(who)), entropy)
            ended = (drawn == batch.eos[who]) | uncertain
            open_[active] = (buffer.counts[active] < ask[active]) & ~ended
        return buffer.proposal()

    def _draft_verified(
        self, batch: DraftBatch, level: int, requests: np.ndarray, ask: np.ndarray
    ) -> Proposal:
        plan, budget = self.plans[level], self.plans[level - 1].draft_length
        buffer = DraftBuffer(len(requests), int(ask.max(initial=0)))
        open_ = ask > 0
        rounds = 0
        while open_.any() and (plan.max_rounds is None or rounds < plan.max_rounds):
            active = np.flatnonzero(open_)
            who = requests[active]
            start = batch.end[who]
            # One place is kept for the token that this level's own verification draws.
            room = ask[active] - buffer.counts[active] - 1
            draft = self._draft(batch, level - 1, who, np.minimum(budget, room))
            logits = self._forward(batch, level, who, draft.counts + 1)
            tokens, accepted, laws = self._verify(batch, level, who, draft, logits)
            is_eos = (tokens == batch.eos[who][:, None]) & (tokens >= 0)
            ended = is_eos.any(1)
            # Nothing follows an accepted eos, not even the token drawn behind it.
            last = np.where(ended, is_eos.argmax(1), accepted)
            emitted = last + 1
            batch.tokens[batch.rows[who], start + last] = tokens[np.arange(len(who)), last]
            batch.end[who] = start + emitted
            # What was computed behind the last token before it belongs to rejected tokens.
            batch.kv[: level + 1, who] = np.minimum(batch.kv[: level + 1, who], start + last)
            first_law = np.cumsum(draft.counts + 1) - (draft.counts + 1)
            owners, offsets = ragged_arange(draft.counts + 1)
            entropy, uncertain = self._confidence(batch, level, logits, who[owners])
            buffer.append(active, tokens, emitted, laws, first_law, entropy)
            self._count_round(batch, level - 1, draft, accepted, who)
            rounds += 1
            # Rows of rejected tokens say nothing about what was kept.
            stopped = np.zeros(len(who), dtype=bool)
            stopped[owners[uncertain & (offsets < emitted[owners])]] = True
            open_[active] = (buffer.counts[active] < ask[active]) & ~ended & ~stopped
        return buffer.proposal()

    def _count_round(
        self, batch: DraftBatch, below: int, draft: Proposal, accepted: np.ndarray, who: np.ndarray
    ) -> None:
        stats = self.stats[below]
        stats.drafted += int(draft.counts.sum())
        stats.accepted += int(accepted.sum())
        stats.rounds += int((draft.counts > 0).sum())
        self._reject(below, draft, np.arange(len(who)), accepted, batch.thresholds, who)

    def _reject(
        self,
        level: int,
        draft: Proposal,
        rows: np.ndarray,
        accepted: np.ndarray,
        thresholds: EntropyThresholds,
        requests: np.ndarray,
    ) -> None:
        """Move the level's threshold by the rows whose tokens were rejected."""
        if self.plans[level].stopping != "entropy":
            return
        rejected = accepted < draft.verified[rows]
        entropy = draft.entropy[rows[rejected], accepted[rejected]]
        thresholds.observe_rejection(level, requests[rejected], entropy)

    def _confidence(
        self, batch: DraftBatch, level: int, logits: torch.Tensor, requests: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Entropies of rows [n] and whether each lies above its request's threshold."""
        if self.plans[level].stopping != "entropy":
            return np.full(len(requests), np.nan), np.zeros(len(requests), dtype=bool)
        entropy = row_entropy(logits)
        return entropy, batch.thresholds.exceeded(level, requests, entropy)

    def _verify(
        self, batch: DraftBatch, level: int, who: np.ndarray, draft: Proposal, logits: torch.Tensor
    ) -> tuple[np.ndarray, np.ndarray, torch.Tensor | None]:
        """Verify the draft from below; token ids [batch, width + 1], accepted [batch], laws."""
        counts = draft.counts
        if batch.greedy:
            laws, method, uniforms = None, "greedy", None
        else:
            laws = self._laws(batch, logits, np.repeat(who, counts + 1), level)
            method, uniforms = self.plans[level].verifier, batch.uniforms(who, counts + 1, level)
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
        laws = batch.probs(logits, requests, level)
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
