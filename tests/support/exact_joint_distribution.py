"""The exact law of a model's next tokens under sampling parameters, by transformers.

An independent reading of vLLM's sampling parameters in float64: nothing of vLLM or of this
package computes here.
"""

from collections import Counter

import numpy as np
import torch
from scipy.stats import chi2
from transformers import AutoModelForCausalLM


def joint_distribution(
    model: str, prompt: list[int], length: int, params: dict, eos: int | None = None
) -> dict[tuple[int, ...], float]:
    """Outcome -> probability of the next `length` tokens; an outcome may end early with `eos`."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    alive, law = {(): 1.0}, {}
    for _ in range(length):
        outputs = list(alive)
        rows = torch.tensor([[*prompt, *output] for output in outputs])
        with torch.inference_mode():
            logits = network(rows).logits[:, -1].numpy()
        following = {}
        for output, row in zip(outputs, logits, strict=True):
            for token, p in enumerate(next_token_distribution(row, prompt, output, params, eos)):
                if p > 0:
                    ended = token == eos or len(output) + 1 == length
                    (law if ended else following)[(*output, token)] = alive[output] * p
        alive = following
    return law


def next_token_distribution(
    logits: np.ndarray, prompt: list[int], output: tuple[int, ...], params: dict, eos: int | None
) -> np.ndarray:
    """[V] float64: the law of one token, vLLM's sampling parameters applied in vLLM's order."""
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
    law = np.exp(row - row.max())
    law /= law.sum()
    order = np.argsort(-law)
    before = np.cumsum(law[order]) - law[order]
    law[order[before >= params.get("top_p", 1.0)]] = 0.0
    return law / law.sum()


def chi_square(samples: list[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """p-value of the samples under the law: Pearson's test, outcomes expected < 5 times pooled.

    0 when something impossible was seen.
    """
    counts, n = Counter(samples), len(samples)
    if not counts.keys() <= law.keys():
        return 0.0
    expected = np.array([n * p for p in law.values()])
    observed = np.array([counts[outcome] for outcome in law])
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    observed = np.append(observed[~rare], observed[rare].sum())
    if expected[-1] < 5:
        # Too rare even together: joined with the least likely of the others.
        least = expected[:-1].argmin()
        expected[least] += expected[-1]
        observed[least] += observed[-1]
        expected, observed = expected[:-1], observed[:-1]
    if len(expected) == 1:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(chi2.sf(statistic, len(expected) - 1))
