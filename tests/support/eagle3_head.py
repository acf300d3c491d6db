"""EAGLE-3 heads for tiny targets: a checkpoint as vLLM loads it, and the head in plain torch.

The torch head recomputes everything from a text's tokens and the target's states: it has no cache,
no batch and no engine, so it says what a head drafts after any text.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

AUX_LAYERS = [0, 1, 2]
TRAINING_STEPS = 100


def write_eagle3_head(
    target: str, directory: Path, draft_vocabulary: int | None = None, trained: bool = False
) -> str:
    """Write a head and return its directory.

    Args:
        draft_vocabulary: tokens that the head can draft; None for the target's whole vocabulary.
        trained: train it for some seconds on the target's own text, else it is random.
    """
    config = json.loads(Path(target, "config.json").read_text())
    hidden, middle, size = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "midlayer.self_attn.q_proj": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, queries),
        "midlayer.mlp.gate_proj": (middle, hidden),
        "midlayer.mlp.up_proj": (middle, hidden),
        "midlayer.mlp.down_proj": (hidden, middle),
        "fc": (hidden, len(AUX_LAYERS) * hidden),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    torch.manual_seed(0)
    weights = {f"{name}.weight": 0.1 * torch.randn(shape) for name, shape in shapes.items()}
    weights |= {f"midlayer.{norm}.weight": torch.ones(hidden) for norm in norms}
    weights["norm.weight"] = torch.ones(hidden)
    weights["lm_head.weight"] = load_file(f"{target}/model.safetensors")["lm_head.weight"]
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocabulary or size,
        "eagle_aux_hidden_state_layer_ids": AUX_LAYERS,
    }
    if draft_vocabulary:
        kept = torch.randperm(size)[:draft_vocabulary].sort().values
        weights["lm_head.weight"] = weights["lm_head.weight"][kept].clone()
        weights["d2t"] = kept - torch.arange(draft_vocabulary)
        weights["t2d"] = torch.isin(torch.arange(size), kept)
    if trained:
        weights = train(TorchHead(target, weights, config))
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


class TorchHead:
    """A head with its target, in float32.

    Args:
        target: directory of the target.
        weights: of the head; read from `directory` by `load`.
        config: the head's config.json.
    """

    def __init__(self, target: str, weights: dict[str, torch.Tensor], config: dict) -> None:
        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.weights, self.config = weights, config
        self.embedding = self.target.model.embed_tokens.weight
        self.draft_ids = torch.arange(config["draft_vocab_size"])
        if "d2t" in weights:
            self.draft_ids = self.draft_ids + weights["d2t"]

    @classmethod
    def load(cls, target: str, directory: str) -> "TorchHead":
        config = json.loads(Path(directory, "config.json").read_text())
        return cls(target, load_file(f"{directory}/model.safetensors"), config)

    @torch.no_grad()
    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, n, hidden] the target's states at each position, already through `fc`'s input.

        Args:
            tokens: [batch, n].
        """
        found = {}
        hooks = [
            layer.register_forward_hook(
                lambda _, __, output, i=i: found.__setitem__(
                    i, output[0] if isinstance(output, tuple) else output
                )
            )
            for i, layer in enumerate(self.target.model.layers, start=1)
        ]
        self.target(tokens)
        for hook in hooks:
            hook.remove()
        found[0] = self.embedding[tokens]
        return torch.cat([found[i] for i in AUX_LAYERS], -1)

    def entries(self, tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Logits [batch, n, draft vocabulary] and outputs [batch, n, hidden] of n entries.

        Args:
            tokens: [batch, n] token after each entry's position.
            states: [batch, n, hidden] what each entry reads of the position.
        """
        w = {name.removeprefix("midlayer."): value for name, value in self.weights.items()}
        heads, keys = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        width, (batch, n) = self.config["head_dim"], tokens.shape

        def split(x, count):
            return x.view(batch, n, count, width).transpose(1, 2)

        x = torch.cat(
            [
                self._norm(self.embedding[tokens], w["input_layernorm.weight"]),
                self._norm(states, w["hidden_norm.weight"]),
            ],
            -1,
        )
        q = self._rotated(split(x @ w["self_attn.q_proj.weight"].T, heads))
        k = self._rotated(split(x @ w["self_attn.k_proj.weight"].T, keys))
        v = split(x @ w["self_attn.v_proj.weight"].T, keys)
        attended = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        attended = attended.transpose(1, 2).reshape(batch, n, heads * width)
        x = states + attended @ w["self_attn.o_proj.weight"].T
        y = self._norm(x, w["post_attention_layernorm.weight"])
        gated = torch.nn.functional.silu(y @ w["mlp.gate_proj.weight"].T)
        x = x + (gated * (y @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
        return self._norm(x, w["norm.weight"]) @ w["lm_head.weight"].T, x

    @torch.no_grad()
    def guesses(self, text: list[int], draft: list[int], shift: int = 0) -> list[int]:
        """The head's likeliest token at every place of a draft, after the draft's tokens before it.

        A draft that the head made itself is equal to its guesses.

        Args:
            shift: positions by which the states come too late, for a control that must differ.
        """
        ids = torch.tensor([text])
        read = self.states(ids)[:, :-1].roll(shift, 1) @ self.weights["fc.weight"].T
        following = ids[:, 1:]
        found: list[int] = []
        for token in draft:
            logits, outputs = self.entries(following, read)
            found.append(int(self.draft_ids[logits[0, -1].argmax()]))
            following = torch.cat([following, torch.tensor([[token]])], 1)
            read = torch.cat([read, outputs[:, -1:]], 1)
        return found

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, self.config["rms_norm_eps"])

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        half = self.config["head_dim"] // 2
        theta = self.target.config.rope_parameters["rope_theta"]
        angles = torch.arange(x.shape[2])[:, None] * theta ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat(
            [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1
        )


def train(head: TorchHead) -> dict[str, torch.Tensor]:
    """Weights after some steps on text that the target wrote itself, two training-time-test steps.

    Some hundred steps on one batch: enough for a tiny target's text to be guessed now and then.
    """
    with torch.no_grad():
        text = torch.randint(0, head.config["vocab_size"], (32, 1))
        while text.shape[1] < 32:
            row = head.target(text).logits[:, -1].softmax(-1)
            text = torch.cat([text, torch.multinomial(row, 1)], 1)
        wanted = head.target(text).logits[..., head.draft_ids].log_softmax(-1)
    states = head.states(text)
    fixed = {"norm.weight", "d2t", "t2d"}
    trained = {n: v.requires_grad_() for n, v in head.weights.items() if n not in fixed}
    optimizer = torch.optim.Adam(trained.values(), lr=3e-3)
    for _ in range(TRAINING_STEPS):
        read = states[:, :-1] @ head.weights["fc.weight"].T
        loss = torch.zeros(())
        for _ in range(2):
            logits, outputs = head.entries(text[:, 1:], read)
            loss = loss + torch.nn.functional.kl_div(
                logits.log_softmax(-1), wanted[:, 1:], log_target=True, reduction="batchmean"
            )
            read = torch.cat([read[:, :1], outputs[:, :-1]], 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: value.detach().contiguous() for name, value in head.weights.items()}
