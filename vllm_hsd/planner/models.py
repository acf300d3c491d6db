"""Candidate models in transformers: their laws on given contexts, and text drawn from them."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from vllm_hsd.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How every law is made from logits: softmax of logits / temperature, then top-p.

    Temperature 0 is greedy: all mass on the largest logit.
    """

    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(f"temperature is {self.temperature:g}: it must be at least 0.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p:g}: it must be above 0 and at most 1.")

    def laws(self, logits: Tensor) -> Tensor:
        """Laws float32 [..., V] of logits [..., V]."""
        if self.temperature == 0:
            return nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        laws = torch.softmax(logits.float() / self.temperature, dim=-1)
        if self.top_p < 1:
            ranked, order = laws.sort(dim=-1, descending=True)
            # A token stays while the more probable ones together hold less than top_p.
            ranked[ranked.cumsum(-1) - ranked >= self.top_p] = 0
            laws = torch.zeros_like(laws).scatter_(-1, order, ranked)
            laws /= laws.sum(-1, keepdim=True)
        return laws


def truncated(model: Any, layers: int) -> Any:
    """The model that stops after `layers` layers: shares all weights, has its own module tree.

    Final norm and head follow directly, as in an early exit.
    """
    short = copy.copy(model)
    short._modules = dict(model._modules)
    decoder = copy.copy(model.model)
    decoder._modules = dict(decoder._modules)
    decoder.layers = nn.ModuleList(list(model.model.layers)[:layers])
    decoder.config = copy.copy(model.config)
    decoder.config.num_hidden_layers = layers
    short.model = decoder
    short.config = decoder.config
    return short


class Family:
    """A target, its early exits and other drafters, all with one vocabulary.

    Members are ordered as the candidates of a profile: other models, early exits, the target.

    Args:
        target: path or hub name of the target.
        candidates: the same of the drafters.
        early_exits: numbers of layers after which the target may stop.
        device: torch device of the models.

    Raises:
        UserError: the target among its candidates, a model given twice, another vocabulary,
            an exit that the target does not have, a model that cannot be loaded.
    """

    def __init__(
        self,
        target: str,
        candidates: Sequence[str],
        early_exits: Sequence[int] = (),
        device: str = "cpu",
    ):
        _check_names(target, candidates, early_exits)
        self.device = device
        self.target = _load(target, device)
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(target)
        except (OSError, ValueError) as error:
            raise UserError(_cannot_load(f"the tokenizer of '{target}'", error)) from None
        self.exits = tuple(early_exits)
        self.depth: int = self.target.config.num_hidden_layers
        if self.exits:
            _check_exits(target, self.target, self.exits)
        self.drafters = []
        vocabulary = self.tokenizer.get_vocab()
        for path in candidates:
            if _vocabulary(path) not in (None, vocabulary):
                raise UserError(
                    f"candidate '{path}' has another vocabulary than the target '{target}': "
                    f"only drafters with the target's tokenizer can be verified."
                )
            model = _load(path, device)
            ours, theirs = model.config.vocab_size, self.target.config.vocab_size
            if ours != theirs:
                raise UserError(
                    f"candidate '{path}' has a vocabulary of {ours} entries and the target "
                    f"'{target}' one of {theirs}: they must be the same."
                )
            self.drafters.append(model)
        self.members = [
            *self.drafters,
            *(truncated(self.target, layers) for layers in self.exits),
            self.target,
        ]

    @property
    def longest(self) -> int:
        """Tokens that every member can attend to."""
        return min(m.config.max_position_embeddings for m in (*self.drafters, self.target))

    def layers(self, member: int) -> int | None:
        """Layers of the target that a member runs; None for the other models."""
        first = len(self.drafters)
        return None if member < first else (*self.exits, self.depth)[member - first]

    def size(self, member: int) -> int:
        """Parameters that a forward of a member uses."""
        return sum(parameter.numel() for parameter in self.members[member].parameters())

    @torch.inference_mode()
    def logits(self, tokens: Tensor, first: int, members: Sequence[int]) -> dict[int, Tensor]:
        """Logits of some members on the same texts; early exits come from one target pass.

        Args:
            tokens: int64 [B, L], right-padded; padding does not change what stands before it.
            first: position of the first logits wanted.

        Returns:
            [B, L - first, V] per member; row t predicts token first + t + 1.
        """
        keep = tokens.shape[1] - first
        exits = [m for m in members if self.layers(m)]
        deepest = max(exits, key=self.layers, default=None)
        out = {}
        for member in members:
            if member == deepest or member not in exits:
                result = self.members[member](
                    input_ids=tokens,
                    logits_to_keep=keep,
                    output_hidden_states=member == deepest and len(exits) > 1,
                )
                out[member] = result.logits
                if member == deepest:
                    hidden = result.hidden_states
        for member in exits:
            if member != deepest:
                out[member] = self._head(hidden[self.layers(member)][:, first:])
        return out

    def _head(self, hidden: Tensor) -> Tensor:
        """The target's logits from the output of one of its layers."""
        logits = self.target.lm_head(self.target.model.norm(hidden))
        if cap := getattr(self.target.config, "final_logit_softcapping", None):
            logits = cap * torch.tanh(logits / cap)
        return logits

    @torch.inference_mode()
    def draw(
        self,
        member: int,
        contexts: Sequence[Sequence[int]],
        length: int,
        sampling: Sampling,
        generator: torch.Generator,
    ) -> Tensor:
        """Continuations int64 [B, length] of each context, drawn from one member's law.

        Nothing stops at the end of text; the caller cuts there.
        """
        model = self.members[member]
        widest = max(map(len, contexts))
        tokens = torch.zeros(len(contexts), widest, dtype=torch.long, device=self.device)
        mask = torch.zeros_like(tokens)
        for row, context in enumerate(contexts):
            tokens[row, widest - len(context) :] = torch.tensor(context)
            mask[row, widest - len(context) :] = 1
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        drawn, cache = [], None
        for _ in range(length):
            result = model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = result.past_key_values
            laws = sampling.laws(result.logits[:, -1])
            tokens = torch.multinomial(laws, 1, generator=generator)
            drawn.append(tokens)
            mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
            positions = positions[:, -1:] + 1
        return torch.cat(drawn, dim=1)


def _load(path: str, device: str) -> Any:
    transformers_logging.disable_progress_bar()
    # Laws are compared in float32; half precision on a CPU is slow and may not run at all.
    dtype = torch.float32 if device == "cpu" else "auto"
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError) as error:
        raise UserError(_cannot_load(f"model '{path}'", error)) from None
    return model.to(device).eval()


def _cannot_load(what: str, error: Exception) -> str:
    reason = " ".join(str(error).split()).rstrip(".")
    return f"{what} cannot be loaded ({reason})."


def _vocabulary(path: str) -> dict[str, int] | None:
    """A drafter may come without tokenizer files: it only ever sees token ids."""
    try:
        return AutoTokenizer.from_pretrained(path).get_vocab()
    except (OSError, ValueError):
        return None


def _check_names(target: str, candidates: Sequence[str], early_exits: Sequence[int]) -> None:
    if not candidates and not early_exits:
        raise UserError("give at least one candidate or one early exit of the target.")
    seen: set[str] = set()
    for path in candidates:
        real = os.path.realpath(path) if os.path.exists(path) else path
        if real == (os.path.realpath(target) if os.path.exists(target) else target):
            raise UserError(f"the target '{target}' is among its own candidates: remove it.")
        if real in seen:
            raise UserError(f"candidate '{path}' is given twice: remove one.")
        seen.add(real)
    if len(set(early_exits)) != len(early_exits):
        raise UserError(f"early exits {list(early_exits)} repeat themselves: remove one.")


def _check_exits(path: str, model: Any, exits: Sequence[int]) -> None:
    layers = model.config.num_hidden_layers
    for layer in exits:
        if not 1 <= layer < layers:
            raise UserError(
                f"early exit {layer} does not exist: the target '{path}' has {layers} layers, "
                f"so give 1 to {layers - 1}."
            )
    decoder = getattr(model, "model", None)
    if not all(hasattr(decoder, name) for name in ("layers", "norm")):
        raise UserError(
            f"the target '{path}' ({type(model).__name__}) has no decoder of layers and a final "
            f"norm, so its early exits cannot be profiled."
        )
