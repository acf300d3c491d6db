"""Command-line options that commands share, types of options, and the text of reports."""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console, RenderableType
from rich.table import Table

from vllm_hsd.errors import UserError, brief, quoted
from vllm_hsd.tools.planner.public_sets import PUBLIC_SETS

T = TypeVar("T")
# Columns of a report.
WIDTH = 98


def integers(text: str) -> list[int]:
    """Numbers with commas between them, as in `--batch-sizes 1,8`."""
    return _listed(text, int, "1,8")


def numbers(text: str) -> list[float]:
    """Decimal numbers with commas between them, as in `--temperatures 0,0.7`."""
    return _listed(text, float, "0,0.7")


def _listed(text: str, kind: Callable[[str], T], example: str) -> list[T]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        message = f"{quoted(text)} is not a list such as {example}"
        raise argparse.ArgumentTypeError(message) from None


def json_object(text: str, option: str) -> dict[str, Any]:
    """The JSON object that an option holds."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{option} is not JSON ({brief(error)}).") from None
    if not isinstance(value, dict):
        raise UserError(f"{option} is not a JSON object.")
    return value


def engine_args(text: str, batch_sizes: Sequence[int] = (), **elsewhere: str) -> dict[str, Any]:
    """The arguments of `vllm.LLM` that --engine-args holds.

    Args:
        batch_sizes: requests at a time, all of which are to run.
        elsewhere: by argument, what to use instead.

    Raises:
        UserError: they are no JSON object, or hold what another option says.
    """
    found = json_object(text, "--engine-args")
    if held := next(filter(elsewhere.get, found), None):
        raise UserError(f"--engine-args must not hold {held}: {elsewhere[held]}.")
    most = found.get("max_num_seqs")
    if isinstance(most, int) and most < max(batch_sizes, default=0):
        raise UserError(
            f"--engine-args has max_num_seqs {most}, but --batch-sizes {max(batch_sizes)}: lower "
            "the one or raise the other."
        )
    return found


def add_engine_options(parser: argparse.ArgumentParser, temperatures: str, output: str) -> None:
    """The options of commands that serve text with engines of their own."""
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE.jsonl|SET",
        help="one JSON object a line with 'prompt' (text), 'turns' or 'messages' (the first "
        f"becomes a chat message), or a public set that is fetched ({', '.join(PUBLIC_SETS)}; "
        "spec_bench:CATEGORY, speed_bench:SUBSET:CATEGORY); default: a few built-in questions",
    )
    parser.add_argument(
        "--temperatures", type=numbers, default=temperatures, metavar="T[,T...]",
        help="temperatures",
    )  # fmt: skip
    parser.add_argument(
        "--dtype",
        default="auto",
        metavar="D",
        help="as for `vllm serve`; auto on a CPU: bfloat16 where a probe finds it works and is "
        "faster, else float32",
    )
    parser.add_argument(
        "--engine-args",
        default="{}",
        metavar="JSON",
        help="further arguments of vllm.LLM, such as '{\"enforce_eager\": true}'",
    )
    parser.add_argument(
        "--output", type=Path, default=Path(output), metavar="DIR",
        help="directory for the results and the engines' logs",
    )  # fmt: skip


def progress(text: str) -> None:
    """Show what is under way: one line on a terminal, a line for every step elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:100]}", end="", file=sys.stderr, flush=True)
    else:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def columns(headings: Sequence[str], rows: Iterable[Sequence[RenderableType]]) -> Table:
    """A table: the first column to the left and wrapped where it is long, the others right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=bool(number))
    for row in rows:
        table.add_row(*row)
    return table


def rendered(parts: Iterable[RenderableType]) -> Console:
    """A report: tables and paragraphs, to be exported as text or as a page."""
    # Names of models are no markup.
    console = Console(width=WIDTH, file=io.StringIO(), record=True, markup=False, highlight=False)
    for part in parts:
        console.print(part)
    return console
