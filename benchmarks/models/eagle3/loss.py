"""Soft cross entropy through the output matrix, without keeping the logits."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 256  # rows of logits that exist at a time


class SoftCrossEntropy(torch.autograd.Function):
    """sum_i weights_i * (mass_i * logsumexp(z_i) - sum_v p_iv z_iv), z = hidden @ matrix.T.

    `p` may hold less than all mass: what the target gives to tokens outside the draft
    vocabulary pulls nowhere. Up to a constant this is the Kullback-Leibler divergence of p.
    The gradient of `hidden` is formed in the forward pass; `matrix` gets none.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, matrix: Tensor, p: Tensor, weights: Tensor) -> Tensor:
        """Args: hidden [n, h], matrix [v, h], p [n, v], weights [n]. Returns a scalar."""
        kind = p.dtype
        m = matrix.detach().to(kind)
        total = torch.zeros(())
        hidden_grad = torch.empty(hidden.shape)
        for a in range(0, len(hidden), ROWS):
            rows = slice(a, a + ROWS)
            h = hidden[rows].detach().to(kind)
            target, weight = p[rows], weights[rows, None]
            logits = (h @ m.T).float()
            mass = target.sum(-1, keepdim=True, dtype=torch.float32)
            # <p, z> is taken before the logits' storage is reused for the softmax.
            inner = torch.linalg.vecdot(target.float(), logits)[:, None]
            peak = logits.amax(-1, keepdim=True)
            exp = logits.sub_(peak).exp_()
            denominator = exp.sum(-1, keepdim=True)
            total += (weight * (mass * (denominator.log() + peak) - inner)).sum()
            grad = exp.mul_(mass / denominator).sub_(target).mul_(weight).to(kind)
            hidden_grad[rows] = grad @ m
        ctx.save_for_backward(hidden_grad.to(hidden.dtype))
        return total

    @staticmethod
    def backward(ctx, upstream: Tensor):
        """Gradient of hidden."""
        (hidden_grad,) = ctx.saved_tensors
        return hidden_grad * upstream, None, None, None
