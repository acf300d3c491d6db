"""Hugging Face models as target and levels of the reference engine."""

from __future__ import annotations

import numpy as np
import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from vllm_hsd.tools.lookup_level import UNLIMITED


class HuggingFaceLevel:
    """A causal language model or an encoder-decoder, for one request at a time.

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
        self.encoder_decoder = bool(model.config.is_encoder_decoder)
        cache = DynamicCache(config=model.config)
        if keeps_cache and (any(cache.is_sliding) or any(cache.is_linear)):
            raise ValueError(
                f"keeps_cache: the cache of {type(model).__name__} cannot drop rejected tokens "
                "(sliding windows or recurrent layers): pass keeps_cache=False."
            )

    @torch.inference_mode()
    def begin(self, prompt: list[int]) -> list[int]:
        """Start a request; returns what is continued, the prompt or a decoder's start token."""
        self.cache: DynamicCache | EncoderDecoderCache | None = None
        if self.keeps_cache:
            self.cache = DynamicCache(config=self.model.config)
            if self.encoder_decoder:
                self.cache = EncoderDecoderCache(self.cache, DynamicCache())
        if not self.encoder_decoder:
            return prompt
        self.encoded = self.model.get_encoder()(input_ids=self._ids(prompt))
        return [self.model.config.decoder_start_token_id]

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
        if self.cache is None:
            start, count = 0, start + count
        else:
            self.cache.crop(int(start) - self.cache.get_seq_length())
        ids = self._ids(tokens[row, start : start + count].tolist())
        inputs = {"input_ids": ids}
        if self.encoder_decoder:
            inputs = {"decoder_input_ids": ids, "encoder_outputs": self.encoded}
        output = self.model(**inputs, past_key_values=self.cache, use_cache=self.keeps_cache)
        return output.logits[0, count - kept :].double().cpu()

    def _ids(self, tokens: list[int]) -> torch.Tensor:
        return torch.tensor([tokens], device=self.model.device)
