"""Where tokens lie between the target's distribution p and a distribution q that drafts follow.

A sampler that leans towards its drafter gives more to the tokens with q > p. No order of the
vocabulary that ignores q shows that, since q exceeds p now here, now there. So every token is
placed, and scored, by q / p. The order may use whatever is a function of the text before the token
and of what was proposed independently of the verdict; see docs/lossless.md.
"""

from __future__ import annotations

import numpy as np
import torch

# Tokens of a row of q that are told apart; all others count as one.
ROW_WIDTH = 64
# Ratios q / p that rounding in 16 bits can make of 1 count as 1.
EVEN = 0.1
# Ratios above this count as this, so that no token decides alone.
HIGHEST = 2.0

# Factors on the acceptance ratio p / q; at infinity every draft token is accepted.
OVER = (1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 5.0, np.inf)
UNDER = (0.98, 0.95, 0.9, 0.8, 0.5, 0.0)

# Columns of `marks`: the probability ordered before the token, its score (the ratio less the mean
# ratio), the variance and third central moment of that score under p, and its mean square under q;
# then, for q drawn in place of p and for every factor of OVER and UNDER, the mean of the score
# under that fault; then the total variation between p and that fault, of each.
BEFORE, SCORE, VARIANCE, THIRD, SPREAD, SHIFTS = range(6)
FAULTS = 1 + len(OVER) + len(UNDER)
WIDTH = SHIFTS + 2 * FAULTS


def rows_of(logits: torch.Tensor) -> np.ndarray:
    """The likeliest tokens of distributions: [n, 2, ROW_WIDTH] float32 of ids and probabilities.

    Args:
        logits: [n, V]. A smaller vocabulary leaves id -1 at the end of a row.
    """
    probs, ids = logits.float().softmax(-1).topk(min(ROW_WIDTH, logits.shape[-1]))
    found = np.full((len(logits), 2, ROW_WIDTH), -1, dtype=np.float32)
    found[:, 0, : ids.shape[1]] = ids.cpu().numpy()
    found[:, 1, : ids.shape[1]] = probs.cpu().numpy()
    return found


def marks(probs: torch.Tensor, token_ids: torch.Tensor, rows: np.ndarray) -> np.ndarray:
    """Every token's place between the target and a row of q: [n, WIDTH] float64.

    Args:
        probs: [n, V] of the target.
        token_ids: [n] int64.
        rows: [n, 2, k] as of `rows_of`. A row without any id is unknown: NaN.
    """
    # Only as wide as the widest row.
    width = 1 + int(np.flatnonzero((rows[:, 0] >= 0).any(axis=0)).max(initial=0))
    given = torch.from_numpy(rows[:, :, :width]).to(probs.device)
    ids = given[:, 0].long()
    valid = (ids >= 0) & (ids < probs.shape[1])
    p = probs.gather(1, ids.clamp(0, probs.shape[1] - 1)).double() * valid
    q = given[:, 1].double() * valid
    # The last column is all the other tokens.
    p = torch.cat((p, (1 - p.sum(1, keepdim=True)).clamp_min(0)), 1)
    q = torch.cat((q, (1 - q.sum(1, keepdim=True)).clamp_min(0)), 1)
    ratio = torch.where(p > 0, q / p, torch.where(q > 0, torch.inf, 0.0))
    ratio = torch.where((ratio - 1).abs() < EVEN, 1.0, ratio)
    token = token_ids[:, None]
    own = torch.cat(((ids == token) & valid, torch.zeros_like(valid[:, :1])), 1)
    listed = own.any(1, keepdim=True)
    own[:, -1:] = ~listed
    own_ratio = torch.where(own, ratio, 0.0).sum(1, keepdim=True)
    # Of equal ratios the listed tokens come first, in the order of their ids.
    smaller = torch.cat(((ids < token) | ~listed, torch.zeros_like(listed)), 1)
    above = (ratio > own_ratio) | ((ratio == own_ratio) & smaller)
    # Within the last column tokens lie in the order of their ids.
    columns = torch.arange(probs.shape[1], device=probs.device)
    earlier = (probs * (columns < token)).sum(1, dtype=torch.float64)
    unlisted = earlier - (p[:, :-1] * (ids < token)).sum(1)
    before = (p * above).sum(1) + torch.where(listed[:, 0], 0.0, unlisted.clamp_min(0))
    score = ratio.clamp_max(HIGHEST)
    score = score - (p * score).sum(1, keepdim=True)
    found = [before, torch.where(own, score, 0.0).sum(1)]
    found += [(p * score**2).sum(1), (p * score**3).sum(1), (q * score**2).sum(1)]
    recovered = (p - q).clamp_min(0)
    mass = recovered.sum(1, keepdim=True)
    recovered = torch.where(mass > 0, recovered / mass, p)
    faulty = [q]
    for factor in (*OVER, *UNDER):
        accepted = q if factor == np.inf else torch.minimum(q, factor * p)
        faulty.append(accepted + (1 - accepted.sum(1, keepdim=True)) * recovered)
    found += [((each - p) * score).sum(1) for each in faulty]
    found += [(each - p).abs().sum(1) / 2 for each in faulty]
    columns = torch.stack(found, 1)
    columns[~valid.any(1)] = torch.nan
    return columns.cpu().numpy()
