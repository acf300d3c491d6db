"""A bigram model of a store of texts: tokens drawn after the last one."""

from __future__ import annotations

from typing import Any

from vllm_hsd.cascade.text_store import read_store
from vllm_hsd.levels.base import Name, Target, VerifyingKeys, check_store


class BigramModelLevelConfig(VerifyingKeys):
    """Draws the next token by how often it followed the last one in a store of texts.

    Attributes:
        bigram_model: store that `vllm-hsd build store` wrote.
    """

    kind = "bigram_model"
    drafts_by = "counts"

    bigram_model: Name

    def check(self, name: str, target: Target, draft_length: int) -> None:
        check_store(name, self.kind, self.bigram_model, target, shortest=2)

    def build(self, speculator: Any, index: int) -> Any:
        from vllm_hsd.cascade.bigram_rows import BigramRows

        store = read_store(self.bigram_model, self.kind)
        return BigramRows.of(store, speculator.dtype, speculator.device)
