"""Types of command-line options."""

from __future__ import annotations

import argparse

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
