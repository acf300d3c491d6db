"""When do several drafts of one request pay? K i.i.d. chains against one, both of optimal length.

    python -m benchmarks.planner.several_drafts

Tokens per target call come from order-1 Markov models over 32 tokens: target logits are 2 N(0, 1),
the draft adds noise to them, as much as gives the acceptance rate over the target's stationary
distribution. One chain is verified by block verification, a tree of 2 or 4 by the traversal rule.
A target call over m tokens costs 1 + slope * (m - 1) of one over a token, and a draft step of K
tokens the drafter's cost times as much; the chain may be of another length than those of the tree.
Writes several_drafts.csv (tokens), several_drafts_map.csv and several_drafts.png.
"""

import itertools
import math
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq

from benchmarks import plot
from benchmarks.common import RESULTS, options, write_csv
from vllm_hsd.rules import Tree, verify_chain, verify_tree

VOCABULARY = 32
RATES = (0.5, 0.6, 0.7, 0.8, 0.9)
LENGTHS = (1, 2, 3, 4, 6, 8, 12)
CHAINS = (1, 2, 4)
COSTS = (0.02, 0.1, 0.3)
SLOPES = (0.0, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08)

# (rate, chains, length) -> tokens per target call
Tokens = Mapping[tuple[float, int, int], float]


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


def step_cost(chains: int, length: int, cost: float, slope: float) -> float:
    """Time of a target call with its drafting, over a plain step of the target."""
    drafting = length * cost * (1 + slope * (chains - 1))
    return drafting + 1 + slope * chains * length


def best(tokens: Tokens, rate: float, chains: int, cost: float, slope: float) -> tuple[float, int]:
    """(speed-up over no speculation, draft length) of the best length of so many chains."""
    lengths = sorted(n for r, k, n in tokens if (r, k) == (rate, chains))
    return max((tokens[rate, chains, n] / step_cost(chains, n, cost, slope), n) for n in lengths)


def gains(tokens: Tokens) -> list[dict[str, Any]]:
    """The map, a row for every cell."""
    rows = []
    rates = sorted({rate for rate, _, _ in tokens})
    several = sorted({chains for _, chains, _ in tokens} - {1})
    for chains, cost, rate, slope in itertools.product(several, COSTS, rates, SLOPES):
        chain, length = best(tokens, rate, 1, cost, slope)
        tree, tree_length = best(tokens, rate, chains, cost, slope)
        rows.append(
            {
                "chains": chains,
                "drafter_cost": cost,
                "rate": rate,
                "slope": slope,
                "chain_length": length,
                "chain_speedup": chain,
                "tree_length": tree_length,
                "tree_speedup": tree,
                "ratio": tree / chain,
            }
        )
    return rows


def main() -> None:
    parser = options(__doc__, RESULTS / "planner")
    parser.add_argument("--seeds", type=int, default=2, help="pairs of toy models")
    parser.add_argument("--chain-calls", type=int, default=20, help="of 1000 sequences, per pair")
    parser.add_argument("--tree-calls", type=int, default=700, help="of 1 sequence, per pair")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    tokens: dict[tuple[float, int, int], float] = {}
    for rate, chains, length in itertools.product(RATES, CHAINS, LENGTHS):
        verifier = "block" if chains == 1 else f"tree K={chains}"
        counts = args.seeds, args.chain_calls, args.tree_calls
        tokens[rate, chains, length], error = measure(rate, length, verifier, *counts)
        rows.append(
            {
                "rate": rate,
                "chains": chains,
                "draft": length,
                "tokens_per_call": tokens[rate, chains, length],
                "error": error,
            }
        )
        print(f"{rate:g} {verifier} {length}: {rows[-1]['tokens_per_call']:.3f} +- {error:.3f}")
    write_csv(args.output / "several_drafts.csv", rows)
    table = gains(tokens)
    write_csv(args.output / "several_drafts_map.csv", table)
    shown = [
        row
        | {
            "panel": f"{row['chains']} drafts, drafter costs {row['drafter_cost']:g}",
            "line": f"acceptance {row['rate']:g}",
        }
        for row in table
    ]
    plot.lines(
        shown,
        args.output / "several_drafts.png",
        x="slope",
        measures={"ratio": "several drafts / one chain"},
        line="line",
        panel="panel",
        labels=dict.fromkeys(
            plot.values(shown, "panel"), "cost of each further token / target step"
        ),
    )
    ratios = np.array([row["ratio"] for row in table])
    print(f"several drafts over one chain: {ratios.min():.2f} to {ratios.max():.2f}")


if __name__ == "__main__":
    main()
