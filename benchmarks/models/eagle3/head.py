"""The EAGLE-3 head in plain torch: one decoder layer, several training-time-test steps.

Source: "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test", sections 3.1-3.2. Names and arithmetic are those of vLLM's `Eagle3LlamaForCausalLM` with
`fc_norm`, so a saved head is loaded there as it is.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of a head; those of its target except for the draft vocabulary."""

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
    seen = torch.ones(time, time, dtype=torch.bool).tril(-back)
    # A row that sees nothing belongs to no draft; looking at itself keeps it finite.
    seen[:back] |= torch.eye(time, dtype=torch.bool)[:back]
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
        shape: Its sizes.
        draft_tokens: [draft_vocab_size] int64, ascending target ids of the draft vocabulary.
    """

    def __init__(self, shape: Shape, draft_tokens: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.fc_norm = nn.ModuleList(
            Norm(shape.hidden_size, shape.rms_norm_eps) for _ in shape.layers
        )
        self.fc = nn.Linear(len(shape.layers) * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = Layer(shape)
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.draft_tokens = draft_tokens

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
        cos, sin = rotary(embeds.shape[1], self.shape)
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


def save_head(head: Head, directory: Path) -> None:
    """Writes the head in bfloat16 as vLLM's `LlamaForCausalLMEagle3` checkpoint.

    It holds no embedding: vLLM then shares the target's.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shape = asdict(head.shape)
    layers = list(shape.pop("layers"))
    theta = shape.pop("rope_theta")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **shape,
        "num_hidden_layers": 1,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "fc_norm": True,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": layers,
            "use_aux_hidden_state": True,
        },
        "eagle_aux_hidden_state_layer_ids": layers,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    weights = {k: v.detach().bfloat16().contiguous() for k, v in head.state_dict().items()}
    weights["d2t"] = head.draft_tokens - torch.arange(len(head.draft_tokens))
    save_file(weights, directory / "model.safetensors.partial", metadata={"format": "pt"})
    (directory / "model.safetensors.partial").replace(directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_head(directory: Path) -> Head:
    """Reads what `save_head` wrote, in float32."""
    config = json.loads((directory / "config.json").read_text())
    names = Shape.__dataclass_fields__
    shape = Shape(
        **{k: config[k] for k in names if k not in ("layers", "rope_theta")},
        layers=tuple(config["eagle_aux_hidden_state_layer_ids"]),
        rope_theta=config["rope_parameters"]["rope_theta"],
    )
    weights = load_file(directory / "model.safetensors")
    d2t = weights.pop("d2t")
    head = Head(shape, d2t + torch.arange(len(d2t)))
    head.load_state_dict({k: v.float() for k, v in weights.items()})
    return head
