"""The state of one generation of the reference engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from vllm_hsd.rules.rng import host_uniforms
from vllm_hsd.tools.reference.batch import DraftBatch, Level
from vllm_hsd.tools.reference.stopping import EntropyThresholds

ONLY = np.zeros(1, dtype=np.int64)  # the batch holds one request


class Request:
    """Tokens so far, valid lengths of the caches, and random numbers of one request.

    Args:
        tokens: the tokens to continue.
        capacity: largest number of tokens, drafts included.
        temperature_scales: of every drafter, then of the target (1).
        temperature, top_k, top_p, seed: see `ReferenceEngine.generate`.
        eos: token that ends the request, -1 for none.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        capacity: int,
        temperature_scales: Sequence[float],
        temperature: float,
        top_k: int,
        top_p: float,
        seed: int,
        eos: int,
    ) -> None:
        self.tokens = np.zeros((1, capacity), dtype=np.int32)
        self.length = len(tokens)
        self.tokens[0, : self.length] = tokens
        self.cached = np.zeros((len(temperature_scales), 1), dtype=np.int64)
        self.greedy, self.eos = temperature == 0, eos
        self.warpers = []
        if not self.greedy:
            self.warpers = [_warpers(temperature * s, top_k, top_p) for s in temperature_scales]
        self.seed, self.draws = seed, 0
        self.thresholds = EntropyThresholds.fresh(len(temperature_scales) - 1, 1)

    def probs(self, logits: torch.Tensor, model: int) -> torch.Tensor:
        """[n, V] float64 probabilities that a model draws from; one-hot at temperature 0."""
        if self.greedy:
            best = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1])
            return best.double()
        # No warper here reads the token ids. transformers annotates legacy tensor types.
        scores = self.warpers[model](None, logits.double())  # type: ignore[arg-type]
        return scores.softmax(-1)

    def uniforms(self, requests: np.ndarray, counts: np.ndarray, model: int) -> np.ndarray:
        """[sum(counts)] float64 uniforms; one counter for all models, which only increases."""
        count = int(counts.sum())
        draws = np.arange(self.draws, self.draws + count)
        self.draws += count
        return host_uniforms(np.array(self.seed), np.array(model), draws)

    def draw(self, count: int, model: int) -> list[float]:
        """The next `count` of these uniforms."""
        found: list[float] = self.uniforms(ONLY, np.array([count]), model).tolist()
        return found

    def draft_batch(self) -> DraftBatch:
        return DraftBatch(
            tokens=self.tokens,
            end=np.array([self.length]),
            cached=self.cached[:-1],
            eos=np.array([self.eos]),
            greedy=self.greedy,
            probs=lambda logits, requests, model: self.probs(logits, model),
            uniforms=self.uniforms,
            thresholds=self.thresholds,
        )

    def logits_along(self, level: Level, model: int, path: Sequence[int]) -> torch.Tensor:
        """[len(path) + 1, V] logits after the tokens so far and after each token of `path`.

        `level` runs, `model` is its row in `cached`.
        """
        end = self.length + len(path)
        self.tokens[0, self.length : end] = path
        valid = self.cached[model]
        logits = level.forward(self.tokens, ONLY, valid, end - valid, np.array([len(path) + 1]))
        # The next call needs the first of these logits again, and paths differ after it.
        self.cached[model] = self.length - 1
        return logits

    def commit(self, emitted: Sequence[int]) -> None:
        """Append the tokens of a step; caches stay valid up to the last token before the end."""
        self.tokens[0, self.length : self.length + len(emitted)] = emitted
        self.length += len(emitted)
        self.cached = np.minimum(self.cached, self.length - 1)


def _warpers(temperature: float, top_k: int, top_p: float) -> LogitsProcessorList:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    return warpers
