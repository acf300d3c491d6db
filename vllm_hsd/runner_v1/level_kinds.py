"""Levels that are not models of their own: exits of the target, n-grams, bigrams."""

from __future__ import annotations

import numpy as np
import torch

from vllm_hsd.config import LevelConfig, NgramConfig
from vllm_hsd.core.bigram import BigramLevel, read_bigram
from vllm_hsd.core.exit_head import ExitHead, read_exit_head
from vllm_hsd.runner_v1.levels import ModelLevel


def build_level(level: LevelConfig, runner, vllm_config, index: int):
    """The level of a V1 runner that a configuration asks for, not yet loaded."""
    if level.kind == "model":
        return ModelLevel(runner, vllm_config, index)
    if level.kind == "early_exit":
        return EarlyExitLevel(runner, vllm_config, index, level.early_exit)
    if level.kind == "exit_head":
        return ExitHeadLevel(runner, vllm_config, index, read_exit_head(level.exit_head))
    if level.kind == "bigram":
        return HostedBigramLevel(read_bigram(level.bigram))
    return NgramLevel(level.ngram, vllm_config.model_config.max_model_len)


class EarlyExitLevel(ModelLevel):
    """The target's first layers with its own final norm and head.

    It runs on the target's weights and writes the target's cache: the lower layers' entries of
    target and exit are the same for the same tokens, so it has no cache of its own to fill.

    Args:
        num_layers: layers that run, 1 to the target's depth.
    """

    keeps_cache = False

    def __init__(self, runner, vllm_config, index: int, num_layers: int) -> None:
        super().__init__(runner, vllm_config, index)
        self.num_layers = num_layers

    def attach(self, target_model) -> None:
        """Share the layers of the loaded target."""
        self.target = target_model.unwrap() if hasattr(target_model, "unwrap") else target_model
        self.layers = self.target.model.layers[: self.num_layers]
        self.layer_names = {layer.self_attn.attn.layer_name for layer in self.layers}

    def run(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden, residual = self._through_layers(input_ids, positions)
        return self.target.model.norm(hidden, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.target.compute_logits(hidden)

    def _through_layers(
        self, input_ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = self.target.model.embed_input_ids(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        return hidden, residual


class ExitHeadLevel(EarlyExitLevel):
    """The target's first layers with a norm and a head trained for them."""

    def __init__(self, runner, vllm_config, index: int, head: ExitHead) -> None:
        super().__init__(runner, vllm_config, index, head.layer)
        dtype = vllm_config.model_config.dtype
        self.head = head.to(self.device, dtype)

    def run(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden, residual = self._through_layers(input_ids, positions)
        return hidden + residual

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head.logits(hidden)


class HostedBigramLevel(BigramLevel):
    """A bigram table beside models: it needs nothing of the target."""

    def attach(self, target_model) -> None:
        """Nothing to share."""


class NgramLevel:
    """Prompt lookup with vLLM's own matcher."""

    keeps_cache = False

    def __init__(self, config: NgramConfig, max_model_len: int) -> None:
        # Only now: once numba is loaded, vLLM 0.32 fails to import further Triton kernels.
        from vllm.v1.spec_decode import ngram_proposer

        self.config, self.max_model_len = config, max_model_len
        self.match = ngram_proposer._find_longest_matched_ngram_and_propose_tokens

    def attach(self, target_model) -> None:
        """Nothing to share."""

    def lookup(
        self, tokens: np.ndarray, rows: np.ndarray, ends: np.ndarray, ask: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `cascade.LookupLevel.lookup`."""
        token_ids = np.zeros((len(rows), int(ask.max(initial=0))), dtype=np.int64)
        counts = np.zeros(len(rows), dtype=np.int64)
        for i in np.flatnonzero(ask):
            found = self.match(
                origin_tokens=tokens[rows[i], : ends[i]],
                min_ngram=self.config.min,
                max_ngram=self.config.max,
                max_model_len=self.max_model_len,
                k=int(ask[i]),
            )
            counts[i] = len(found)
            token_ids[i, : counts[i]] = found
        return token_ids, counts
