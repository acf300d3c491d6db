"""An n-gram language model of a store of texts and of the request's own text."""

from __future__ import annotations

from typing import Any

from vllm_hsd.errors import UserError, quoted
from vllm_hsd.levels.base import Name, Place, Target, VerifyingKeys, check_vocabulary, named


class NgramModelLevelConfig(VerifyingKeys):
    """An n-gram language model of a store of texts and of the request's own text.

    Attributes:
        ngram_model: store that `vllm-hsd build suffix` wrote.
    """

    kind = "ngram_model"
    may_rest = True

    ngram_model: Name

    def check(self, name: str, target: Target, draft_length: int) -> None:
        """See `LevelConfig.check`."""
        from vllm_hsd.core.suffix_store import read_store, store_vocab_size

        key, path = self.kind, self.ngram_model
        with named(name):
            check_vocabulary(key, path, store_vocab_size(path, key), target)
            store = read_store(path, key)
            if len(store.tokens) == len(store.starts) - 1:
                raise UserError(
                    f"{key}: {quoted(path)} has no text of two tokens: build it from longer texts."
                )

    def build_v1(self, place: Place) -> Any:
        """See `LevelConfig.build_v1`."""
        from vllm_hsd.core.ngram_model import NgramModelLevel
        from vllm_hsd.core.suffix_store import read_store

        store = read_store(self.ngram_model, self.kind)
        return NgramModelLevel(store, place.runner.device)
