"""Weights that a head starts from: linear least squares, placed where the head can hold it.

Training then begins with a linear predictor of the next state instead of noise, which saves
hundreds of optimizer steps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.eagle3.features import Features
from vllm_hsd.tools.planner.eagle3_head import Head

RIDGE = 0.03  # of the mean square of a whitened input
SCALE = 8.0  # root mean square of the head's residual stream
SHARPNESS = 0.7  # of the logits: the fit is uncertain and the target's matrix expects certainty


@torch.no_grad()
def warm_start(
    head: Head, target: nn.Module, chats: list[Features], picked: Tensor, dtype: torch.dtype
) -> None:
    """Sets the weights of an untrained head.

    One linear map predicts the target's last state at the next position from the auxiliary
    states here and the next token's embedding. Its part for the states becomes `fc`, after
    norms that divide every channel by its root mean square (a Llama has a few huge ones). Its
    part for the embedding goes through the attention's values, cut to their rank; queries and
    keys begin as one random projection of the whitened embedding, so a token attends to itself
    and to its earlier occurrences. The gate of the feed-forward layer, the last norm and the
    output matrix are the target's; the feed-forward layer adds nothing yet.

    Args:
        head: To set.
        target: LlamaForCausalLM in float32; its last layer's state must be the last one read.
        chats: For the fit; a hundred thousand tokens do.
        picked: [layers] which of the stored states the head reads.
        dtype: Of the matrix products.
    """
    model, shape = target.model, head.shape
    last = model.layers[-1]
    layer, hidden = head.midlayer, shape.hidden_size
    spread = (
        torch.stack([_unit(c.states[:, picked]).square().mean(0) for c in chats]).mean(0).sqrt()
    )
    width = len(picked) * hidden
    gram, moment, count = torch.zeros(width + hidden, width + hidden), 0.0, 0
    for a in range(0, len(chats), 16):
        group = chats[a : a + 16]
        states = torch.cat([_unit(c.states[:-1, picked]) for c in group]) / spread
        tokens = torch.cat([c.tokens[1:] for c in group])
        embeds = _unit(F.embedding(tokens, model.embed_tokens.weight))
        inputs = torch.cat([states.flatten(1), embeds], 1).to(dtype)
        goals = torch.cat([_unit(c.states[1:, picked[-1]]) for c in group]).to(dtype)
        gram += inputs.T @ inputs
        moment = moment + (inputs.T @ goals).float()
        count += len(inputs)
    gram /= count
    covariance = gram[width:, width:].clone()
    gram.diagonal().add_(RIDGE)
    fit = torch.linalg.solve(gram, moment / count)

    for norm, channels in zip(head.fc_norm, spread, strict=True):
        norm.weight.copy_(SCALE / channels)
    head.fc.weight.copy_(fit[:width].T)
    attention = layer.self_attn
    from_token = fit[width:]
    rank = shape.num_key_value_heads * shape.head_dim
    _, directions = torch.linalg.eigh(from_token.T @ covariance @ from_token)
    kept = directions[:, -min(rank, hidden) :]
    attention.v_proj.weight.zero_()
    attention.v_proj.weight[: kept.shape[1], :hidden] = (from_token @ kept).T
    out = F.pad(kept, (0, rank - kept.shape[1])).unflatten(1, (-1, shape.head_dim))
    out = out.repeat_interleave(attention.groups, 1).flatten(1)
    attention.o_proj.weight.copy_(out * SCALE / attention.groups)
    values, vectors = torch.linalg.eigh(covariance)
    white = vectors * (values.clamp_min(1e-3 * values.mean()).rsqrt()) @ vectors.T
    random = torch.randn(rank, hidden, generator=torch.Generator().manual_seed(0))
    keys = (random / hidden**0.5 @ white).unflatten(0, (-1, shape.head_dim))
    for projection, groups in ((attention.q_proj, attention.groups), (attention.k_proj, 1)):
        projection.weight.zero_()
        projection.weight[:, :hidden] = keys.repeat_interleave(groups, 0).flatten(0, 1)
    layer.mlp.gate_proj.weight.copy_(last.mlp.gate_proj.weight)
    layer.mlp.up_proj.weight.copy_(last.mlp.up_proj.weight)
    layer.mlp.down_proj.weight.zero_()
    layer.hidden_norm.weight.copy_(last.input_layernorm.weight)
    layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
    head.norm.weight.copy_(SHARPNESS * model.norm.weight)
    head.lm_head.weight.copy_(target.lm_head.weight[head.draft_tokens])


def _unit(x: Tensor) -> Tensor:
    """x with unit root mean square over the last axis, float32."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=1e-6)
