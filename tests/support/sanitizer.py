"""What the interpreter, which runs in order, cannot show of kernels: races, and wrong addresses.

A GPU runs the programs of a launch at the same time, and the warps of a program too, up to a
barrier. Two accesses of one address race if one of them writes and nothing orders them:

- programs: unless two atomics on one address lie between them that release and acquire, the first
  one after a barrier if other threads have written;
- warps of a program: unless a barrier lies between them, or one thread does both. All threads load
  a scalar and one stores it; lanes of a tensor have threads of their own where there are enough.

Writes of equal values do not race, nor do those that change nothing. Accesses are compared by the
address that they begin at. An access is outside if no tensor of the launch has its address; kernels
that load addresses (`BY_ADDRESS`) are not asked for that.
"""

import functools
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from support.interpreter import interpreted_by
from triton._C.libtriton.ir import MEM_SEMANTIC
from triton.runtime import interpreter

THREADS = 32
BY_ADDRESS = {"copy_blocks_kernel", "place_kernel"}


@dataclass(frozen=True)
class Access:
    """One operation of one program.

    Attributes:
        place: file and line of the kernel.
        values: [lanes] what is written; None for a load.
        epoch: barriers of the program before it.
        time: accesses of the launch before it.
    """

    place: str
    program: tuple[int, int, int]
    addresses: np.ndarray
    lanes: np.ndarray
    size: int
    values: np.ndarray | None
    atomic: bool
    epoch: int
    time: int


class Launch:
    """The accesses of a launch.

    Args:
        tensors: its arguments.
    """

    def __init__(self, warps: int, tensors: Iterable[torch.Tensor]) -> None:
        self.warps, self.accesses = warps, list[Access]()
        bounds = sorted(_bounds(each) for each in tensors)
        self.starts = np.array([start for start, _ in bounds])
        # Of all tensors that begin before.
        self.ends = np.maximum.accumulate([end for _, end in bounds] or [0])
        self.outside: set[str] = set()
        self.epochs: dict[tuple, int] = defaultdict(int)
        # A program's atomics that release and acquire, by address.
        self.atomics: dict[int, dict[tuple, list[Access]]] = defaultdict(lambda: defaultdict(list))

    def add(
        self, program, pointers, mask, values, changed=True, *, atomic=False, orders=False
    ) -> None:
        """Take in the lanes of an operation that are not masked.

        Args:
            changed: lanes whose store changes what is there.
            orders: an atomic that releases and acquires.
        """
        active = np.flatnonzero(np.broadcast_to(mask, pointers.shape))
        if not len(active):
            return
        place, addresses = _place(), pointers.ravel()[active].astype(np.int64)
        at = np.searchsorted(self.starts, addresses, side="right") - 1
        if ((at < 0) | (addresses >= self.ends[at])).any():
            self.outside.add(f"outside: {place}")
        kept = np.broadcast_to(changed, pointers.shape).ravel()[active]
        active, addresses = active[kept], addresses[kept]
        if values is not None:
            values = np.broadcast_to(values, pointers.shape).ravel()[active]
        epoch, time = self.epochs[program], len(self.accesses)
        access = Access(
            place, program, addresses, active, pointers.size, values, atomic, epoch, time
        )
        self.accesses.append(access)
        if orders:
            for address in addresses.tolist():
                self.atomics[address][program].append(access)
        if atomic and pointers.size == 1:
            # All threads wait for its result.
            self.epochs[program] += 1

    def races(self) -> Iterator[str]:
        """A sentence for every pair of places that race."""
        written = [each.addresses for each in self.accesses if each.values is not None]
        written = np.unique(np.concatenate([np.empty(0, np.int64), *written]))
        if not len(written):
            return
        at: dict[int, list[tuple[Access, int]]] = defaultdict(list)
        for access in self.accesses:
            place = np.searchsorted(written, access.addresses).clip(max=len(written) - 1)
            for i in np.flatnonzero(written[place] == access.addresses).tolist():
                at[int(access.addresses[i])].append((access, i))
        seen = set()
        for found in at.values():
            for (first, i), (second, j) in combinations(found, 2):
                pair = first.place, second.place, first.program == second.program
                if pair not in seen and self._race(first, i, second, j):
                    seen.add(pair)
                    whose = "warps" if first.program == second.program else "programs"
                    yield f"{whose}: {first.place}, {second.place}"

    def _race(self, first: Access, i: int, second: Access, j: int) -> bool:
        reads = (first.values is None) + (second.values is None)
        if reads == 2 or (first.atomic and second.atomic):
            return False
        if reads == 0 and not _differ(first.values[i], second.values[j]):
            return False
        if first.program != second.program:
            return not self._ordered(first, second)
        if self.warps == 1 or first.epoch != second.epoch:
            return False
        if first.size != second.size or first.lanes[i] != second.lanes[j]:
            return True
        # Several threads may have a lane, of which one stores it; what the others loaded is lost.
        own = first.size > 1 if first.values is None else second.values is not None
        return not own and first.size < THREADS * self.warps

    def _ordered(self, first: Access, second: Access) -> bool:
        for programs in self.atomics.values():
            released = [
                each.time
                for each in programs.get(first.program, ())
                if each.time >= first.time
                and (each.epoch > first.epoch or first.size == 1 or self.warps == 1)
            ]
            acquired = [
                each.time for each in programs.get(second.program, ()) if each.time <= second.time
            ]
            if released and acquired and min(released) < max(acquired):
                return True
        return False


@contextmanager
def recorded_faults() -> Iterator[set[str]]:
    """Find the faults of all launches within the context.

    Yields:
        "warps" or "programs", with two places that race, and "outside" with a place.
    """
    found: set[str] = set()
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    before_load, before_store = builder.create_masked_load, builder.create_masked_store
    before_atomic, call, launches = builder.create_atomic_rmw, executor.__call__, list[Launch]()

    def load(self, ptrs, mask, *rest):
        launches[-1].add(self.grid_idx, ptrs.data, mask.data, None)
        return before_load(self, ptrs, mask, *rest)

    def store(self, ptrs, value, mask, *rest):
        old = before_load(self, ptrs, mask, None, *rest, False).data
        changed = _differ(old, value.data)
        launches[-1].add(self.grid_idx, ptrs.data, mask.data, value.data, changed)
        return before_store(self, ptrs, value, mask, *rest)

    def atomic(self, operation, ptr, value, mask, sem, scope):
        orders = sem == MEM_SEMANTIC.ACQUIRE_RELEASE
        given = ptr.data, mask.data, value.data
        launches[-1].add(self.grid_idx, *given, atomic=True, orders=orders)
        return before_atomic(self, operation, ptr, value, mask, sem, scope)

    def barrier(*_, **__):
        launches[-1].epochs[interpreter.interpreter_builder.grid_idx] += 1

    def launch(self, *args, **kwargs):
        tensors = [each for each in [*args, *kwargs.values()] if isinstance(each, torch.Tensor)]
        launches.append(Launch(kwargs.get("num_warps", 4), tensors))
        try:
            call(self, *args, **kwargs)
        finally:
            last = launches.pop()
            # vLLM's own are timed next to ours, and are not ours to mend.
            if not self.fn.__module__.startswith("vllm."):
                found.update(last.races())
                found.update(() if self.fn.__name__ in BY_ADDRESS else last.outside)

    with (
        interpreted_by(load, store, atomic, launch),
        # Not of the builder: vLLM's stand-ins for CUDA leave the barriers out.
        mock.patch.object(tl, "debug_barrier", barrier),
    ):
        yield found


def _differ(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return (one != other) & ((one == one) | (other == other))


def _bounds(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    count = last + 1 if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + count * tensor.element_size()


def _place() -> str:
    """File and line of the innermost frame of a kernel."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not _of_kernels(frame.f_code.co_filename)[0]:
        frame = frame.f_back
    return f"{_of_kernels(frame.f_code.co_filename)[1]}:{frame.f_lineno}"


@functools.cache
def _of_kernels(path: str) -> tuple[bool, str]:
    """Whether a file is one of kernels, and its name."""
    return "kernels" in Path(path).parts[:-1], Path(path).name
