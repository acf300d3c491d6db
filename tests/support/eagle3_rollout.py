"""Drafts of an EAGLE-3 head one token at a time, and what vLLM's proposer drafted."""

import json
import os

import torch
import torch.nn.functional as F

from benchmarks.models.eagle3.head import rotary


def causal_pass(head, embeds, hidden):
    """The head's layer over one sequence: (before the last norm, after it), [time, hidden]."""
    layer, (cos, sin) = head.midlayer, rotary(len(embeds), head.shape)
    both = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], -1)[None]
    q, k, v = layer.self_attn.project(both, cos, sin)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    hidden = hidden + layer.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))[0]
    hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return hidden, head.norm(hidden)


@torch.no_grad()
def roll_out(head, embedding, states, tokens, drafted):
    """Outputs of len(drafted) + 1 draft steps after `tokens`, each [hidden], without a cache.

    Args:
        states: [time, layers, hidden] at tokens[:-1].
        tokens: known tokens, [time + 1].
        drafted: draft tokens that the later steps stand on.
    """
    hidden = head.combine(states)
    tokens = list(tokens)
    outputs = []
    for token in [*drafted, None]:
        before, after = causal_pass(head, embedding[torch.tensor(tokens[1:])], hidden)
        outputs.append(after[-1])
        # A drafted position has no target state: the head's own output stands in for it.
        hidden = torch.cat([hidden, before[-1:]])
        tokens.append(token)
    return outputs


@torch.no_grad()
def draft(head, embedding, states, tokens, count):
    """Greedy draft of `count` target token ids."""
    drafted = []
    for _ in range(count):
        output = roll_out(head, embedding, states, tokens, drafted)[-1]
        drafted.append(int(head.draft_tokens[head.lm_head(output).argmax()]))
    return drafted


def record_drafts():
    """Makes vLLM's EAGLE proposer append [position of its last known state, draft] to a file."""
    from vllm.v1.spec_decode.eagle import EagleProposer

    propose = EagleProposer.propose

    def recording(self, *args, **kwargs):
        drafts = propose(self, *args, **kwargs)
        last = kwargs["token_indices_to_sample"]
        last = -1 if last is None else int(last[0])
        with open(os.environ["RECORDED_DRAFTS"], "a") as file:
            position = int(kwargs["target_positions"][last])
            file.write(json.dumps([position, drafts[0].tolist()]) + "\n")
        return drafts

    EagleProposer.propose = recording
