"""Training of exit heads: a layer's norm and head learn the target's distribution.

The loss is the cross-entropy between the target's distribution and the head's, so its minimum is
the target's own distribution. Training starts from a linear map of the layer's normed states to the
last layer's, fitted by least squares, before the target's own head: that takes one pass over a
little text, and is worth more than hundreds of steps from the plain early exit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from vllm_hsd.cascade.exit_head import EXIT_ARCHITECTURES, ExitHead
from vllm_hsd.errors import UserError

WINDOW = 256  # tokens of context at most
WINDOWS_PER_STEP = 4
HELD_OUT_WINDOWS = 32
FIT_WINDOWS = 160
_ALL_STATES = {"output_hidden_states": True, "use_cache": False}
RIDGE = 1e-3  # of the mean square of a channel
LEARNING_RATE = 0.5  # over the hidden size, so that a step moves logits alike at any width


@dataclass(frozen=True)
class HeldOut:
    """How well a head does on text that it was not trained on, averaged over positions.

    Attributes:
        divergence: Kullback-Leibler divergence of the head's distribution from the
            target's, in nats.
        overlap: sum_v min(p(v), q(v)) at temperature 1, the acceptance rate of standard
            rejection sampling.
    """

    divergence: float
    overlap: float


@dataclass(frozen=True)
class TrainedHead:
    """A head, with what it and the plain early exit reach on held-out text."""

    head: ExitHead
    before: HeldOut
    after: HeldOut


def train_heads(
    model: PreTrainedModel,
    layers: Sequence[int],
    tokens: torch.Tensor,
    steps: int,
) -> list[TrainedHead]:
    """Train a head on each of several layers, all from the same passes of the target.

    Args:
        model: the target, of EXIT_ARCHITECTURES; its weights do not change.
        layers: how many layers run below each head, 0 (embedding alone) to the depth - 1.
        tokens: [n] int64 text; its last tenth is held out.
        steps: optimizer steps of `WINDOWS_PER_STEP` windows each.

    Returns:
        one trained head per layer, in the target's dtype, on the CPU.

    Raises:
        UserError: an architecture without such a head, a layer that is not there, or too little
            text.
    """
    _check(model, layers)
    train, held_out = _split(tokens, model.config.max_position_embeddings)
    model = model.train(False).requires_grad_(False)
    heads = [plain_exit_head(model, layer) for layer in layers]
    before = _evaluate(model, heads, held_out)
    generator = torch.Generator().manual_seed(0)
    fitted = train[torch.randperm(len(train), generator=generator)[:FIT_WINDOWS]]
    heads = _least_squares(model, heads, fitted)
    parameters = [p for head in heads for p in (head.norm, head.weight)]
    optimizer = torch.optim.Adam(
        [p.requires_grad_() for p in parameters], lr=LEARNING_RATE / model.config.hidden_size
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        chosen = torch.randint(len(train), (WINDOWS_PER_STEP,), generator=generator)
        log_target, hidden = _target_pass(model, train[chosen])
        target = log_target.exp()
        optimizer.zero_grad()
        for head in heads:
            log_probs = head.logits(hidden[head.layer]).log_softmax(-1)
            torch.autograd.backward(-(target * log_probs).sum(-1).mean())
        optimizer.step()
        schedule.step()
    after = _evaluate(model, heads, held_out)
    detached = (replace(h, norm=h.norm.detach(), weight=h.weight.detach()) for h in heads)
    done = [head.to(torch.device("cpu"), model.dtype) for head in detached]
    return [TrainedHead(*parts) for parts in zip(done, before, after, strict=True)]


def _check(model: PreTrainedModel, layers: Sequence[int]) -> None:
    name, depth = type(model).__name__, model.config.num_hidden_layers
    if name not in EXIT_ARCHITECTURES:
        raise UserError(
            f"target: {name} is not a supported architecture: give one of "
            f"{', '.join(EXIT_ARCHITECTURES)}."
        )
    for layer in layers:
        if not 0 <= layer < depth:
            raise UserError(
                f"--layers: {layer} is not between 0 and {depth - 1}, since the target has {depth} "
                "layers."
            )


def _split(tokens: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows to train on and held-out windows, each [n, window]."""
    window = min(WINDOW, longest)
    windows = tokens[: len(tokens) // window * window].reshape(-1, window)
    if len(windows) < 10:
        raise UserError(
            f"the texts have {len(tokens)} tokens, too few to train on and to hold some out: give "
            f"at least {10 * window}."
        )
    held_out = len(windows) // 10
    return windows[:-held_out], windows[-held_out:][:HELD_OUT_WINDOWS]


def plain_exit_head(model: PreTrainedModel, layer: int) -> ExitHead:
    """The model's own norm and head on the states after `layer` layers, without a soft cap."""
    norm = model.model.norm
    eps = getattr(norm, "variance_epsilon", None) or norm.eps
    # What the norm multiplies by, which is not its weight in every model: Gemma adds one.
    ones = torch.ones(model.config.hidden_size, dtype=torch.float32, device=norm.weight.device)
    scaling = getattr(model.config, "logits_scaling", 1.0)
    return ExitHead(
        layer=layer,
        norm=norm(ones).detach().float() * (1 + eps) ** 0.5,
        weight=model.lm_head.weight.detach().float() / scaling,
        eps=eps,
    )


@torch.no_grad()
def _least_squares(
    model: PreTrainedModel, heads: Sequence[ExitHead], windows: torch.Tensor
) -> list[ExitHead]:
    """Heads on the last layer's normed states, as a ridge regression finds them in each layer's."""
    size = model.config.hidden_size
    grams, moments = torch.zeros(2, len(heads), size, size, device=model.device)
    for window in windows:
        output = model.model(window[None].to(model.device), **_ALL_STATES)
        hidden = _flat(output.hidden_states)
        for head, gram, moment in zip(heads, grams, moments, strict=True):
            normed = head.normed(hidden[head.layer])
            gram += normed.T @ normed
            moment += normed.T @ hidden[-1]
    found = []
    for head, gram, moment in zip(heads, grams, moments, strict=True):
        gram.diagonal().add_(RIDGE * gram.diagonal().mean())
        found.append(replace(head, weight=head.weight @ torch.linalg.solve(gram, moment).T))
    return found


@torch.no_grad()
def _target_pass(
    model: PreTrainedModel, windows: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-probabilities [n, V] of the target, and the states [n, hidden] after 0, 1, .. layers."""
    output = model(windows.to(model.device), **_ALL_STATES)
    return output.logits.flatten(0, 1).float().log_softmax(-1), _flat(output.hidden_states)


def _flat(states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """[batch, length, hidden] states after 0, 1, .. layers -> [n, hidden] in float32."""
    return [state.flatten(0, 1).float() for state in states]


@torch.no_grad()
def _evaluate(
    model: PreTrainedModel, heads: Sequence[ExitHead], windows: torch.Tensor
) -> list[HeldOut]:
    sums = torch.zeros(len(heads), 2)
    for window in windows:
        log_target, hidden = _target_pass(model, window[None])
        for i, head in enumerate(heads):
            log_probs = head.logits(hidden[head.layer]).log_softmax(-1)
            divergence = torch.nn.functional.kl_div(
                log_probs, log_target, reduction="batchmean", log_target=True
            )
            overlap = torch.minimum(log_probs, log_target).exp().sum(-1).mean()
            sums[i] += torch.stack((divergence, overlap)).cpu()
    return [HeldOut(*(value / len(windows)).tolist()) for value in sums]
