"""A loop nest in C: lines at each level, and the innermost loop in one part or two."""

from __future__ import annotations

from collections import defaultdict

from .index import ZERO, Index, Indices, keys
from .ir import Value


class Loop:
    """Loops over the elements of `shape`.

    Attributes:
        pre, post: lines before and after the loop of each level; of level `rank` there are none.
        body: lines of the innermost loop's current part.
        memo: C expressions of elements that are known, by value and index.
        fixed: the same for masks that the current part of the loop has decided.
        keep: arrays that are filled on the way.
        stored: those that the current part of the loop has filled.
        consumed: loads that were used here.
        sources: those of them that a value which will get an array was computed from.
        masks: (value, index) of all masks that were met.
    """

    def __init__(self, shape: tuple[int, ...], number: int) -> None:
        self.shape, self.rank = shape, len(shape)
        self.vars = [f"i{number}_{axis}" for axis in range(self.rank)]
        self.pre: list[list[str]] = [[] for _ in range(self.rank + 1)]
        self.post: list[list[str]] = [[] for _ in range(self.rank + 1)]
        self.parts: list[tuple[str, str, list[str]]] = []
        self.body: list[str] = []
        self.memo: dict[tuple, str] = {}
        self.fixed: dict[tuple, str] = {}
        self.keep: dict[Value, str] = {}
        self.stored: set[Value] = set()
        self.consumed: list[Value] = []
        self.sources: dict[Value, list[Value]] = defaultdict(list)
        self.masks: list[tuple[Value, Indices]] = []

    @property
    def inner(self) -> str | None:
        return self.vars[-1] if self.vars else None

    @property
    def index(self) -> Indices:
        """The index of the element of an iteration."""
        return tuple(
            Index(((var, 1),)) if n > 1 else ZERO
            for var, n in zip(self.vars, self.shape, strict=True)
        )

    def lines_at(self, idx: Indices) -> list[str]:
        """Where lines belong that depend on `idx` alone: the outermost level that has all of it."""
        used = {var for i in idx for var, _ in i.terms}
        level = max((k + 1 for k, var in enumerate(self.vars) if var in used), default=0)
        return self.pre[level] if level < self.rank else self.body

    def key(self, value: Value, idx: Indices) -> tuple:
        return value, keys(idx)

    def begin_part(self) -> None:
        """Forget what was known inside the innermost loop."""
        inner = self.inner
        for key in [k for k in self.memo if any(v == inner for terms, _ in k[1] for v, _ in terms)]:
            del self.memo[key]
        self.body, self.stored = [], set()

    def end_part(self, start: str, end: str) -> None:
        self.parts.append((start, end, self.body))

    def render(self, pragma: str) -> list[str]:
        """All lines; `pragma` is that of the innermost loop."""
        return self._render(0, pragma) if self.rank else [*self.pre[0], *self.body]

    def _render(self, depth: int, pragma: str) -> list[str]:
        var, lines = self.vars[depth], [*self.pre[depth]]
        if depth == self.rank - 1:
            for start, end, body in self.parts:
                if body:
                    lines.append(f"#pragma {pragma}")
                    lines.append(f"for (int {var} = {start}; {var} < {end}; {var}++) {{")
                    lines += [*body, "}"]
        else:
            lines.append(f"for (int {var} = 0; {var} < {self.shape[depth]}; {var}++) {{")
            lines += [*self._render(depth + 1, pragma), "}"]
        return lines + self.post[depth]
