"""Speculative configurations of the real model: every source of drafts alone, and their mix."""

from typing import Any

DRAFT_LENGTH = 8
NGRAM: dict[str, Any] = {"ngram": {"max": 4}}


def sources(length: int = DRAFT_LENGTH, **keys: Any) -> list[dict[str, Any]]:
    """Configurations of method "hsd", in the order of the tables.

    Args:
        length: longest draft.
        keys: further keys of every configuration, such as `verifier`.
    """
    return [
        {"method": "hsd", "num_speculative_tokens": length, "levels": [level], **keys}
        for level in levels()
    ]


def levels() -> list[dict[str, Any]]:
    """The level of every source, and last the one that mixes them."""
    return [NGRAM]


def drafter() -> dict[str, Any]:
    """The level for tables of draft lengths and verifiers: the best one that draws its drafts."""
    return NGRAM
