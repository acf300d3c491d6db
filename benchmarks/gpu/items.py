"""The items of the proof on a GPU, most valuable first, and what one of them is given and finds.

An item is a test: of `tests/kernels`, or `item.py`, which calls `run(setting)` of the module of its
name. It fails by `pytest.fail`, and cannot run where it is skipped.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_hsd.checked_files import written_whole

# In which a part of an item has ended on a machine with cold caches; where less is left, none is
# started. An engine of random weights takes most of it to start.
PART_SECONDS = 60


@dataclass(frozen=True)
class Item:
    """A test that `prove` runs in a process of its own.

    Attributes:
        claim: what is shown if it passes.
        limit: seconds after which it is ended and has failed. Parts of it that it has no time for
            are left to the next run, see `Setting.part`.
        tests: file or node id of pytest; by default that of `item.py`.
        figure: arguments of `plot.lines` for its rows.
        needs_vllm: whether it runs engines.
        alone: whether it times the device or takes most of its memory.
    """

    name: str
    claim: str
    limit: int = 240
    tests: str = ""
    figure: Mapping[str, Any] = field(default_factory=dict)
    needs_vllm: bool = True
    alone: bool = False

    @property
    def node(self) -> str:
        return self.tests or f"benchmarks/gpu/item.py::test_item[{self.name}]"


STEPS = {"x": "batch", "measures": {"ms_per_step": "ms per step"}, "line": "stack", "panel": "law"}
ITEMS = (
    Item(
        "kernels",
        "verification and sampling kernels give the reference's tokens, also replayed",
        needs_vllm=False,
        tests="tests/kernels/test_kernels_on_gpu.py",
    ),
    Item(
        "proposals",
        "every kernel of a proposal equals its reference on random states",
        needs_vllm=False,
        tests="tests/kernels/test_proposals_on_gpu.py",
    ),
    Item(
        "kernel_times",
        "verification against vLLM's own and against one read of its inputs",
        needs_vllm=False,
        figure={"x": "batch", "measures": {"us": "us"}, "line": "sampler", "panel": "case"},
        alone=True,
    ),
    Item(
        "kernel_distribution",
        "text by the kernels follows the target, a biased control does not",
        needs_vllm=False,
    ),
    Item("boot", "vLLM imports, its V2 runner decodes with CUDA graphs, plain and with a cascade"),
    Item("same_text", "engines: greedy text, equal models, eager and captured, no host sync"),
    Item("levels", "greedy text of most kinds of levels and keys of the V2 runner"),
    Item(
        "defaults",
        "engines without any argument serve: no host sync, nothing compiled later",
        alone=True,
    ),
    Item(
        "step_times",
        "time of a step, no speculation, vLLM's drafters and ours at equal K",
        figure=STEPS,
        alone=True,
    ),
    Item("engine_distribution", "text of engines follows the target, a biased control does not"),
    Item("soak", "requests join, leave and are preempted; seeded text as if each ran alone"),
    Item(
        "forwards",
        "time of a forward pass by the number of tokens",
        figure={"x": "tokens", "measures": {"ms": "ms per forward pass"}, "line": "model"},
        alone=True,
    ),
    Item("step_times_32b", "the same with a large target", figure=STEPS, alone=True),
    Item("memory", "memory of a cascade against what its sizes predict", alone=True),
)


# Variable: items run in toy sizes where there is no GPU.
TOY = "HSD_PROOF_TOY"


@dataclass(frozen=True)
class Setting:
    """Where an item runs.

    Attributes:
        device: "cuda"; or "cpu", for toy sizes, by kernels compiled for it.
        output: directory of all results.
        item: its name.
        origin: what a result belongs to; parts of another origin are run again.
        ends: `time.time()` at which the item should be done.
        engine_args: arguments of `vllm.LLM` that take the place of an item's.
        engine_options: of `vllm_hsd.tools.engine.EngineProcess`, for every engine.
    """

    device: str
    output: Path
    item: str = "item"
    origin: Mapping[str, str] = field(default_factory=dict)
    ends: float = float("inf")
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    engine_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def toy(self) -> bool:
        return self.device == "cpu"

    def log(self, name: str) -> Path:
        """A log file for a process of the item."""
        return self.output / "logs" / f"{name}.log"

    def part(
        self, name: str, make: Callable[[], dict[str, Any]], seconds: float = PART_SECONDS
    ) -> dict[str, Any] | None:
        """What a part of the item has found, in this run or in an earlier one.

        Args:
            make: runs the part; what it finds is kept as JSON.
            seconds: in which it has ended.

        Returns:
            None where there is no time for it.
        """
        path = self.output / "parts" / self.item / (re.sub(r"\W", "_", name) + ".json")
        try:
            kept = json.loads(path.read_text())
            if kept["origin"] == dict(self.origin):
                return kept["found"]
        except (OSError, ValueError, KeyError, TypeError):
            pass
        if self.ends - time.time() < seconds:
            return None
        found = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as unfinished:
            unfinished.write_text(json.dumps({"origin": dict(self.origin), "found": found}))
        return found


@dataclass
class Finding:
    """What an item that has passed has seen.

    Attributes:
        lines: sentences with the figures.
        rows: of its CSV file; all have the same keys.
        left_out: parts of the item that could not run, and why.
        waiting: parts of the item that there was no time for; another run goes on with them.
    """

    lines: list[str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
