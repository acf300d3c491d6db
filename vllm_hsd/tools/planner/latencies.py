"""Measured latencies: of a forward by batch size and tokens, and of what a step adds around it."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_hsd.tools.machine_load import MachineLoad

Positive = Annotated[int, Field(ge=1, le=1 << 20)]
Milliseconds = Annotated[float, Field(allow_inf_nan=False)]
Role = Literal["draft", "lookup", "verify", "target", "plain"]


class LatencyTable(BaseModel):
    """Milliseconds by batch size (rows) and tokens per request (columns).

    `ms[r][c]` is the mean time for `batch_sizes[r]` requests of `tokens[c]` tokens each;
    `spread[r][c]` the half-width of its interquartile range.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    batch_sizes: list[Positive]
    tokens: list[Positive]
    ms: list[list[Milliseconds]]
    spread: list[list[Milliseconds]] | None = None

    @model_validator(mode="after")
    def _shapes(self) -> LatencyTable:
        for axis, values in (("batch_sizes", self.batch_sizes), ("tokens", self.tokens)):
            if not values or values != sorted(set(values)):
                raise ValueError(f"{axis} must be ascending without repetitions")
        shape = [len(self.tokens)] * len(self.batch_sizes)
        for rows in (self.ms, self.spread):
            if rows is not None and [len(row) for row in rows] != shape:
                raise ValueError("ms and spread must have one row per batch size, one column "
                                 "per token count")  # fmt: skip
        return self

    def at(self, batch: float, tokens: float) -> float:
        """Bilinear in batch size and tokens, extrapolated linearly, never below 0."""
        rows = [interpolated(self.tokens, row, tokens) for row in self.ms]
        return max(interpolated(self.batch_sizes, rows, batch), 0.0)


def interpolated(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Piecewise-linear interpolation, extrapolated linearly."""
    if len(xs) == 1:
        return ys[0]
    i = min(max(bisect.bisect_left(xs, x) - 1, 0), len(xs) - 2)
    return ys[i] + (ys[i + 1] - ys[i]) * (x - xs[i]) / (xs[i + 1] - xs[i])


class Latencies(BaseModel):
    """Latencies of all models on one machine.

    Attributes:
        forward: one table per model, the target last. The target's holds a whole step of the
            engine with speculation except the drafting: scheduling, forward, verification. A
            prompt lookup's holds its whole call.
        overhead: what a level adds to its forward (probabilities, sampling or verification,
            bookkeeping): `draft` at level 0, `verify` above.
        plain: a step of the engine without speculation; absent: the target's forward of 1 token.
        load: what else the machine did meanwhile; absent in files of older versions.
        dtype: that the engine computed in; absent in files of older versions.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    forward: list[LatencyTable]
    overhead: dict[Literal["draft", "verify"], LatencyTable] = Field(default_factory=dict)
    plain: LatencyTable | None = None
    load: MachineLoad | None = None
    dtype: str = "auto"

    def tables(self) -> dict[str, list[LatencyTable]]:
        """All tables by the key that holds them."""
        found = {"forward": self.forward}
        found |= {f"overhead.{role}": [table] for role, table in self.overhead.items()}
        return found | ({"plain": [self.plain]} if self.plain else {})

    def batch_sizes(self) -> list[int]:
        """Batch sizes that every table was measured at, ascending."""
        every = [set(table.batch_sizes) for tables in self.tables().values() for table in tables]
        return sorted(set.intersection(*every))

    def relative_spread(self) -> float:
        """Half-width of the interquartile range of a step's times, relative to the time.

        The median over batch sizes and tokens; 0 where no spread was recorded.
        """
        steps = [t for t in (self.forward[-1], self.plain) if t is not None and t.spread]
        ratios = [np.divide(table.spread or 0, table.ms).ravel() for table in steps]
        return float(np.median(np.concatenate(ratios))) if ratios else 0.0

    def call(self, model: int, role: Role, batch: float, tokens: float) -> float:
        """Milliseconds of one call of a model: its forward and the overhead of its role.

        Args:
            model: index into `forward`.
            role: `draft`, `lookup` or `verify` of a level, `target` or `plain` of the target.
            batch, tokens: requests that take part, and tokens of each; may be means.
        """
        if role == "plain" and self.plain is not None:
            return self.plain.at(batch, tokens)
        overhead: dict[Any, LatencyTable] = {**self.overhead}
        extra = overhead[role].at(batch, tokens) if role in overhead else 0.0
        return self.forward[model].at(batch, tokens) + extra

    def calls(self, model: int, role: Role, batch: int, max_tokens: int) -> NDArray[np.float64]:
        """`call` for 1..max_tokens tokens, float64 [max_tokens]."""
        return np.array([self.call(model, role, batch, t + 1) for t in range(max_tokens)])
