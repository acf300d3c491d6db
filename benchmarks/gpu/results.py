"""Results of items: one JSON file each, from which a run goes on where the last one ended."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from benchmarks.gpu.items import Item
from vllm_hsd.checked_files import written_whole

# Entries of `host.description` without which a result is another one.
SAME = ("device", "code", "torch", "triton", "vllm")

Verdict = Literal["passed", "failed", "could not run"]


@dataclass
class Result:
    """What became of an item.

    Attributes:
        reason: why it failed or could not run.
        host: see `host.description`.
        clocks: before and after.
        started: UTC.
        lines, rows, left_out: see `items.Finding`.
    """

    name: str
    verdict: Verdict
    seconds: float
    host: dict[str, str]
    started: str
    clocks: list[str]
    reason: str = ""
    lines: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def save(self, output: Path) -> None:
        path = _path(output, self.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as unfinished:
            unfinished.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, output: Path, item: Item) -> Self | None:
        """The item's last result, None where there is none that can be read."""
        try:
            return cls(**json.loads(_path(output, item.name).read_text()))
        except (OSError, ValueError, TypeError):
            return None


def is_done(result: Result | None, host: dict[str, str]) -> bool:
    """Whether the item has passed with this code and these packages on this device."""
    if result is None or result.verdict != "passed":
        return False
    return all(result.host.get(name) == host[name] for name in SAME)


def _path(output: Path, name: str) -> Path:
    return output / "items" / f"{name}.json"
