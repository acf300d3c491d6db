"""Exact joint distribution of a model's next tokens under sampling parameters.

An independent reading of vLLM's sampling parameters in float64 on top of transformers. Nothing of
vLLM or of this package computes here.
"""

from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from scipy.stats import chi2
from transformers import AutoModelForCausalLM


def joint_distribution(
    model: str, prompt: list[int], length: int, params: dict, eos: int | None = None
) -> dict[tuple[int, ...], float]:
    """Outcome -> probability of the next `length` tokens; an outcome may end early with `eos`."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()

    def rows(texts: list[list[int]]) -> np.ndarray:
        with torch.inference_mode():
            return network(torch.tensor(texts)).logits[:, -1].numpy()

    return joint_distribution_of(rows, prompt, length, params, eos)


def joint_distribution_of(
    rows: Callable[[list[list[int]]], np.ndarray],
    prompt: list[int],
    length: int,
    params: dict,
    eos: int | None = None,
) -> dict[tuple[int, ...], float]:
    """As `joint_distribution`, of a model that gives [n, V] float64 logits after n texts."""
    unfinished, finished = {(): 1.0}, {}
    for _ in range(length):
        extended = {}
        logits = rows([[*prompt, *output] for output in unfinished])
        for output, row in zip(unfinished, logits, strict=True):
            for token, p in enumerate(next_token_distribution(row, prompt, output, params, eos)):
                if p > 0:
                    ended = token == eos or len(output) + 1 == length
                    (finished if ended else extended)[(*output, token)] = unfinished[output] * p
        unfinished = extended
    return finished


def next_token_distribution(
    logits: np.ndarray, prompt: list[int], output: tuple[int, ...], params: dict, eos: int | None
) -> np.ndarray:
    """[V] float64: probabilities of one token; sampling parameters apply in vLLM's order."""
    row = logits.copy()
    if allowed := params.get("allowed_token_ids"):
        row[[v for v in range(len(row)) if v not in allowed]] = -np.inf
    for token, bias in params.get("logit_bias", {}).items():
        row[token] += bias
    if eos is not None and len(output) < params.get("min_tokens", 0):
        row[eos] = -np.inf
    for *start, last in params.get("bad_words_ids", []):
        if list(output[len(output) - len(start) :]) == start:
            row[last] = -np.inf
    seen = list({*prompt, *output})
    factor = params.get("repetition_penalty", 1.0)
    row[seen] = np.where(row[seen] > 0, row[seen] / factor, row[seen] * factor)
    for token, count in Counter(output).items():
        row[token] -= count * params.get("frequency_penalty", 0.0)
        row[token] -= params.get("presence_penalty", 0.0)
    if params.get("temperature", 1.0) == 0:
        return np.eye(len(row))[row.argmax()]
    row = row / params.get("temperature", 1.0)
    row[row < row.max() + np.log(params.get("min_p", 0.0) or 1e-300)] = -np.inf
    if top_k := params.get("top_k"):
        row[row < np.sort(row)[-top_k]] = -np.inf
    probs = np.exp(row - row.max())
    probs /= probs.sum()
    order = np.argsort(-probs)
    preceding = np.cumsum(probs[order]) - probs[order]
    probs[order[preceding >= params.get("top_p", 1.0)]] = 0.0
    return probs / probs.sum()


def marginal(
    distribution: dict[tuple[int, ...], float], part: slice
) -> dict[tuple[int, ...], float]:
    """The distribution of a part of the outcomes."""
    found: dict[tuple[int, ...], float] = Counter()
    for outcome, p in distribution.items():
        found[outcome[part]] += p
    return found


def chi_square_p_value(
    samples: list[tuple[int, ...]], distribution: dict[tuple[int, ...], float]
) -> float:
    """Of Pearson's test, outcomes expected less than 5 times pooled; 0 with an impossible one."""
    counts, n = Counter(samples), len(samples)
    if not counts.keys() <= distribution.keys():
        return 0.0
    expected = np.array([n * p for p in distribution.values()])
    observed = np.array([counts[outcome] for outcome in distribution])
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    observed = np.append(observed[~rare], observed[rare].sum())
    if expected[-1] < 5 and len(expected) > 1:
        # The pool itself is too rare: merge it with the least likely other outcome.
        least = expected[:-1].argmin()
        expected[least] += expected[-1]
        observed[least] += observed[-1]
        expected, observed = expected[:-1], observed[:-1]
    if len(expected) == 1:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(chi2.sf(statistic, len(expected) - 1))
