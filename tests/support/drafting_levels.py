"""Levels as the budget is told of them: a lookup or a model, and models that verify above it."""

from vllm_hsd.cascade.level import DraftingLevel


def drafting_levels(lengths: list[int], *, looks_up: bool) -> list[DraftingLevel]:
    """Of these draft lengths, cheapest first."""
    above = [DraftingLevel(length, length, verifies=True, ends=True) for length in lengths[1:]]
    return [DraftingLevel(lengths[0], lengths[0], looks_up, ends=not looks_up), *above]
