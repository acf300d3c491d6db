"""An n-gram language model of a store of texts and of the request's own text."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from vllm_hsd.levels.base import Measuring, Name, Target, VerifyingKeys, check_store

MAX_ORDER = 6


class NgramModelLevelConfig(VerifyingKeys):
    """An n-gram language model of a store of texts and of the request's own text.

    Attributes:
        ngram_model: store that `vllm-hsd build store` wrote.
        order: longest context in tokens.
    """

    kind = "ngram_model"
    drafts_by = "counts"
    reads_texts = True

    ngram_model: Name
    order: Annotated[int, Field(ge=1, le=MAX_ORDER)] = MAX_ORDER

    def check(self, name: str, target: Target, draft_length: int) -> None:
        check_store(name, self.kind, self.ngram_model, target, shortest=2)

    def build(self, speculator: Any, index: int) -> Any:
        from vllm_hsd.cascade.ngram_rows import NgramRows
        from vllm_hsd.cascade.text_store import read_store

        store = read_store(self.ngram_model, self.kind)
        return NgramRows.of(store, self.order, speculator.device)

    def measured(self, models: Measuring) -> Any:
        return models.ngram_model(self.ngram_model, self.order)
