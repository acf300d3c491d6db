"""Exact distributions of random programs, by running them along every path of choices."""

import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from fractions import Fraction
from functools import partial

Distribution = dict[Hashable, Fraction]
Tokens = tuple[int, ...]


class Choices:
    """The random draws of one run: a script of choices, then the first possible branch.

    Choices with the same key share one uniform number, as a keyed generator would make them. Such
    a number is known only up to an interval, which every choice narrows.
    """

    def __init__(self, script: Sequence[int] = ()):
        self.script = list(script)
        self.taken: list[int] = []
        self.weight = Fraction(1)
        self.others: list[list[int]] = []
        self._known: dict[Hashable, tuple[Fraction, Fraction]] = {}

    def bernoulli(self, h: Fraction, key: Hashable = None) -> bool:
        """True with probability h (U < h)."""
        return self.sample((h, 1 - h), key) == 0

    def sample(self, weights: Sequence[Fraction], key: Hashable = None) -> int:
        """An index, with probability proportional to its weight (inverse CDF)."""
        total = sum(weights)
        low, high = self._known.get(key, (Fraction(0), Fraction(1)))
        parts, edge = {}, Fraction(0)
        for i, w in enumerate(weights):
            begin, edge = edge, edge + Fraction(w) / total
            if (part := (max(begin, low), min(edge, high)))[0] < part[1]:
                parts[i] = part
        at = len(self.taken)
        if at < len(self.script):
            pick = self.script[at]
        else:
            pick, *others = parts
            self.others += [[*self.taken, other] for other in others]
        self.taken.append(pick)
        begin, end = parts[pick]
        self.weight *= (end - begin) / (high - low)
        if key is not None:
            self._known[key] = (begin, end)
        return pick


def distribution_of(program: Callable[[Choices], Hashable]) -> Distribution:
    """The distribution of what ``program`` returns."""
    distribution: Distribution = defaultdict(Fraction)
    scripts: list[list[int]] = [[]]
    while scripts:
        choices = Choices(scripts.pop())
        distribution[program(choices)] += choices.weight
        scripts += choices.others
    return dict(distribution)


class Table:
    """A model: a distribution over ``vocabulary`` tokens for every prefix, drawn once at random.

    Of ten entries ``zeros`` are zero. The others are raised to a power before they are normalized.
    """

    def __init__(self, vocabulary: int, seed: int, zeros: int = 1, power: int = 1):
        self.vocabulary, self.seed, self.zeros, self.power = vocabulary, seed, zeros, power
        self._rows: dict[Tokens, tuple[Fraction, ...]] = {}

    def __call__(self, prefix: Tokens) -> tuple[Fraction, ...]:
        row = self._rows.get(prefix)
        if row is None:
            rng = random.Random(repr((self.seed, prefix)))
            weights = [
                0 if rng.randrange(10) < self.zeros else rng.randint(1, 9)
                for _ in range(self.vocabulary)
            ]
            weights[rng.randrange(self.vocabulary)] += 1
            powers = [w**self.power for w in weights]
            row = self._rows[prefix] = tuple(Fraction(w, sum(powers)) for w in powers)
        return row

    def tempered(self, power: int) -> "Table":
        """The same model with every row raised to a power and normalized (temperature 1/power)."""
        return Table(self.vocabulary, self.seed, self.zeros, self.power * power)

    def rows(self, tokens: Tokens, count: int, prefix: Tokens = ()) -> list[tuple[Fraction, ...]]:
        """The distributions after the first 0, 1, .. count - 1 of ``tokens``, after ``prefix``."""
        return [self(prefix + tokens[:t]) for t in range(count)]

    def joint(self, length: int) -> Distribution:
        """The distribution of the model's next ``length`` tokens."""
        return extended({(): Fraction(1)}, self, length)


def extended(distribution: Distribution, model: Table, length: int) -> Distribution:
    """Emitted blocks, cut to ``length`` tokens or filled up by the model."""
    result: Distribution = defaultdict(Fraction)
    todo = list(distribution.items())
    while todo:
        tokens, weight = todo.pop()
        if len(tokens) >= length:
            result[tokens[:length]] += weight
        else:
            todo += [((*tokens, v), weight * w) for v, w in enumerate(model(tokens)) if w > 0]
    return dict(result)


def distance(one: Distribution, other: Distribution) -> Fraction:
    """Total variation distance."""
    keys: Iterable[Hashable] = one.keys() | other.keys()
    return sum((abs(one.get(k, 0) - other.get(k, 0)) for k in keys), Fraction(0)) / 2


def deviation(program: Callable[[Choices], Tokens], model: Table, length: int) -> Fraction:
    """Total variation of what a program emits, up to ``length`` tokens, from the model's text."""
    return distance(extended(distribution_of(program), model, length), model.joint(length))


class TopOf(Table):
    """A model with the `count` likeliest tokens of every row alone."""

    def __init__(self, model: Table, count: int):
        self.model, self.count = model, count

    def __call__(self, prefix: Tokens) -> tuple[Fraction, ...]:
        row = self.model(prefix)
        kept = sorted(range(len(row)), key=lambda v: -row[v])[: self.count]
        total = sum(row[v] for v in kept)
        return tuple(w / total if v in kept else Fraction(0) for v, w in enumerate(row))


# The greedy decoder of a model: one-hot rows.
ArgmaxOf = partial(TopOf, count=1)
