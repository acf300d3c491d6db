"""Levels as the budget is told of them: a lookup or a model, and models above it."""

from vllm_hsd.cascade.level import DraftingLevel


def drafting_levels(
    lengths: list[int], *, looks_up: bool, verify: bool = True
) -> list[DraftingLevel]:
    """Of these draft lengths, cheapest first."""
    above = [DraftingLevel(length, length, verifies=verify, ends=True) for length in lengths[1:]]
    return [DraftingLevel(lengths[0], lengths[0], looks_up, ends=not looks_up), *above]
