"""A target and its candidate drafters in transformers: logits on given texts, and drawn text."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging as transformers_logging

from vllm_hsd.cascade.exit_head import EXIT_ARCHITECTURES, ExitHead, read_exit_head
from vllm_hsd.cascade.text_order import order_texts
from vllm_hsd.cascade.text_store import TextStore, read_store
from vllm_hsd.cascade.vocabulary import differing_token, fit_logits, readable
from vllm_hsd.errors import UserError, brief, quoted
from vllm_hsd.levels import LevelConfig
from vllm_hsd.tools.planner.bigram_levels import BigramLevel, BigramModelLevel
from vllm_hsd.tools.planner.eagle3_head import HeadDrafter
from vllm_hsd.tools.planner.lookup_choice import LookupChoice
from vllm_hsd.tools.planner.profile import Candidate, Sampling, real_path
from vllm_hsd.tools.planner.prompt_lookup import PromptLookup
from vllm_hsd.tools.planner.shared_texts import SharedTexts, keeps_keys, text_config
from vllm_hsd.tools.planner.suffix_level import SuffixLevel

# Tokens of a model whose configuration names no longest text, as BLOOM's: vLLM takes so many.
UNNAMED = 2048


def probabilities(sampling: Sampling, logits: Tensor) -> Tensor:
    """Probabilities float32 [..., V] of logits [..., V]."""
    if sampling.temperature == 0:
        return nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    probs = torch.softmax(logits.float() / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        ranked, order = probs.sort(dim=-1, descending=True)
        # A token stays while the more probable ones together hold less than top_p.
        ranked[ranked.cumsum(-1) - ranked >= sampling.top_p] = 0
        probs = torch.zeros_like(probs).scatter_(-1, order, ranked)
        probs /= probs.sum(-1, keepdim=True)
    return probs


def truncated(model: Any, layers: int, head: ExitHead | None = None) -> Any:
    """The model that stops after `layers` layers: shares its weights, has its own module tree.

    Final norm and output head follow directly: the model's, as in an early exit, or those of an
    exit head.
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
    if head is not None:
        weight = model.lm_head.weight
        head = head.to(weight.device, weight.dtype)
        norm = nn.RMSNorm(len(head.norm), eps=head.eps)
        norm.weight = nn.Parameter(head.norm, requires_grad=False)
        vocabulary, hidden = head.weight.shape
        linear = nn.Linear(hidden, vocabulary, bias=False, device="meta")
        linear.weight = nn.Parameter(head.weight, requires_grad=False)
        decoder.norm, short.lm_head = norm, linear
        # They belong to the model's own head.
        decoder.config.final_logit_softcapping, decoder.config.logits_scaling = None, 1.0
    return short


def _head_logits(model: Any, hidden: Tensor) -> Tensor:
    """[..., V] logits that a transformers model computes from its last layer's output."""
    logits = model.lm_head(model.model.norm(hidden)) / getattr(model.config, "logits_scaling", 1.0)
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


class ModelSet:
    """A target, its exits and other drafters, all with one vocabulary.

    Models are numbered as the candidates of a profile; the target comes last. Prompt lookups have
    no probabilities and are left out of everything here.

    Raises:
        UserError: the target among its candidates, a candidate given twice, another vocabulary,
            an exit that the target does not have, a file that cannot be read.
    """

    def __init__(self, target: str, candidates: Sequence[Candidate], device: str = "cpu"):
        _check_names(target, candidates)
        self.candidates, self.device = list(candidates), device
        self.target = _load(target, device)
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(target)
        except Exception as error:  # tokenizers raises no other for files that it cannot read
            text = f"the tokenizer of '{target}' cannot be loaded ({brief(error)})."
            raise UserError(text) from None
        self.vocabulary: int = text_config(self.target).vocab_size
        self.words = self.tokenizer.get_vocab()
        self.models: list[Any] = []
        for candidate in candidates:
            self.models.append(self.measured(candidate.level))
        self.models.append(self.target)
        self._texts: dict[int, SharedTexts] = {}
        found = (self.layers(model) for model in range(len(candidates)))
        depths = [depth for depth in found if depth is not None]
        if len(set(depths)) < len(depths):
            raise UserError(
                f"two exits run equally many layers of the target ({depths}): one engine cannot "
                f"host both, so measure one of them."
            )

    def measured(self, level: LevelConfig) -> Any:
        """A model, or a lookup, which is replayed; what a candidate before has is taken from it."""
        for candidate, model in zip(self.candidates, self.models, strict=False):
            if candidate.level == level:
                return model
        own: Any = level
        value = getattr(own, level.kind)
        match level.kind:
            case "model":
                return self.drafter(value)
            case "early_exit" | "exit_head":
                return self.exit(own.target_layers, value if level.kind == "exit_head" else None)
            case "eagle3":
                return HeadDrafter(value, self.target)
            case "ngram":
                return PromptLookup(value.min, value.max)
            case "suffix":
                # Without earlier outputs of the server.
                store = value.store and order_texts(self.store(value.store, level.kind), "cpu")
                return SuffixLevel(store, value.min_acceptance)
            case "bigram":
                return BigramLevel(self.store(value, level.kind))
            case "bigram_model":
                return BigramModelLevel(self.store(value, level.kind), self.device)
            case "sources":
                return LookupChoice([self.measured(each) for each in value], own.min_acceptance)
        raise UserError(f"`vllm-hsd profile` does not measure levels of kind '{level.kind}'.")

    def drafter(self, path: str) -> Any:
        target = self.target.config.name_or_path
        tokens = _vocabulary(path)
        if tokens is not None and (differing := differing_token(tokens, self.words)) is not None:
            raise UserError(
                f"candidate '{path}' has another vocabulary than the target '{target}', token "
                f"{differing} for one: only drafters with the target's tokenizer can be verified."
            )
        model = _load(path, self.device)
        if tokens is None:
            self._check_vocabulary(f"candidate '{path}'", text_config(model).vocab_size)
        return model

    def _check_vocabulary(self, name: str, size: int) -> None:
        if size != self.vocabulary:
            raise UserError(
                f"{name} has a vocabulary of {size} entries and the target one of "
                f"{self.vocabulary}: they must be the same."
            )

    def store(self, path: str, kind: str) -> TextStore:
        store = read_store(path, kind)
        self._check_vocabulary(f"the store {quoted(path)}", store.vocab_size)
        return store

    def exit(self, layers: int, head_path: str | None) -> Any:
        architecture, config = type(self.target).__name__, self.target.config
        if architecture not in EXIT_ARCHITECTURES:
            raise UserError(
                f"exits work with the targets {', '.join(EXIT_ARCHITECTURES)}, not {architecture}: "
                "leave them out."
            )
        head, name = None, "early exit"
        if head_path is not None:
            head, name = read_exit_head(head_path), f"exit head {quoted(head_path)} at layer"
            needed = self.vocabulary, config.hidden_size
            if tuple(head.weight.shape) != needed:
                raise UserError(
                    f"exit head {quoted(head_path)} has the shape {tuple(head.weight.shape)} and "
                    f"the target needs {needed}: train it for this target."
                )
        depth, first = config.num_hidden_layers, int(head is None)
        if not first <= layers < depth:
            raise UserError(
                f"{name} {layers} does not exist: the target has {depth} layers, so give {first} "
                f"to {depth - 1}."
            )
        return truncated(self.target, layers, head)

    @property
    def heads(self) -> list[int]:
        """The candidates whose probabilities depend on where a draft began."""
        return [i for i, each in enumerate(self.models) if isinstance(each, HeadDrafter)]

    @property
    def longest(self) -> int:
        """Tokens that every model can attend to."""
        configs = [text_config(model) for model in self.models if isinstance(model, nn.Module)]
        configs += [self.models[head].config for head in self.heads]
        return min(getattr(config, "max_position_embeddings", UNNAMED) for config in configs)

    @property
    def lookups(self) -> list[int]:
        """The candidates that offer point masses."""
        return [i for i, each in enumerate(self.candidates) if each.is_lookup]

    @property
    def with_probabilities(self) -> list[int]:
        """The models that are not lookups."""
        return [i for i in range(len(self.models)) if i not in self.lookups]

    def layers(self, model: int) -> int | None:
        """Layers of the target that a model runs; None for other models."""
        found = self.models[model]
        if model < len(self.candidates) and not self.candidates[model].level.runs_target:
            return None
        return text_config(found).num_hidden_layers

    def drafters_for(self, model: int) -> list[int]:
        """Candidates that may draft for a candidate: cheaper exits, and any other model."""
        if not isinstance(self.models[model], nn.Module):
            return []
        own = self.layers(model)
        return [
            other
            for other in range(len(self.candidates))
            if other != model
            and (own is None or (depth := self.layers(other)) is None or depth < own)
        ]

    @torch.inference_mode()
    def logits(self, tokens: Tensor, first: int, models: Sequence[int]) -> dict[int, Tensor]:
        """Logits of some models on the same texts; exits come from one pass of the target.

        Args:
            tokens: int64 [B, L], right-padded; padding does not change what comes before it.
            first: position of the first logits to compute.

        Returns:
            [B, L - first, V] per model; row t predicts token first + t + 1.
        """
        keep = tokens.shape[1] - first
        depths = {m: depth for m in models if (depth := self.layers(m)) is not None}
        deepest = max(depths, key=depths.__getitem__, default=None)
        out, hidden = {}, ()
        for model in models:
            found = self.models[model]
            if isinstance(found, BigramModelLevel):
                out[model] = found.logits(tokens[:, first:].cpu().numpy())
            elif isinstance(found, HeadDrafter):
                out[model] = torch.stack([found.first_logits(row, first) for row in tokens])
            elif model == deepest or model not in depths:
                with_hidden = model == deepest and len(depths) > 1
                keys = {"logits_to_keep": keep, "output_hidden_states": with_hidden}
                result = self._forward(found, tokens, **keys)
                out[model] = result.logits
                if with_hidden:
                    hidden = result.hidden_states
        for model, depth in depths.items():
            if model != deepest:
                found = self.models[model]
                out[model] = _head_logits(found, hidden[depth][:, first:])
        return out

    def _forward(self, model: Any, tokens: Tensor, **keys: Any) -> Any:
        """A forward pass with logits over the target's vocabulary."""
        result = model(input_ids=readable(tokens, text_config(model).vocab_size), **keys)
        result.logits = fit_logits(result.logits, self.vocabulary)
        return result

    @torch.inference_mode()
    def draw(
        self,
        model: int,
        contexts: Sequence[Sequence[int]],
        length: int,
        sampling: Sampling,
        generator: torch.Generator,
    ) -> Tensor:
        """Continuations int64 [B, length] of each context, drawn from one model.

        Nothing stops at the end of text; the caller cuts there.
        """
        drawing, cache = self.models[model], None
        if keeps_keys(drawing):
            cache, mask, tokens = self._begin(model, contexts)
            mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
        else:
            tokens = nn.utils.rnn.pad_sequence(
                [torch.tensor(context, device=self.device) for context in contexts],
                batch_first=True,
                padding_value=-1,
                padding_side="left",
            )
            mask = (tokens >= 0).long()
            tokens = tokens.clamp_min(0)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
        drawn = []
        for _ in range(length):
            result = self._forward(
                drawing,
                tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = result.past_key_values
            probs = probabilities(sampling, result.logits[:, -1])
            tokens = torch.multinomial(probs, 1, generator=generator)
            drawn.append(tokens)
            mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
            positions = positions[:, -1:] + 1
        return torch.cat(drawn, dim=1)

    @torch.inference_mode()
    def continued(
        self, model: int, contexts: Sequence[Sequence[int]], tokens: Tensor
    ) -> Tensor | None:
        """Logits [B, L, V] of a model that predict tokens int64 [B, L] after contexts.

        None for a model that has to read each text whole: `logits` has them.
        """
        found = self.models[model]
        if not keeps_keys(found):
            return None
        cache, mask, last = self._begin(model, contexts)
        mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
        result = self._forward(
            found,
            torch.cat([last, tokens[:, :-1]], dim=1),
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1)[:, -tokens.shape[1] :],
            past_key_values=cache,
            use_cache=True,
        )
        logits: Tensor = result.logits
        return logits

    def _begin(
        self, model: int, contexts: Sequence[Sequence[int]]
    ) -> tuple[DynamicCache, Tensor, Tensor]:
        texts = self._texts.setdefault(model, SharedTexts(self.device))
        return texts.begin(partial(self._forward, self.models[model]), contexts)


def _load(path: str, device: str) -> Any:
    transformers_logging.disable_progress_bar()
    # Probabilities are compared in float32; half precision on a CPU is slow and may not run.
    dtype = torch.float32 if device == "cpu" else "auto"
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        return model.eval().to(device)  # type: ignore[arg-type]  # its stub lacks the arguments
    except Exception as error:  # packages for quantized weights, damaged files, too little memory
        raise UserError(f"model '{path}' cannot be loaded ({brief(error)}).") from None


def _vocabulary(path: str) -> dict[str, int] | None:
    """A drafter may come without tokenizer files: it only ever sees token ids."""
    try:
        return AutoTokenizer.from_pretrained(path).get_vocab()
    except Exception:  # as above
        return None


def _check_names(target: str, candidates: Sequence[Candidate]) -> None:
    if not candidates:
        raise UserError("give at least one candidate: --models, --exits, --exit-heads, "
                        "--eagle3, --suffix, --bigram, --bigram-model or --ngram.")  # fmt: skip
    seen: set[str] = set()
    for candidate in candidates:
        level = candidate.keys()
        if "model" in level and real_path(level["model"]) == real_path(target):
            raise UserError(f"the target '{target}' is among its own candidates: remove it.")
        key = str({kind: real_path(value) for kind, value in level.items()})
        if key in seen:
            raise UserError(f"candidate '{candidate.name}' is given twice: remove one.")
        seen.add(key)
