"""The likeliest token after the last one, by the pairs of tokens in a store of texts."""

from __future__ import annotations

from typing import Any

from vllm_hsd.cascade.bigram import successors
from vllm_hsd.cascade.text_store import read_store
from vllm_hsd.levels.base import LookupKeys, Name, Target, check_store


class BigramLevelConfig(LookupKeys):
    """The likeliest token after the last one.

    Attributes:
        bigram: store that `vllm-hsd build store` wrote.
    """

    kind = "bigram"
    drafts_by = "lookup"
    # The last token is in the window.
    reads_texts = False

    bigram: Name

    def check(self, name: str, target: Target, draft_length: int) -> None:
        check_store(name, self.kind, self.bigram, target, shortest=2)

    def build(self, speculator: Any, index: int) -> Any:
        import torch

        from vllm_hsd.cascade.lookups import lookup_bigram

        tokens, _ = successors(read_store(self.bigram, self.kind))
        successor = torch.from_numpy(tokens).to(speculator.device)
        return lambda state, text: lookup_bigram(state, successor)

    def estimates(self, device: Any) -> Any:
        import torch

        from vllm_hsd.budget.source_choice import Estimates

        _, probs = successors(read_store(self.bigram, self.kind))
        return Estimates(torch.from_numpy(probs).to(device), by_token=True)
