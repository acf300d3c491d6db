"""Interleaved cascades of "An Exploration of Hierarchical Speculative Decoding".

    python -m benchmarks.paper_tables.interleaved

Tokens per target call by the closed form (Theorem 3.2) over n tokens of the small model per token
of the medium one, m times, and the tokens per call that a cascade of ours with `"verifier":
"none"` emits at the same acceptance rates.
"""

import numpy as np
import torch

from benchmarks.common import RESULTS, options, write_csv
from benchmarks.paper_tables.closed_forms import interleaved_tokens
from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.tools.lookup_level import UNLIMITED
from vllm_hsd.tools.reference import ReferenceEngine

# Acceptance rates of the medium model and of the small one.
ALPHA, BETAS = 0.8, (0.5, 0.7)
NS, MS = (0, 1, 3), (1, 3)
# Runs of so many tokens: the draft that the end of one cuts weighs little.
RUNS, TOKENS = 4, 300


class ContextFree:
    """A model of two tokens that draws each alike, whatever came before."""

    context_length = UNLIMITED

    def __init__(self, first: float) -> None:
        self.logits = torch.tensor([first, 1 - first], dtype=torch.float64).log()

    def forward(self, tokens, rows, starts, counts, num_logits) -> torch.Tensor:
        """[sum of num_logits, V] rows, the same after every text."""
        return self.logits.repeat(int(num_logits.sum()), 1)


def measured_tokens(alpha: float, beta: float, m: int, n: int) -> tuple[float, float]:
    """(tokens per target call, standard error) of our cascade, at these acceptance rates."""
    target, medium, small = (ContextFree(0.05 + 1 - rate) for rate in (1.0, alpha, beta))
    levels, options = [medium], [LevelOptions(m)]
    if n:
        levels = [small, medium]
        options = [LevelOptions(n), LevelOptions(m * (n + 1), "none")]
    engine = ReferenceEngine(target, levels, options, verifier="standard")
    found = [engine.generate([0], TOKENS, seed=seed).block_efficiency for seed in range(RUNS)]
    return float(np.mean(found)), float(np.std(found, ddof=1) / np.sqrt(RUNS))


def table() -> list[dict[str, object]]:
    """A row for every beta, m and n."""
    rows = []
    for beta in BETAS:
        for m in MS:
            for n in NS:
                tokens, error = measured_tokens(ALPHA, beta, m, n)
                rows.append(
                    {
                        "beta": beta,
                        "m": m,
                        "n": n,
                        "tokens": interleaved_tokens(ALPHA, beta, m, n),
                        "measured_tokens": tokens,
                        "standard_error": error,
                    }
                )
    return rows


def main() -> None:
    output = options(__doc__, RESULTS / "paper_tables").parse_args().output
    path, rows = output / "interleaved.csv", table()
    write_csv(path, rows)
    far = max(abs(r["measured_tokens"] - r["tokens"]) / r["standard_error"] for r in rows)
    print(f"Largest distance of measured tokens from the closed form: {far:.1f} standard errors.")
    print(f"Written: {path}")


if __name__ == "__main__":
    main()
