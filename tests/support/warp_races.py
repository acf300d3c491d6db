"""Races of the warps of a program, which neither the interpreter nor a CPU can show.

A GPU runs the warps of a program at the same time, up to a barrier. Two accesses of one address
race if one of them writes, no barrier lies between them and not one thread does both. All threads
load a scalar and one stores it; lanes of a tensor have threads of their own where there are enough.
Writes of equal values do not race, nor do those that change nothing.
"""

import linecache
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

THREADS = 32


class Access(NamedTuple):
    """What one lane of an operation does: `size` lanes in all; `value` is None for a load."""

    place: str
    lane: int
    size: int
    value: float | None
    atomic: bool


class Launch:
    """The accesses of a launch: (program, barriers before it, address) -> what is done there."""

    def __init__(self, warps: int) -> None:
        self.warps = warps
        self.barriers: dict[tuple, int] = defaultdict(int)
        self.at: dict[tuple, list[Access]] = defaultdict(list)

    def add(self, program, pointers, mask, values=None, changed=True, *, atomic=False) -> None:
        """Take in the lanes of an operation, but for masked ones and stores that change nothing."""
        kept = np.broadcast_to(mask, pointers.shape) & np.broadcast_to(changed, pointers.shape)
        epoch, (place, statement) = self.barriers[program], _place()
        given = None if values is None else np.broadcast_to(values, pointers.shape).ravel()
        for lane in np.flatnonzero(kept).tolist():
            value = None if given is None else given[lane].item()
            access = Access(place, lane, pointers.size, value, atomic)
            self.at[program, epoch, int(pointers.ravel()[lane])].append(access)
        if atomic and pointers.size == 1 and not statement.startswith("tl.atomic"):
            # All threads wait for a result that is used.
            self.barriers[program] += 1

    def races(self) -> set[str]:
        """The two places of each pair that races."""
        found = set()
        for accesses in self.at.values() if self.warps > 1 else ():
            if any(each.value is not None for each in accesses):
                pairs = combinations(dict.fromkeys(accesses), 2)
                found |= {f"{a.place}, {b.place}" for a, b in pairs if self._race(a, b)}
        return found

    def _race(self, first: Access, second: Access) -> bool:
        values = [each.value for each in (first, second) if each.value is not None]
        if not values or (first.atomic and second.atomic):
            return False
        if len(values) == 2 and (values[0] == values[1] or all(v != v for v in values)):
            return False
        if first.size != second.size or first.lane != second.lane:
            return True
        # Several threads may have a lane, of which one stores it; what the others loaded is lost.
        own = first.size > 1 if first.value is None else second.value is not None
        return not own and first.size < THREADS * self.warps


@contextmanager
def recorded_races() -> Iterator[set[str]]:
    """Find the races of all interpreted launches of ours within the context."""
    found: set[str] = set()
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    before_load, before_store = builder.create_masked_load, builder.create_masked_store
    before_atomic, call, launches = builder.create_atomic_rmw, executor.__call__, list[Launch]()

    def load(self, ptrs, mask, *rest):
        launches[-1].add(self.grid_idx, ptrs.data, mask.data)
        return before_load(self, ptrs, mask, *rest)

    def store(self, ptrs, value, mask, *rest):
        old = before_load(self, ptrs, mask, None, *rest, False).data
        changed = (old != value.data) & ((old == old) | (value.data == value.data))
        launches[-1].add(self.grid_idx, ptrs.data, mask.data, value.data, changed)
        return before_store(self, ptrs, value, mask, *rest)

    def atomic(self, operation, ptr, value, mask, *rest):
        launches[-1].add(self.grid_idx, ptr.data, mask.data, value.data, atomic=True)
        return before_atomic(self, operation, ptr, value, mask, *rest)

    def barrier(*_, **__):
        launches[-1].barriers[interpreter.interpreter_builder.grid_idx] += 1

    def launch(self, *args, **kwargs):
        launches.append(Launch(kwargs.get("num_warps", 4)))
        try:
            call(self, *args, **kwargs)
        finally:
            races = launches.pop().races()
            found.update(() if self.fn.__module__.startswith("vllm.") else races)

    with (
        mock.patch.multiple(builder, create_masked_load=load, create_masked_store=store),
        mock.patch.object(builder, "create_atomic_rmw", atomic),
        mock.patch.object(executor, "__call__", launch),
        # Not of the builder: vLLM's stand-ins for CUDA leave the barriers out.
        mock.patch.object(tl, "debug_barrier", barrier),
    ):
        yield found


def _place() -> tuple[str, str]:
    """File and line of the innermost frame of a kernel, and the text of that line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and "kernels" not in Path(frame.f_code.co_filename).parts[:-1]:
        frame = frame.f_back
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(file).name}:{line}", linecache.getline(file, line).strip()
