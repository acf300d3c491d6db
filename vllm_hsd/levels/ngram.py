"""Prompt lookup: what followed an earlier occurrence of the text's end in the same text."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from vllm_hsd.cascade.level import ngram_confidence, of_each_token
from vllm_hsd.levels.base import LONGEST_DRAFT, Keys, LookupKeys


class NgramConfig(Keys):
    """Prompt lookup.

    Attributes:
        max: longest n-gram at the end of the text that is looked up, in tokens.
        min: shortest.
    """

    example: ClassVar[str] = '{"max": 4}'

    max: Annotated[int, Field(ge=1, le=1024)] = 4
    min: Annotated[int, Field(ge=1, le=1024)] = 1

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"has min {self.min} above max {self.max}: lower min or raise max")
        return self


class NgramLevelConfig(LookupKeys):
    """Prompt lookup."""

    kind = "ngram"
    value_keys = NgramConfig
    drafts_by = "lookup"

    ngram: NgramConfig

    def build(self, speculator: Any, index: int) -> Any:
        from vllm_hsd.cascade.lookups import lookup_ngram

        return partial(lookup_ngram, shortest=self.ngram.min, longest=self.ngram.max)

    def estimates(self, device: Any) -> Any:
        import torch

        from vllm_hsd.budget.source_choice import Estimates

        each = torch.from_numpy(of_each_token(ngram_confidence(LONGEST_DRAFT)))
        return Estimates(each.to(device), by_token=False)
