"""Command-line options that commands share, types of options, and the text of reports."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from vllm_hsd.errors import UserError, brief, quoted

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


def add_engine_options(parser: argparse.ArgumentParser, temperatures: str, output: str) -> None:
    """The options of commands that serve text with engines of their own."""
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE.jsonl",
        help="one JSON object a line with 'prompt' (text) or 'turns' (the first becomes a chat "
        "message); default: a few built-in questions",
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


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left and cut where it is long, others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first = min(widths[0], WIDTH - sum(widths[1:]) - 2 * len(widths[1:]))
    return [
        "  ".join(
            [
                f"{name if len(name) <= first else name[: first - 1] + '…':{first}}",
                *(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)),
            ]
        ).rstrip()
        for name, *cells in rows
    ]


def wrapped(sentence: str, indent: str = "") -> list[str]:
    """Lines of a paragraph; those after the first one are indented."""
    return textwrap.wrap(sentence, WIDTH, subsequent_indent=indent)
