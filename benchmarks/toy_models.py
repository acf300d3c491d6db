"""Long-run tokens per target call of the verifiers on toy models, next to recorded values.

Target and draft are order-1 Markov models over 32 tokens: target logits are 2 * N(0, 1), the draft
adds sigma * N(0, 1) to them. Sigma is chosen so that the mean acceptance rate
sum_v min(p(v), q(v)) over the target's stationary distribution is the requested rate. Chains and
trees run through verify_chain and verify_tree; a tree holds K independent drafts of equal length.
"""

import argparse
import math
import statistics
from pathlib import Path

import torch
from scipy.optimize import brentq

from benchmarks.common import write_csv
from vllm_hsd.verify import Tree, verify_chain, verify_tree

VOCABULARY = 32
VERIFIERS = ["standard", "block", "tree K=2", "tree K=4"]
# (rate, draft length) -> recorded tokens per call of each verifier.
RECORDED = {
    (0.90, 8): [6.13, 6.86, 7.15, 7.38],
    (0.90, 16): [8.35, 11.05, 11.53, 11.95],
    (0.75, 8): [3.70, 4.46, 4.86, 5.23],
    (0.50, 8): [2.00, 2.28, 2.52, 2.79],
}


def toy_models(rate: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Transition tables (target, draft), float64 [V, V], with the requested acceptance rate."""
    generator = torch.Generator().manual_seed(seed)
    logits, noise = torch.randn(2, VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)
    target = (2 * logits).softmax(-1)
    stationary = torch.linalg.matrix_power(target, 1024)[0]

    def excess(sigma: float) -> float:
        draft = (2 * logits + sigma * noise).softmax(-1)
        return float(stationary @ torch.minimum(target, draft).sum(-1)) - rate

    sigma = brentq(excess, 0.0, 10.0)
    return target, (2 * logits + sigma * noise).softmax(-1)


def drafts(draft: torch.Tensor, context: torch.Tensor, length: int, generator) -> torch.Tensor:
    """One draft after each context: tokens [len(context), length + 1], the context first."""
    tokens = [context]
    for _ in range(length):
        tokens.append(torch.multinomial(draft[tokens[-1]], 1, generator=generator)[:, 0])
    return torch.stack(tokens, 1)


def chain_calls(
    target: torch.Tensor, draft: torch.Tensor, length: int, calls: int, seed: int, method: str
) -> list[float]:
    """Tokens per call, averaged over 1000 sequences, for each of the calls after a warm-up."""
    torch.manual_seed(seed)
    context = torch.randint(VOCABULARY, (1000,))
    means = []
    for _ in range(calls + 10):
        tokens = drafts(draft, context, length, None)
        result = verify_chain(
            target[tokens.flatten()],
            draft[tokens[:, :-1].flatten()],
            tokens[:, 1:].flatten(),
            [length] * len(context),
            method=method,
        )
        context = result.token_ids.gather(1, result.num_accepted[:, None])[:, 0]
        means.append(float(result.num_accepted.double().mean()) + 1)
    return means[10:]


def tree_calls(
    target: torch.Tensor, draft: torch.Tensor, length: int, calls: int, seed: int, k: int
) -> list[float]:
    """Tokens of each call of one sequence, after a warm-up; k drafts in a tree."""
    generator = torch.Generator().manual_seed(seed)
    parents = [node - 1 if node % length else -1 for node in range(k * length)]
    context, counts = 0, []
    for _ in range(calls + 10):
        tokens = drafts(draft, torch.full((k,), context), length, generator)
        drawn = tokens[:, 1:].flatten()
        rows = target[torch.cat((torch.tensor([context]), drawn))]
        emitted, _ = verify_tree(
            rows,
            draft[tokens[:, :-1].flatten()],
            Tree(parents, drawn.tolist()),
            generator=generator,
        )
        context = int(emitted[-1])
        counts.append(float(len(emitted)))
    return counts[10:]


def measure(
    rate: float, length: int, verifier: str, seeds: int, chain_count: int, tree_count: int
) -> tuple[float, float]:
    """Mean and standard error over all calls and pairs of models."""
    samples = []
    for seed in range(seeds):
        pair = toy_models(rate, seed)
        if verifier.startswith("tree K="):
            k = int(verifier.removeprefix("tree K="))
            samples.append(tree_calls(*pair, length, tree_count, seed, k))
        else:
            samples.append(chain_calls(*pair, length, chain_count, seed, verifier))
    mean = statistics.mean(statistics.mean(s) for s in samples)
    error = math.sqrt(sum(statistics.variance(s) / len(s) for s in samples)) / seeds
    return mean, error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("results"), help="directory of the CSV")
    parser.add_argument("--seeds", type=int, default=4, help="pairs of toy models")
    parser.add_argument("--chain-calls", type=int, default=50, help="of 1000 sequences, per pair")
    parser.add_argument("--tree-calls", type=int, default=1500, help="of 1 sequence, per pair")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for (rate, length), recorded in RECORDED.items():
        for verifier, expected in zip(VERIFIERS, recorded, strict=True):
            mean, error = measure(
                rate, length, verifier, args.seeds, args.chain_calls, args.tree_calls
            )
            rows.append(
                {
                    "rate": rate,
                    "draft": length,
                    "verifier": verifier,
                    "tokens_per_call": mean,
                    "error": error,
                    "recorded": expected,
                    "difference": mean / expected - 1,
                }
            )
            print(
                f"rate {rate:.2f} draft {length:2d} {verifier:12s} {mean:6.3f} +- {error:.3f}   "
                f"recorded {expected:5.2f}   {100 * (mean / expected - 1):+.1f} %",
                flush=True,
            )
    path = args.output / "toy_models.csv"
    write_csv(path, rows)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
