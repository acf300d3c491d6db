"""Command-line options that commands share, and types of options."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_hsd.errors import quoted


def integers(text: str) -> list[int]:
    """Numbers with commas between them, as in `--batch-sizes 1,8`."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a list such as 1,8") from None


def numbers(text: str) -> list[float]:
    """Decimal numbers with commas between them, as in `--temperatures 0,0.7`."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a list such as 0,0.7") from None


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """--prompts of commands that serve text."""
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE.jsonl",
        help="one JSON object a line with 'prompt' (text) or 'turns' (the first becomes a chat "
        "message); default: a few built-in questions",
    )


def add_engine_args(parser: argparse.ArgumentParser) -> None:
    """--engine-args of commands that start engines."""
    parser.add_argument(
        "--engine-args",
        default="{}",
        metavar="JSON",
        help="further arguments of vllm.LLM, such as '{\"enforce_eager\": true}'",
    )
