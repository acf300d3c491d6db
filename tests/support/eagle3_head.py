"""EAGLE-3 heads for tiny targets, as the recipe of `benchmarks/models/eagle3` makes them.

What a head drafts after a text is computed here without a cache, a batch or an engine.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from benchmarks.models.eagle3.head import save_head
from vllm_hsd.tools.planner.eagle3_head import Head, Shape, load_head, rotary, target_states

AUX_LAYERS = (0, 1, 2)
TRAINING_STEPS = 100


def write_eagle3_head(
    target: str, directory: Path, draft_vocabulary: int | None = None, trained: bool = False
) -> str:
    """Write a head, random or trained for some seconds, that drafts some of the tokens or all."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    config = model.config
    torch.manual_seed(0)
    size = config.vocab_size
    kept = torch.randperm(size)[: draft_vocabulary or size].sort().values
    own = {"draft_vocab_size": len(kept), "layers": AUX_LAYERS}
    own["rope_theta"] = config.rope_parameters["rope_theta"]
    fields = Shape.__dataclass_fields__
    given = {name: getattr(config, name) for name in fields if hasattr(config, name)}
    head = Head(Shape(**given | own), kept)
    with torch.no_grad():
        for value in head.parameters():
            if value.ndim == 2:
                value.normal_(std=0.1)
        head.lm_head.weight.copy_(model.lm_head.weight[kept])
    if trained:
        train(head, model)
    save_head(head, Path(directory))
    if draft_vocabulary is None:
        # vLLM then has no map from the head's tokens to the target's.
        weights = load_file(f"{directory}/model.safetensors")
        del weights["d2t"]
        save_file(weights, f"{directory}/model.safetensors", metadata={"format": "pt"})
    written = json.loads(Path(directory, "config.json").read_text())
    # Given twice: tests damage the outer one.
    del written["eagle_config"]
    Path(directory, "config.json").write_text(json.dumps(written))
    return str(directory)


def states(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """[batch, n, layers, hidden] the target's states at each position of [batch, n] tokens."""
    return target_states(model, tokens, AUX_LAYERS)[0].clone()


def train(head: Head, model: LlamaForCausalLM) -> None:
    """Steps on one batch of the target's own text: enough for it to be guessed now and then."""
    with torch.no_grad():
        text = torch.randint(0, model.config.vocab_size, (32, 1))
        while text.shape[1] < 32:
            row = model(text).logits[:, -1].softmax(-1)
            text = torch.cat([text, torch.multinomial(row, 1)], 1)
        wanted = model(text).logits[..., head.draft_tokens].log_softmax(-1)
        embeds = model.model.embed_tokens(text[:, 1:])
    read = states(model, text)[:, :-1]
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    for _ in range(TRAINING_STEPS):
        loss = torch.zeros(())
        for j, output in enumerate(head(embeds, read, 2)):
            logits = head.lm_head(output[:, j:]).log_softmax(-1)
            loss = loss + F.kl_div(
                logits, wanted[:, j + 1 :], log_target=True, reduction="batchmean"
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def causal_pass(
    head: Head, embeds: Tensor, hidden: Tensor, unread: int = 0
) -> tuple[Tensor, Tensor]:
    """The head's layer over one sequence: (before the last norm, after it), [time, hidden].

    unread: first positions whose keys and values are zeros.
    """
    layer, (cos, sin) = head.midlayer, rotary(len(embeds), head.shape)
    both = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], -1)[None]
    q, k, v = layer.self_attn.project(both, cos, sin)
    k[:, :, :unread], v[:, :, :unread] = 0, 0
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    hidden = hidden + layer.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))[0]
    hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return hidden, head.norm(hidden)


@torch.no_grad()
def roll_out(
    head: Head,
    embedding: Tensor,
    states: Tensor,
    tokens: list[int],
    drafted: list[int],
    unread: int = 0,
) -> list[Tensor]:
    """Outputs after `tokens` and each of `drafted`, by `states` [time, layers, hidden] before."""
    hidden = head.combine(states)
    tokens = list(tokens)
    outputs = []
    for token in [*drafted, None]:
        embeds = embedding[torch.tensor(tokens[1:])]
        before, after = causal_pass(head, embeds, hidden, unread)
        outputs.append(after[-1])
        # A drafted position has no target state: the head's own output stands in for it.
        hidden = torch.cat([hidden, before[-1:]])
        tokens.append(token)
    return outputs


class Reference:
    """A head with its target, by their directories, in float32."""

    def __init__(self, target: str, head: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.embedding = self.model.model.embed_tokens.weight.detach()
        self.head = load_head(Path(head))

    def guesses(
        self, text: list[int], draft: list[int], shift: int = 0, unread: int = 0
    ) -> list[int]:
        """The head's likeliest token after each part of a draft: the draft, where it is its own.

        shift: positions by which the states come too late, for a control.
        unread: first positions that are zeros to the head.
        """
        read = states(self.model, torch.tensor([text]))[0, :-1].roll(shift, 0)
        outputs = roll_out(self.head, self.embedding, read, text, draft[:-1], unread)
        logits = map(self.head.lm_head, outputs)
        return [int(self.head.draft_tokens[row.argmax()]) for row in logits]
