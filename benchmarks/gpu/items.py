"""The items of the proof on a GPU, most valuable first, and what one of them is given and finds."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


class CannotRun(Exception):
    """An item needs what this host lacks; the message says what."""


class CheckFailed(Exception):
    """An item has run and found something wrong; the message says what."""


@dataclass(frozen=True)
class Item:
    """A module with `run(setting)`.

    Attributes:
        name: of the module, and of the item's files.
        claim: what is shown if it passes.
        limit: seconds after which it is ended and has failed.
        package: of the module.
    """

    name: str
    claim: str
    limit: int = 120
    package: str = "benchmarks.gpu"

    def load(self) -> ItemModule:
        module: Any = importlib.import_module(f"{self.package}.{self.name}")
        return module


ITEMS = (
    Item("kernels", "verification and sampling kernels give the reference's tokens, also replayed"),
    Item("proposals", "every kernel of a proposal equals its reference on random states"),
    Item("kernel_times", "verification against vLLM's own and against one read of its inputs"),
    Item(
        "kernel_distribution", "text by the kernels follows the target, a biased control does not"
    ),
    Item("boot", "vLLM imports, its V2 runner decodes with CUDA graphs, plain and with a cascade"),
    Item("same_text", "engines: greedy text, equal models, eager and captured, no host sync"),
    Item(
        "defaults", "engines without any argument serve: no host sync, nothing compiled later", 600
    ),
    Item("step_times", "time of a step, no speculation, vLLM's drafters and ours at equal K"),
    Item("engine_distribution", "text of engines follows the target, a biased control does not"),
    Item("soak", "requests join, leave and are preempted; seeded text as if each ran alone"),
    Item("forwards", "time of a forward pass by the number of tokens"),
    Item("step_times_32b", "the same with a large target"),
    Item("memory", "memory of a cascade against what its sizes predict"),
)


@dataclass(frozen=True)
class Setting:
    """Where an item runs.

    Attributes:
        device: "cuda"; or "cpu", for toy sizes under Triton's interpreter.
        output: directory of all results.
        ends: `time.monotonic()` at which the item should be done.
        engine_args: arguments of `vllm.LLM` that take the place of an item's.
        engine_options: of `vllm_hsd.engine.EngineProcess`, for every engine.
    """

    device: str
    output: Path
    ends: float = float("inf")
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    engine_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def toy(self) -> bool:
        return self.device == "cpu"

    def log(self, name: str) -> Path:
        """A log file for a process of the item."""
        return self.output / "logs" / f"{name}.log"

    def time_left(self) -> float:
        """Seconds."""
        return self.ends - time.monotonic()


@dataclass
class Finding:
    """What an item that has passed has seen.

    Attributes:
        lines: sentences with the figures.
        rows: of its CSV file; all have the same keys.
        left_out: parts of the item that could not run, and why.
    """

    lines: list[str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


class ItemModule(Protocol):
    """What `Item.load` returns; `plot(rows, figure)` is there where the rows make a figure."""

    run: Callable[[Setting], Finding]
