"""What may follow a text: the tokens that sources offer, and how likely each of them is.

Sources miss different tokens, and agree where they are right: how likely a token is comes from one
table over who offers it and how sure each of them is, learned from what the text became.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

# Who offers a token: the first lookup, any other one, a model.
FIRST, OTHER, MODEL = 0, 1, 2
# Places in a draft (later ones count as the last), and what sources say of a token: nothing, or a
# probability between two of these.
PLACES = 3
_EDGES = (0.03, 0.1, 0.25, 0.45, 0.65, 0.85)
SAYINGS = len(_EDGES) + 2
# Tokens that a cell begins with, right as often as the surest source says; and those it remembers.
PRIOR_TOKENS = 4.0
REMEMBERED = 500.0


_CELLS = PLACES * SAYINGS**3


def _surest(cell: int) -> int:
    """The cell of tokens of which only the surest source of a cell says something."""
    place, said = divmod(cell, SAYINGS**3)
    most = max((1, SAYINGS, SAYINGS * SAYINGS), key=lambda voice: said // voice % SAYINGS)
    return place * SAYINGS**3 + said // most % SAYINGS * most


_SUREST = [_CELLS + _surest(cell) for cell in range(_CELLS)]


class Agreement:
    """Probability of offered tokens, given that the text has come to them.

    A cell begins as what is known of its surest source, whatever the others say.

    Attributes:
        right, seen: [2 * PLACES * SAYINGS ** 3] tokens of each cell that the text had, and all;
            then the same by the surest source alone.
    """

    def __init__(self) -> None:
        # Single entries are read: lists are faster than arrays.
        self.right = [0.0] * (2 * _CELLS)
        self.seen = [0.0] * (2 * _CELLS)

    def estimate(self, cell: int, sureness: float) -> float:
        """Of a token that the surest source gives a probability of `sureness`."""
        for where in (_SUREST[cell], cell):
            known = self.right[where] + PRIOR_TOKENS * sureness
            sureness = known / (self.seen[where] + PRIOR_TOKENS)
        return sureness

    def observe(self, cell: int, is_right: bool) -> None:
        """Take in whether the text had a token of this cell."""
        for where in (_SUREST[cell], cell):
            if self.seen[where] >= REMEMBERED:
                faded = 1 - 1 / REMEMBERED
                self.right[where] *= faded
                self.seen[where] *= faded
            self.right[where] += is_right
            self.seen[where] += 1


def cell_of(place: int, sure: Sequence[float]) -> int:
    """The cell of a token at a place of a draft, by what FIRST, OTHER and MODEL say of it."""
    cell = min(place, PLACES - 1)
    for value in sure:
        cell = cell * SAYINGS + (1 + bisect_left(_EDGES, value) if value > 0 else 0)
    return cell


class Node:
    """An offered token after those of its parents.

    Attributes:
        token: its id.
        sure: what FIRST, OTHER and MODEL say of it, given its parents; 0 where they do not offer.
        source: the first one that offered it.
        free: a lookup found it without a model's tokens.
        survival: probability that the text goes on to it.
        cell: of the table; -1 for tokens of a model's own draft.
        drafted: it is part of the draft.
        children: by token.
    """

    __slots__ = ("cell", "children", "drafted", "free", "source", "sure", "survival", "token")

    def __init__(self, token: int, source: int = 0, free: bool = False) -> None:
        self.token, self.source, self.free = token, source, free
        self.sure = [0.0, 0.0, 0.0]
        self.survival, self.cell, self.drafted = 1.0, -1, False
        self.children: dict[int, Node] = {}


class Candidates:
    """A tree of tokens that sources offer after one text.

    Args:
        table: what they are worth.
        start: tokens of the text.
        most: longest draft.
        eos: nothing follows this token; -1 for none.
        price: of a token; less likely ones are not drafted.

    Attributes:
        root: the end of the text.
        mass: probability of the tokens right after it that lookups offer.
        drawn, added: tokens of a model's own draft, and all that are verified for what it said.
    """

    def __init__(
        self, table: Agreement, start: int, most: int, eos: int, price: float = 0.0
    ) -> None:
        self.table, self.start, self.most, self.eos = table, start, most, eos
        self.price = price
        self.root = Node(-1)
        self.mass = 0.0
        self.drawn, self.added = 0, 0

    def offer(
        self,
        path: Sequence[Node],
        voice: int,
        source: int,
        tokens: Iterable[int],
        sureness: Iterable[float],
    ) -> list[Node]:
        """Add a draft of one source after the tokens of a path from the root.

        Args:
            path: nodes, the first one a child of the root.
            voice: FIRST, OTHER or MODEL.
            source: its number.
            tokens, sureness: of the draft, with the probability that it gives each token.

        Returns:
            the path to the end of the draft.
        """
        found = list(path)
        node = found[-1] if found else self.root
        for token, sure in zip(tokens, sureness, strict=False):
            if len(found) == self.most or node.token == self.eos >= 0:
                break
            child = node.children.get(token)
            if child is None:
                child = node.children[token] = Node(token, source)
            child.free |= not path and voice != MODEL
            child.sure[voice] = max(child.sure[voice], sure)
            found.append(child)
            node = child
        return found

    def settle(self, places: int | None = None) -> None:
        """Estimate the tokens of the first places; of all without a number."""
        todo = [(self.root, 0)]
        while todo:
            node, place = todo.pop()
            for child in node.children.values():
                if not child.drafted:
                    child.cell = cell_of(place, child.sure)
                    expected = self.table.estimate(child.cell, max(child.sure))
                    child.survival = node.survival * min(expected, 1.0)
                if child.children and place + 1 != places:
                    todo.append((child, place + 1))

    def draft(self, tokens: Sequence[int], expected: Sequence[float], source: int) -> list[Node]:
        """Take in a model's own draft, which is verified in any case, and its survival by token."""
        path: list[Node] = []
        node = self.root
        for token, chance in zip(tokens, expected, strict=True):
            child = node.children.setdefault(token, Node(token, source))
            child.drafted, child.cell, child.survival = True, -1, node.survival * chance
            path.append(child)
            node = child
        return path

    def paths(self, least: float) -> list[list[Node]]:
        """All ways from the root as far as they survive with a probability of `least`."""
        found: list[list[Node]] = []
        todo: list[list[Node]] = [[]]
        while todo:
            path = todo.pop()
            node = path[-1] if path else self.root
            after = [
                child
                for child in node.children.values()
                if child.drafted or child.survival >= least
            ]
            todo += [[*path, child] for child in after]
            if path and not after:
                found.append(path)
        return found

    def score(self, text: Iterable[int]) -> float:
        """Take in how the text went on.

        Returns:
            tokens of it that were drafted, above those that lookups alone would have drafted.
        """
        node, drafted, free, alone = self.root, 0, 0, 1.0
        is_drafted = is_free = True
        for place, token in enumerate(text):
            for child in node.children.values():
                if child.cell >= 0:
                    self.table.observe(child.cell, child.token == token)
            if (after := node.children.get(token)) is None:
                break
            node = after
            is_drafted &= node.drafted
            looked_up = [*node.sure[:MODEL], 0.0]
            alone *= self.table.estimate(cell_of(place, looked_up), max(looked_up))
            is_free &= node.free and alone >= self.price
            drafted, free = drafted + is_drafted, free + is_free
        return float(max(drafted - free, 0))


class Piece:
    """Tokens that are added to a draft together.

    Attributes:
        row: of the draft, which the tokens begin, or go on; 0 is the chain.
        path: the row then.
        gain: survival of what is new in it.
        cost: tokens that it adds to the target's pass, which computes what rows share once.
        density: gain by token; never above that of the piece before it.
    """

    __slots__ = ("cost", "density", "gain", "path", "row")

    def __init__(self, row: int, path: list[Node], gain: float, cost: int, density: float) -> None:
        self.row, self.path, self.gain, self.cost, self.density = row, path, gain, cost, density


def pieces(
    paths: list[list[Node]], chain: list[Node], rows: int, room: int, nodes: int, least: float
) -> Iterator[Piece]:
    """The pieces of the best drafts, the best ones first.

    Args:
        paths: see `Candidates.paths`.
        chain: what is drafted in any case.
        rows: most rows.
        room: most tokens of a row, but for the chain.
        nodes: most tokens of a draft that differ by what is before them.
        least: least density.
    """
    tips: list[Node | None] = [chain[-1] if chain else None]
    covered = {id(node) for node in chain}
    before = float("inf")
    while len(covered) < nodes:
        best: tuple[float, int, list[Node], float, int] | None = None
        for path in paths:
            known = 0
            while known < len(path) and id(path[known]) in covered:
                known += 1
            if known == len(path):
                continue
            tip = path[known - 1] if known else None
            row = tips.index(tip) if tip in tips else len(tips)
            if row and known >= room:
                continue
            if row < len(tips):
                gain = path[known].survival
                if best is None or gain > best[0]:
                    best = gain, row, path[: known + 1], gain, 1
            elif row < rows:
                gain, cost = 0.0, 0
                for end in range(known, min(len(path), room, known + nodes - len(covered))):
                    gain, cost = gain + path[end].survival, cost + 1
                    if best is None or gain / cost > best[0]:
                        best = gain / cost, row, path[: end + 1], gain, cost
        if best is None or best[0] < least:
            return
        density, row, path, gain, cost = best
        covered.update(map(id, path))
        tips[row:] = [path[-1], *tips[row + 1 :]]
        before = min(before, density)
        yield Piece(row, path, gain, cost, before)
