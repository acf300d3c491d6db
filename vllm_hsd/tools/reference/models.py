"""Hugging Face models as target and levels of the reference engine."""

from __future__ import annotations

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from vllm_hsd.tools.lookup_level import UNLIMITED


class HuggingFaceLevel:
    """A causal language model, for one request at a time.

    Args:
        model: on any device; it is put into evaluation mode.
        keeps_cache: keep keys and values between calls; False recomputes everything in every
            call, for models whose cache cannot drop tokens (sliding windows, recurrent layers).

    Raises:
        ValueError: keeps_cache is set for such a model.
    """

    def __init__(self, model: PreTrainedModel, keeps_cache: bool = True) -> None:
        self.model = model.eval()
        self.keeps_cache = keeps_cache
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.context_length = longest or UNLIMITED
        self.cache = DynamicCache(config=model.config)
        if keeps_cache and (any(self.cache.is_sliding) or any(self.cache.is_linear)):
            raise ValueError(
                f"keeps_cache: the cache of {type(model).__name__} cannot drop rejected tokens "
                "(sliding windows or recurrent layers): pass keeps_cache=False."
            )

    @torch.inference_mode()
    def forward(
        self,
        tokens: np.ndarray,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        num_logits: np.ndarray,
    ) -> torch.Tensor:
        """Of one request, the logits float64 on the CPU."""
        (row,), (start,), (count,), (kept,) = rows, starts, counts, num_logits
        end = start + count
        if not self.keeps_cache:
            start = 0
        elif start == 0:
            self.cache = DynamicCache(config=self.model.config)
        else:
            self.cache.crop(int(start) - self.cache.get_seq_length())
        ids = torch.tensor([tokens[row, start:end].tolist()], device=self.model.device)
        past = {"past_key_values": self.cache} if self.keeps_cache else {"use_cache": False}
        return self.model(ids, **past).logits[0, -kept:].double().cpu()
