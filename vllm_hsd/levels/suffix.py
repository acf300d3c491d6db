"""Suffix lookup: the likeliest continuation in the request's text and in others."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from vllm_hsd.cascade.text_store import read_store
from vllm_hsd.levels.base import (
    Keys,
    LookupKeys,
    Name,
    Probability,
    Target,
    check_store,
)

# A step compares all of them with every request's text.
MAX_SHARED_TOKENS = 1 << 18


class SuffixConfig(Keys):
    """Suffix lookup.

    Attributes:
        store: file of texts to look in, which `vllm-hsd build store` wrote.
        shared_tokens: most tokens of the server's earlier outputs, to any client, to look in; 0 for
            none.
        min_acceptance: a draft ends before the token that is less likely to be accepted.
    """

    example: ClassVar[str] = '{"store": "chats.safetensors"}'

    store: Name | None = None
    shared_tokens: Annotated[int, Field(ge=0, le=MAX_SHARED_TOKENS)] = 0
    min_acceptance: Probability = 0.05


class SuffixLevelConfig(LookupKeys):
    """Suffix lookup: the likeliest continuation in the request's text and in others."""

    kind = "suffix"
    value_keys = SuffixConfig
    drafts_by = "lookup"

    suffix: SuffixConfig

    def check(self, name: str, target: Target, draft_length: int) -> None:
        if self.suffix.store is not None:
            check_store(f"{name}.suffix", "store", self.suffix.store, target)

    def build(self, speculator: Any, index: int) -> Any:
        from vllm_hsd.cascade.shared_outputs import SharedOutputs
        from vllm_hsd.cascade.suffix_lookup import SuffixLookup
        from vllm_hsd.cascade.text_order import order_texts

        keys, device = self.suffix, speculator.device
        texts = None if keys.store is None else order_texts(read_store(keys.store), device)
        shared = SharedOutputs(keys.shared_tokens, device) if keys.shared_tokens else None
        return SuffixLookup(texts, keys.min_acceptance, device, shared)
