"""A lowest level that drafts several rows for one pass of the target: the rule grows a tree.

Tokens of all sources are candidates, and so are those that lookups find after a model's likeliest
tokens, which cost no further pass. What is added is worth its survival and costs what it adds to
the target's step; a model's pass costs too, and is worth what it finds where lookups do not. One
row is what remains where tokens are expensive, and none where nothing pays.

A model's own draft is the chain: it is drawn before anything is chosen by it, and stays. All else
are point masses, which may be chosen by all that is there (`rules.branches`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

import numpy as np

from vllm_hsd.budget.draft_budget import DraftBudget
from vllm_hsd.budget.trials import Trials
from vllm_hsd.cascade.branch_store import BranchStore
from vllm_hsd.cascade.drafts import DraftStore
from vllm_hsd.cascade.level import DraftBatch, LookupLevel, LookupResult, Sources, Texts
from vllm_hsd.cascade.suffix import SuffixLevel
from vllm_hsd.tools.reference.candidates import (
    FIRST,
    MODEL,
    OTHER,
    PLACES,
    Agreement,
    Candidates,
    Node,
    Piece,
    pieces,
)
from vllm_hsd.tools.reference.level_models import Forward, LevelModels
from vllm_hsd.tools.reference.lowest_level import LowestLevel
from vllm_hsd.tools.reference.source_choice import SourceChoice

# Tokens of a draft that differ by what is before them, at most.
MOST_NODES = 16
# A model's tokens that are candidates.
LIKELIEST = 8
# Options of the trials.
_ROW, _MODEL, _BRANCHES = 0, 1, 2
# Decay of what is known of a model with each request that it is asked for.
_MEMORY = 0.99
# Classes of requests, by the probability that lookups miss.
_MISSED = (0.5, 0.9)
# Requests that the first guess of what a model brings weighs as much as.
_PRIOR_REQUESTS = 16.0


class BranchChoice(SourceChoice):
    """Decides what is verified, and whether a model is asked.

    Args: see `SourceChoice`.

    Attributes:
        table: how likely tokens are.
        waiting: candidates after the text in a slot, until it goes on.
        brought: [4, classes] of requests that a model was asked for, by how likely lookups had
            missed, exponentially forgotten: tokens gained, tokens verified for them, tokens drawn,
            requests.
    """

    def __init__(self, sources: Sources, budget: DraftBudget, num_slots: int) -> None:
        super().__init__(sources, budget, num_slots)
        self.table = Agreement()
        self.waiting: dict[int, Candidates] = {}
        self.brought = np.ones((4, len(_MISSED) + 1))
        self.brought[:2] = [[0.1, 0.3, 0.5], [3.0, 3.0, 2.0]]
        self.brought *= _PRIOR_REQUESTS
        self.trials = Trials(3)
        # Whether more is verified in this step than pays.
        self.trying = False
        # Tokens of lookups that pay in this step without a model.
        self.alone = 0

    def forget(self, slot: int) -> None:
        """See `Cascade.forget`."""
        super().forget(slot)
        self.waiting.pop(slot, None)

    def begin(self, verifier: int, texts: Texts) -> None:
        """See `SourceChoice.begin`."""
        super().begin(verifier, texts)
        for row, slot, end in zip(*(part.tolist() for part in texts[1:]), strict=True):
            found = self.waiting.pop(slot, None)
            if found is None or end <= found.start:
                continue
            gained = found.score(texts.tokens[row, found.start : end].tolist())
            if found.drawn:
                of = np.digitize(1 - found.mass, _MISSED)
                self.brought[:, of] *= _MEMORY
                self.brought[:, of] += gained, found.added, found.drawn, 1

    def token_price(self) -> float:
        """What another token costs, with as many others as a whole draft of every request has.

        Between fewer tokens the times differ less than they scatter: the least of such differences
        is nothing.
        """
        verify, budget = self.budget.step.verify[self.verifier], self.budget
        few = (len(verify) - 1) // budget.widest * budget.longest
        start = min(self.placed, len(verify) - 1 - few)
        return float(verify[start + few] - verify[start]) / few

    def begins(self, slots: np.ndarray, room: np.ndarray, sure: np.ndarray) -> np.ndarray:
        """See `SourceChoice.begins`; `sure` is the probability that lookups miss."""
        of = self.brought[:, np.digitize(sure, _MISSED)]
        gained, added, drawn = of[:3] / of[3]
        # All that is verified for the model comes after what is without it.
        verify, total = self.budget.step.verify[self.verifier], added.sum()
        ends = np.interp([self.alone, self.alone + total], np.arange(len(verify)), verify)
        net = gained - (ends[1] - ends[0]) / max(total, 1.0) * added
        pays: np.ndarray = net > 0
        # Passes are shared.
        if net[pays].sum() > self.budget.step.forward[self.verifier] * drawn[pays].max(initial=1):
            self.trials.pays(_MODEL)
            return pays
        if len(slots) and self._may_try(_MODEL):
            return self.trials.takes_part(_MODEL, len(slots))
        return np.zeros(len(slots), dtype=bool)

    def choose(self, grow: Callable[[float], list[list[Piece]]]) -> list[list[Piece]]:
        """What is verified of every request.

        Args:
            grow: a least density -> the pieces of every request, the best ones first.
        """
        self.trying = False
        # Of its own place, a token may cost less than in the mean.
        found = grow(self.token_price() / 2)
        kept = self._paying(found)
        pays = any(kept)
        if pays:
            self.trials.pays(_ROW)
        elif not self.placed and self._may_try(_ROW):
            # What more tokens cost may have been overestimated, and is not seen without any.
            chains = [[piece for piece in own if not piece.row] for own in grow(0.0)]
            kept = self._tried(_ROW, [own[:PLACES] for own in chains], kept)
        if any(piece.row for own in kept for piece in own):
            self.trials.pays(_BRANCHES)
        elif pays and self._may_try(_BRANCHES):
            kept = self._tried(_BRANCHES, found, kept)
        self.placed += sum(piece.cost for own in kept for piece in own)
        return kept

    def tokens_alone(self, grow: Callable[[float], list[list[Piece]]]) -> int:
        """Tokens that pay before a model is asked; `grow`: see `choose`."""
        kept = self._paying(grow(self.token_price() / 2))
        return sum(piece.cost for own in kept for piece in own)

    def _paying(self, found: list[list[Piece]]) -> list[list[Piece]]:
        """The pieces of all requests that pay together for what they add to the step."""
        flat = [(i, piece) for i, own in enumerate(found) for piece in own]
        flat.sort(key=lambda item: -item[1].density)
        kept: list[list[Piece]] = [[] for _ in found]
        if not flat:
            return kept
        verify = self.budget.step.verify[self.verifier]
        tokens = self.placed + np.cumsum([piece.cost for _, piece in flat])
        price = verify[np.minimum(tokens, len(verify) - 1)] - verify[self.placed]
        net = np.cumsum([piece.gain for _, piece in flat]) - price
        self.budget.gained += max(float(net.max()), 0.0)
        for i, piece in flat[: int(net.argmax()) + 1 if net.max() > 0 else 0]:
            kept[i].append(piece)
        return kept

    def _tried(
        self, option: int, found: list[list[Piece]], kept: list[list[Piece]]
    ) -> list[list[Piece]]:
        self.trying = True
        takes = self.trials.takes_part(option, len(found)).tolist()
        return [one if take else own for one, own, take in zip(found, kept, takes, strict=True)]


class BranchingLevel(LowestLevel):
    """Level 0 of a cascade without other levels, that fills a `BranchStore` beside its drafts.

    Args:
        level: the sources.
        models, drafts: see `LowestLevel`.
        budget: prices what is verified.
        branches: where further drafts go.
    """

    def __init__(
        self,
        level: Sources,
        models: LevelModels,
        drafts: DraftStore,
        budget: DraftBudget,
        branches: BranchStore,
    ) -> None:
        super().__init__(level, models, drafts, None)
        self.choice = self.grown = BranchChoice(level, budget, len(drafts.counts))
        self.branches = branches
        # By slot, the model's likeliest first tokens and their probabilities, of this draft.
        self.said: dict[int, tuple[list[int], list[float]]] | None = None

    def _draft_from_sources(
        self,
        batch: DraftBatch,
        choice: SourceChoice,
        slots: np.ndarray,
        requested: np.ndarray,
        verifier: int,
    ) -> None:
        """A tree of the tokens of all sources, as rows: the first one is the draft."""
        grown, starts = self.grown, batch.end[slots].copy()
        grown.begin(verifier, batch.texts(slots))
        facts = zip(starts.tolist(), requested.tolist(), batch.eos[slots].tolist(), strict=True)
        price = grown.token_price()
        trees = [Candidates(grown.table, *of_one, price) for of_one in facts]
        self._search(batch, slots, trees, [[] for _ in trees])
        for tree in trees:
            tree.settle()
            tree.mass = min(sum(node.survival for node in tree.root.children.values()), 1.0)
        chains: list[list[Node]] = [[] for _ in trees]
        most, room = self.branches.most, self.branches.room[slots].tolist()

        def grow(least: float) -> list[list[Piece]]:
            return [
                list(pieces(tree.paths(least), chain, most, own, MOST_NODES, least))
                for tree, chain, own in zip(trees, chains, room, strict=True)
            ]

        if self.has_model:
            grown.alone = grown.tokens_alone(grow)
            chains = self._ask_model(batch, slots, requested, trees)
            for tree in trees:
                tree.settle()
        kept = grown.choose(grow)
        self._fill(batch, slots, trees, chains, kept)
        grown.waiting.update(zip(slots.tolist(), trees, strict=True))

    def _search(
        self,
        batch: DraftBatch,
        slots: np.ndarray,
        trees: list[Candidates],
        paths: Sequence[list[Node] | None],
    ) -> None:
        """Add what lookups find after a path of each tree; None for a tree that stays as it is."""
        some = [i for i, path in enumerate(paths) if path is not None and len(path) < trees[i].most]
        if not some or not self.lookups:
            return
        now, lengths = slots[some], np.array([len(paths[i] or ()) for i in some])
        rows, ends = batch.rows[now], np.array([trees[i].start for i in some]) + lengths
        room = np.array([trees[i].most for i in some]) - lengths
        places = [
            (row, slice(end - n, end))
            for row, end, n in zip(rows.tolist(), ends.tolist(), lengths.tolist(), strict=True)
        ]
        before = [batch.tokens[place].copy() for place in places]
        for i, place in zip(some, places, strict=True):
            batch.tokens[place] = [node.token for node in paths[i] or ()]
        voice = FIRST
        for source, lookup in enumerate(self.lookups):
            for found in _offers(lookup, Texts(batch.tokens, rows, now, ends), room):
                given, counts = found.confidence, found.counts.tolist()
                sure = given.copy()
                np.divide(given[:, 1:], given[:, :-1], out=sure[:, 1:], where=given[:, :-1] > 0)
                for k, i in enumerate(some):
                    if count := counts[k]:
                        offer = found.token_ids[k, :count].tolist(), sure[k, :count].tolist()
                        trees[i].offer(paths[i] or (), voice, source, *offer)
                voice = OTHER
        for place, tokens in zip(places, before, strict=True):
            batch.tokens[place] = tokens

    def _ask_model(
        self,
        batch: DraftBatch,
        slots: np.ndarray,
        requested: np.ndarray,
        trees: list[Candidates],
    ) -> list[list[Node]]:
        """The model's own drafts, and its likeliest first tokens among the candidates."""
        grown, drafts, model = self.grown, self.drafts, len(self.lookups)
        self.said = {}
        missed = np.array([1.0 - tree.mass for tree in trees])
        self._continue_with_model(batch, grown, slots, requested, missed)
        said, self.said = self.said, None
        least, chains = grown.token_price(), []
        expected = grown.last.expected[model, slots]
        expected = np.minimum(expected * grown.budget.acceptance.scale(model, slots)[:, None], 1.0)
        after: list[list[list[Node]]] = []
        for i, (slot, tree) in enumerate(zip(slots.tolist(), trees, strict=True)):
            count = int(drafts.counts[slot])
            tokens = drafts.token_ids[slot, :count].tolist()
            chain = tree.draft(tokens, expected[i, :count].tolist(), model)
            tree.drawn = tree.added = count
            chains.append(chain)
            for token, sure in zip(*said.get(slot, ([], [])), strict=True):
                tree.offer((), MODEL, model, [token], [sure])
            tree.settle(1)
            # Lookups go on after the model's tokens; after the whole chain first.
            ends = [chain] if len(chain) > 1 else []
            for token in said.get(slot, ([], []))[0]:
                node = tree.root.children[token]
                if node.survival > least and token != tree.eos:
                    ends.append([node])
            if count and tokens[0] not in said[slot][0]:
                ends.append(chain[:1])
            after.append(ends)
        for ranked in zip_longest(*after) if any(after) else ():
            self._search(batch, slots, trees, ranked)
        return chains

    def _draft_token(
        self, batch: DraftBatch, slots: np.ndarray, uniforms: np.ndarray | None
    ) -> tuple[Forward, np.ndarray]:
        """See `LowestLevel._draft_token`."""
        forward, ended = super()._draft_token(batch, slots, uniforms)
        if self.said == {}:
            logits = forward.logits.float()
            top = logits.topk(min(LIKELIEST, logits.shape[1]))
            sure = (top.values - logits.logsumexp(-1, keepdim=True)).exp().nan_to_num()
            said = zip(top.indices.tolist(), sure.tolist(), strict=True)
            self.said = dict(zip(slots.tolist(), said, strict=True))
        return forward, ended

    def _fill(
        self,
        batch: DraftBatch,
        slots: np.ndarray,
        trees: list[Candidates],
        chains: list[list[Node]],
        kept: list[list[Piece]],
    ) -> None:
        """Make drafts and branches of what was chosen."""
        more = np.zeros((len(slots), self.drafts.length), dtype=np.int64)
        counts, source = np.zeros(len(slots), dtype=np.int64), np.zeros(len(slots), dtype=np.int64)
        store, beside = self.branches, self.grown.budget.beside
        store.clear(slots)
        beside[slots] = 0
        for i, slot in enumerate(slots.tolist()):
            rows = {id(node): 0 for node in chains[i]}
            for piece in kept[i]:
                if piece.row and not store.counts[slot, piece.row - 1]:
                    known = sum(id(node) in rows for node in piece.path)
                    at = slot, piece.row - 1
                    store.shared[at], store.source[at] = known, piece.path[known].source
                    store.parent[at] = rows[id(piece.path[known - 1])] if known else 0
                for node in piece.path:
                    rows.setdefault(id(node), piece.row)
                    node.drafted = True
                if not piece.path[-1].free:
                    trees[i].added += piece.cost
                tokens, row = [node.token for node in piece.path], piece.row - 1
                if piece.row:
                    store.token_ids[slot, row, : len(tokens)] = tokens
                    store.counts[slot, row] = len(tokens)
                else:
                    known = len(chains[i])
                    counts[i], source[i] = len(tokens) - known, piece.path[known].source
                    more[i, : counts[i]] = tokens[known:]
            if self.grown.trying:
                # What it brings then says nothing of what pays.
                trees[i].drawn = 0
            beside[slot] = (store.counts[slot] - store.shared[slot]).sum()
        self._append_found(batch, slots, more, counts, source)


def _offers(lookup: LookupLevel, texts: Texts, room: np.ndarray) -> list[LookupResult]:
    """What a lookup finds; in each of its texts where it has several."""
    if isinstance(lookup, SuffixLevel):
        return lookup.lookup_each(texts, room)
    return [lookup.lookup(texts, room)]
