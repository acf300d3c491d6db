"""A table of token pairs."""

from __future__ import annotations

from typing import Any

from vllm_hsd.levels.base import (
    Measuring,
    Name,
    Place,
    Target,
    VerifyingKeys,
    check_vocabulary,
    named,
)


class BigramLevelConfig(VerifyingKeys):
    """A table of token pairs.

    Attributes:
        bigram: file that `vllm-hsd build bigram` wrote.
    """

    kind = "bigram"
    on_v2 = "lookup"

    bigram: Name

    def check(self, name: str, target: Target, draft_length: int) -> None:
        """See `LevelConfig.check`."""
        from vllm_hsd.core.bigram import bigram_vocab_size, read_bigram

        with named(name):
            check_vocabulary("bigram", self.bigram, bigram_vocab_size(self.bigram), target)
            read_bigram(self.bigram)

    def build_v1(self, place: Place) -> Any:
        """See `LevelConfig.build_v1`."""
        from vllm_hsd.core.bigram import BigramLevel, read_bigram

        return BigramLevel(read_bigram(self.bigram), place.runner.device)

    def build_v2(self, speculator: Any, index: int) -> Any:
        """See `LevelConfig.build_v2`."""
        import torch

        from vllm_hsd.core.bigram import read_bigram
        from vllm_hsd.core.program import BigramProgramLookup

        successors = torch.from_numpy(read_bigram(self.bigram).successors())
        return BigramProgramLookup(successors.to(speculator.device))

    def measured(self, models: Measuring) -> Any:
        """See `LevelConfig.measured`."""
        return models.bigram(self.bigram)
