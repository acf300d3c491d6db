"""The EAGLE-3 head in plain torch: one decoder layer, several training-time-test steps.

Source: "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test", sections 3.1-3.2. Names and arithmetic are those of vLLM's `Eagle3LlamaForCausalLM`.
`vllm-hsd profile` measures heads with it, and benchmarks/models/eagle3 trains one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from vllm_hsd.checked_files import read_json
from vllm_hsd.errors import UserError, brief, quoted

ARCHITECTURES = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"}
TARGETS = ("LlamaForCausalLM", "Qwen3ForCausalLM")
# Keys of a head's config.json that change its arithmetic, with the only values that are known here.
_KNOWN: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "norm_output": False,
    "logit_scale": 1.0,
    "rope_scaling": None,
    "quantization_config": None,
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a head; those of its target except for the draft vocabulary.

    Attributes:
        layers: the head reads the residual stream after so many of the target's layers.
        fc_norm: whether it norms each of these states.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    layers: tuple[int, ...]
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    fc_norm: bool = True


class Norm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps)
        return y.to(x.dtype)


class Attention(nn.Module):
    """Projections of the head's attention: it reads the embedding and the state side by side."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        heads, kv = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
        self.q_proj = nn.Linear(2 * s.hidden_size, heads, bias=False)
        self.k_proj = nn.Linear(2 * s.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(2 * s.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(heads, s.hidden_size, bias=False)
        self.groups = s.num_attention_heads // s.num_key_value_heads
        self.head_dim = s.head_dim

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [batch, heads, time, head_dim], positions applied."""
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (y.repeat_interleave(self.groups, 1) for y in (rotate(k, cos, sin), v))
        return rotate(q, cos, sin), k, v


class MLP(nn.Module):
    """Gated feed-forward layer of Llama."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.up_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.down_proj = nn.Linear(s.intermediate_size, s.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The head's only decoder layer."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(s.hidden_size, s.rms_norm_eps)
        self.hidden_norm = Norm(s.hidden_size, s.rms_norm_eps)
        self.post_attention_layernorm = Norm(s.hidden_size, s.rms_norm_eps)
        self.self_attn = Attention(s)
        self.mlp = MLP(s)


def rotary(time: int, s: Shape) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, each [time, head_dim // 2] float32."""
    inverse = s.rope_theta ** -(torch.arange(0, s.head_dim, 2) / s.head_dim)
    angles = torch.arange(time)[:, None] * inverse
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [..., time, head_dim], halves rotated together (NeoX style)."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of training-time-test step `len(keys)`.

    A draft at position s of step j stands on target states up to s - j + 1, and on its own
    earlier steps: step m of the same draft wrote the key at position s - j + m.

    Args:
        q: [batch, heads, time, head_dim] queries of the last step.
        keys: Per step [batch, heads, time, head_dim]; the first comes from target states.
        values: Likewise.

    Returns:
        [batch, time, heads * head_dim]. Rows below `len(keys) - 1` belong to no draft.
    """
    time, back = q.shape[2], len(keys) - 1
    scale = 1 / math.sqrt(q.shape[3])
    scores = q @ keys[0].transpose(2, 3) * scale
    seen = torch.ones(time, time, dtype=torch.bool, device=q.device).tril(-back)
    # A row that sees nothing belongs to no draft; looking at itself keeps it finite.
    seen[:back] |= torch.eye(time, dtype=torch.bool, device=q.device)[:back]
    columns = [scores.masked_fill(~seen, -torch.inf)]
    shifted = []
    for m in range(1, back + 1):
        shift = back - m
        columns.append((q * delay(keys[m], shift)).sum(-1, keepdim=True) * scale)
        shifted.append(delay(values[m], shift))
    weights = torch.cat(columns, -1).float().softmax(-1).to(q.dtype)
    out = weights[..., :time] @ values[0]
    for m, value in enumerate(shifted):
        out = out + weights[..., time + m, None] * value
    return out.transpose(1, 2).flatten(2)


def delay(x: Tensor, steps: int) -> Tensor:
    """x [..., time, size] moved to later times; the first rows are zero."""
    return x if not steps else F.pad(x[..., :-steps, :], (0, 0, steps, 0))


class Head(nn.Module):
    """EAGLE-3 head over a reduced draft vocabulary.

    Args:
        shape: its sizes.
        draft_tokens: [draft_vocab_size] int64, ascending target ids of the draft vocabulary.
    """

    def __init__(self, shape: Shape, draft_tokens: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.fc_norm = nn.ModuleList(
            Norm(shape.hidden_size, shape.rms_norm_eps) if shape.fc_norm else nn.Identity()
            for _ in shape.layers
        )
        self.fc = nn.Linear(len(shape.layers) * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = Layer(shape)
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.draft_tokens = draft_tokens
        # [vocab_size, hidden] of a checkpoint with its own; None for the target's.
        self.embedding: Tensor | None = None

    def combine(self, states: Tensor) -> Tensor:
        """Auxiliary states [..., layers, hidden] to the head's input [..., hidden]."""
        parts = [norm(states[..., i, :]) for i, norm in enumerate(self.fc_norm)]
        return self.fc(torch.cat(parts, -1))

    def forward(self, embeds: Tensor, states: Tensor, steps: int) -> list[Tensor]:
        """Training-time test over whole sequences.

        Args:
            embeds: [batch, time, hidden], embedding of the token after each position.
            states: [batch, time, layers, hidden], auxiliary states of each position.
            steps: Draft tokens in a row.

        Returns:
            Per step [batch, time, hidden], what the output matrix reads. Step j (from 0) is
            meaningful from position j on.
        """
        layer = self.midlayer
        cos, sin = (each.to(embeds.device) for each in rotary(embeds.shape[1], self.shape))
        tokens = layer.input_layernorm(embeds)
        hidden = self.combine(states)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs = []
        for _ in range(steps):
            both = torch.cat([tokens, layer.hidden_norm(hidden)], -1)
            q, k, v = layer.self_attn.project(both, cos, sin)
            keys.append(k)
            values.append(v)
            hidden = hidden + layer.self_attn.o_proj(attend(q, keys, values))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            outputs.append(self.norm(hidden))
            hidden = delay(hidden, 1)
        return outputs


@torch.inference_mode()
def target_states(model: Any, tokens: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """What a head reads of a transformers model: vLLM's auxiliary state `i` is the residual stream
    after `i` layers (0: the embedding; all of them: before the final norm).

    Args:
        tokens: [batch, time] int64, right-padded.
        layers: of the states, in their order.

    Returns:
        states [batch, time, len(layers), hidden] and the normed final state [batch, time, hidden],
        both in the model's dtype.
    """
    kept: dict[int, Tensor] = {}
    handles = []
    for index in set(layers):

        def keep(_: nn.Module, __: object, output: Any, index: int = index) -> None:
            kept[index] = output[0] if isinstance(output, tuple) else output

        module = model.model.layers[index - 1] if index else model.model.embed_tokens
        handles.append(module.register_forward_hook(keep))
    try:
        final = model.model(tokens, use_cache=False).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack([kept[i] for i in layers], 2), final


def load_head(directory: str | Path, target: Any = None) -> Head:
    """Read a head that vLLM would load, in float32.

    Args:
        target: transformers model whose output matrix a checkpoint without one shares, and whose
            default layers one without them reads.

    Raises:
        UserError: not a directory with a head, or one whose arithmetic is not known here.
    """
    directory, named = Path(directory), f"eagle3: {quoted(str(directory))}"
    config = read_json(
        directory / "config.json", "eagle3", "python -m benchmarks.models.eagle3.train"
    )
    facts = {**config, **(config.get("eagle_config") or {})}
    if not ARCHITECTURES & set(config.get("architectures") or ()):
        raise UserError(f"{named} is no LlamaForCausalLMEagle3: compare it by `vllm-hsd bench`.")
    rope = {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
    rope |= config.get("rope_parameters") or {}
    plain = rope.get("rope_type", rope.get("type", "default")) == "default"
    facts["rope_scaling"] = None if plain else rope
    for key, value in {**_KNOWN, "use_aux_hidden_state": True}.items():
        if (found := facts.get(key, value)) != value:
            raise UserError(
                f"{named} has {key}={found!r}, which `vllm-hsd profile` does not compute: compare "
                "such a head by `vllm-hsd bench`."
            )
    try:
        weights = {
            name.removeprefix("model.").replace("layers.0.", "midlayer."): value
            for name, value in load_file(directory / "model.safetensors").items()
        }
        drafted = config.get("draft_vocab_size") or config["vocab_size"]
        depth = 0 if target is None else target.config.num_hidden_layers
        # As they are served (`draft_models.name_layers`), in the order in which they run.
        nested, key = config.get("eagle_config") or {}, "eagle_aux_hidden_state_layer_ids"
        named_layers = config.get(key) or nested.get("layer_ids") or nested.get(key)
        layers = sorted({*(named_layers or (2, depth // 2, depth - 3))})
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        given = {name: config[name] for name in Shape.__dataclass_fields__ if name in config}
        shape = Shape(
            **given
            | {
                "head_dim": config.get("head_dim") or hidden // heads,
                "draft_vocab_size": drafted,
                "layers": tuple(layers),
                "rope_theta": rope["rope_theta"],
                "fc_norm": bool(config.get("fc_norm", False)),
            }
        )
        ids = torch.arange(drafted)
        head = Head(shape, ids + weights.pop("d2t", torch.zeros_like(ids)))
        weights.pop("t2d", None)
        embedding = weights.pop("embed_tokens.weight", None)
        if "lm_head.weight" not in weights and target is not None:
            weights["lm_head.weight"] = target.lm_head.weight.detach()[head.draft_tokens]
        head.load_state_dict({k: v.float() for k, v in weights.items()})
    except (OSError, SafetensorError, KeyError, TypeError, RuntimeError) as error:
        raise UserError(f"{named} holds no readable head ({brief(error)}).") from None
    head.embedding = None if embedding is None else embedding.float()
    return head.eval()


class HeadDrafter:
    """A head below a transformers target: its probabilities after texts, drafts that fail included.

    Args:
        directory: of the head.
        target: LlamaForCausalLM or a model of its modules.

    Raises:
        UserError: the head cannot be read, or it is none of this target.
    """

    def __init__(self, directory: str, target: Any) -> None:
        self.target, named = target, f"eagle3: {quoted(directory)}"
        if (kind := type(target).__name__) not in TARGETS:
            raise UserError(
                f"{named} cannot be measured: `vllm-hsd profile` reads the states of "
                f"{' and '.join(TARGETS)}, not of {kind}; compare it by `vllm-hsd bench`."
            )
        self.head = load_head(directory, target).to(target.device)
        self.config, own = self.head.shape, target.config
        needed = own.vocab_size, own.hidden_size
        if (self.config.vocab_size, self.config.hidden_size) != needed:
            raise UserError(
                f"{named} is for a vocabulary of {self.config.vocab_size} entries and states of "
                f"{self.config.hidden_size} numbers, the target has {needed[0]} and {needed[1]}: "
                "use a head of this target."
            )
        if not set(self.config.layers) <= set(range(own.num_hidden_layers + 1)):
            raise UserError(
                f"{named} reads states after the layers {list(self.config.layers)}, but the target "
                f"has {own.num_hidden_layers}: use a head of this target."
            )
        if (embedding := self.head.embedding) is None:
            embedding = target.model.embed_tokens.weight.detach()
        self.embedding = embedding.to(target.device, torch.float32)

    @torch.inference_mode()
    def _logits(self, tokens: Tensor, first: int, steps: int) -> Iterator[Tensor]:
        """By step of a draft, logits [L, V] of tokens `first` + 1 + step.. of a text [n]: each row
        of a draft that began `step` tokens before, the last of the n - first - step that are left.
        """
        states, _ = target_states(self.target, tokens[None], self.config.layers)
        embeds = F.embedding(tokens[1:], self.embedding)
        outputs = self.head(embeds[None], states[:, :-1].float(), steps)
        for step, output in enumerate(outputs):
            # Row s of the output predicts token s + 2.
            start = first - 1 + step
            found = self.head.lm_head(output[0, max(start, 0) :])
            logits = found.new_full((len(found), self.config.vocab_size), -torch.inf)
            logits[:, self.head.draft_tokens] = found
            # Nothing precedes a text's first token, so the second one is anyone's guess.
            yield logits if start >= 0 else F.pad(logits, (0, 0, 1, 0))

    def first_logits(self, tokens: Tensor, first: int) -> Tensor:
        """Logits [n - first, V] of tokens `first` + 1.. of a text [n], each a draft's first."""
        return next(self._logits(tokens, first, 1))

    def log_probs(
        self, context: Tensor, text: Tensor, steps: int, probabilities: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Log-probabilities float64 [L, steps] of a text's tokens [L] after a context [n]: entry
        [c, j] of token c + j in a draft that began before token c; nan past the end.

        Args:
            probabilities: of logits [..., V], float32.
        """
        tokens, length = torch.cat([context, text[:-1]]), len(text)
        out = torch.full((length, steps), torch.nan, dtype=torch.float64)
        longest = min(steps, length)
        for step, logits in enumerate(self._logits(tokens, len(context) - 1, longest)):
            probs = probabilities(logits).gather(-1, text[step:, None])
            out[: length - step, step] = probs.double().log().squeeze(-1).cpu()
        return out
