"""Levels that are not models of their own: exits of the target, n-grams, bigrams."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from vllm_hsd.config import ConfigError, LevelConfig, NgramConfig
from vllm_hsd.core.bigram import BigramLevel, read_bigram
from vllm_hsd.core.exit_head import EXIT_ARCHITECTURES, ExitHead, read_exit_head
from vllm_hsd.runner_v1.levels import ModelLevel


def check_level_kind(name: str, level: LevelConfig, target_config) -> None:
    """Check a level that loads no model against the target.

    Raises:
        ConfigError: one sentence that names the key.
    """
    if level.kind in ("early_exit", "exit_head"):
        found = target_config.architecture
        if found not in EXIT_ARCHITECTURES:
            raise ConfigError(
                f"{name}.{level.kind} needs a Llama-like target "
                f"({', '.join(EXIT_ARCHITECTURES)}), not {found}: use another kind of level."
            )
    layers = target_config.hf_text_config.num_hidden_layers
    if level.kind == "early_exit" and level.early_exit > layers:
        raise ConfigError(
            f"{name}.early_exit is {level.early_exit}, but the target has {layers} layers: lower "
            "it."
        )
    if level.kind == "bigram":
        _check_bigram(name, level.bigram, target_config)
    if level.kind == "exit_head":
        _check_exit_head(name, level.exit_head, target_config)


def check_exit_order(levels: Sequence[LevelConfig]) -> None:
    """Check that every exit of the target runs more layers than the exits below it.

    Raises:
        ConfigError: one sentence that names the key.
    """
    exits = [
        (i, level, _exit_depth(level))
        for i, level in enumerate(levels)
        if level.kind in ("early_exit", "exit_head")
    ]
    for (i, lower, below), (j, upper, above) in itertools.pairwise(exits):
        if above <= below:
            raise ConfigError(
                f"levels[{j}].{upper.kind} runs {above} layers of the target and cannot improve on "
                f"levels[{i}].{lower.kind}, which runs {below}: order exits by depth, or keep one."
            )


def _exit_depth(level: LevelConfig) -> int:
    return level.early_exit or read_exit_head(level.exit_head).layer


def _check_bigram(name: str, path: str, target_config) -> None:
    if not Path(path).is_file():
        raise ConfigError(f"{name}.bigram: no file '{path}'; `vllm-hsd bigram` writes one.")
    try:
        size = read_bigram(path).vocab_size
    except ValueError as error:
        raise ConfigError(f"{name}.{error}") from error
    vocabulary = target_config.get_vocab_size()
    if size != vocabulary:
        raise ConfigError(
            f"{name}.bigram '{path}' was built for {size} tokens and the target has {vocabulary}: "
            "build it with the target's tokenizer."
        )


def _check_exit_head(name: str, path: str, target_config) -> None:
    if not Path(path).is_dir():
        raise ConfigError(
            f"{name}.exit_head: no directory '{path}'; `vllm-hsd train-heads` writes one."
        )
    try:
        head = read_exit_head(path)
    except ValueError as error:
        raise ConfigError(f"{name}.{error}") from error
    wanted = (target_config.get_vocab_size(), target_config.get_hidden_size())
    if tuple(head.weight.shape) != wanted:
        raise ConfigError(
            f"{name}.exit_head '{path}' has the shape {tuple(head.weight.shape)} and the target "
            f"needs {wanted}: train it for this target."
        )
    layers = target_config.hf_text_config.num_hidden_layers
    if not 1 <= head.layer <= layers:
        raise ConfigError(
            f"{name}.exit_head '{path}' sits on layer {head.layer}, but the target has {layers}: "
            "train it for this target."
        )


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
