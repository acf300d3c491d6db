"""Paths, options and CSV files that the benchmarks share.

Run a benchmark from the root of the repository, for example `python -m benchmarks.studies.demo`.
"""

import argparse
import csv
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
MODELS = REPOSITORY / "benchmarks" / "models"
RESULTS = REPOSITORY / "results"


def options(description: str, output: Path) -> argparse.ArgumentParser:
    """A parser that shows the first line of a docstring and knows where results go by default."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument(
        "-o", "--output", type=Path, default=output, help="directory of the results"
    )
    return parser


def on_worker(llm: Any, function: Callable[..., Any], *args: Any) -> Any:
    """What a function of the worker gives on the first rank; runs in an engine's process."""
    return llm.collective_rpc(function, args=args)[0]


def commit() -> str:
    """Short hash of the checked-out commit, with "+" after it where code differs from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True).stdout.strip()
        except OSError:  # no git
            return ""

    results = (":!*.csv", ":!*.png", ":!*.md")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *results)
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else "")


def write_csv(path: Path, rows: Sequence[dict[str, Any]], append: bool = False) -> None:
    """Write rows with the same keys; every row also gets the commit and the machine.

    Args:
        append: keep the rows that the file has already.

    Raises:
        SystemExit: they have other columns.
    """
    # Not where they are read: seconds of imports, and not every table needs them.
    import torch

    from vllm_hsd.tools.cli.bench_report import machine

    path.parent.mkdir(parents=True, exist_ok=True)
    origin = {"commit": commit(), "machine": machine("cpu", torch.get_num_threads())}
    append, columns = append and path.exists(), [*rows[0], *origin]
    if append and path.read_text().split("\n", 1)[0] != ",".join(columns):
        raise SystemExit(f"{path} has other columns: move it away.")
    with path.open("a" if append else "w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if not append:
            writer.writeheader()
        for row in rows:
            cells = {k: f"{v:.4f}" if isinstance(v, float) else v for k, v in row.items()}
            writer.writerow({**cells, **origin})
