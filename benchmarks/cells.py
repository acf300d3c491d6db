"""Sets of prompts, and tables that grow cell by cell, for benchmarks that take hours."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import write_csv
from vllm_hsd.planner.prompts import read_prompts


class Table:
    """A CSV file of cells, each of several rows; a stopped benchmark goes on with the next cell."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read()

    def _read(self) -> None:
        self.rows: list[dict[str, Any]] = []
        if self.path.exists():
            with self.path.open() as file:
                self.rows = list(csv.DictReader(file))

    def has(self, **cell: Any) -> bool:
        """Whether there is a row with these values, numbers written as `write_csv` writes them."""
        written = {k: f"{v:.4f}" if isinstance(v, float) else str(v) for k, v in cell.items()}
        return any(written.items() <= row.items() for row in self.rows)

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append a cell."""
        write_csv(self.path, rows, append=True)
        self._read()


def read_sets(directory: Path, count: int) -> tuple[list[Any], dict[str, list[int]]]:
    """The first prompts of every `*.jsonl` file, and the indices of each file's by its name.

    Raises:
        UserError: a file is no prompts file.
        ValueError: there is none.
    """
    prompts: list[Any] = []
    sets: dict[str, list[int]] = {}
    for file in sorted(directory.glob("*.jsonl")):
        chosen = read_prompts(file)[:count]
        sets[file.stem] = list(range(len(prompts), len(prompts) + len(chosen)))
        prompts += chosen
    if not prompts:
        raise ValueError(f"{directory} holds no .jsonl file")
    return prompts, sets
