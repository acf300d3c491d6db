"""Block and token-level verification of Qwen2.5-Coder 1.5B, drafted for by its 0.5B: tokens a step.

    python -m benchmarks.paper_tables.family_verifiers --prompts DIR   # with `make bench-papers`

Table 1 of "Overcoming Joint Intractability with Lossless Hierarchical Speculative Decoding" on a
real family. Both rules along the same texts, which the target draws: how far a draft is accepted is
computed there, over all drafts and uniforms, from the two models' probabilities of the text (see
`tools.planner.survival`). So a difference of the rules is no noise of drafts. Writes
family_verifiers.csv: means of the prompts of a set with 95 % intervals (bootstrap over prompts).
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import RESULTS, options, write_csv
from benchmarks.models.qwen_coder import qwen_coder
from vllm_hsd.tools.cli.options import progress
from vllm_hsd.tools.planner.acceptance import scored_texts
from vllm_hsd.tools.planner.models import ModelSet
from vllm_hsd.tools.planner.profile import Sampling
from vllm_hsd.tools.planner.prompts import encode, read_prompts
from vllm_hsd.tools.planner.survival import VERIFIERS, Verifier, survival_along, visits, windows
from vllm_hsd.tools.planner.task import Task, candidates

Floats = NDArray[np.float64]
SETS = "alpaca", "gsm8k", "humaneval", "mt_bench", "qa", "sum"
LENGTHS, TEMPERATURES = (2, 4, 8, 16), (1.0, 0.6)
LONGEST_PROMPT, RESAMPLES = 1024, 2000


def rounds(ratios: Floats, rule: Verifier, length: int) -> Floats:
    """[2, N]: tokens and rounds of N texts, where rounds of a draft length follow one another.

    Args:
        ratios: [N, L] log q - log p of the texts' tokens, nan past their ends.
    """
    alive = survival_along(windows(ratios, length), rule)
    room = (~np.isnan(ratios)).sum(1, keepdims=True) - np.arange(ratios.shape[1])
    starts = np.where(room >= length, visits(alive, length), 0.0)
    return np.stack(((starts * alive.sum(-1)).sum(1), starts.sum(1)))


def table(ratios: dict[str, Floats], temperature: float) -> Iterator[dict[str, Any]]:
    """A row for every set, and for all, by draft length."""
    rng = np.random.default_rng(0)
    named = {**ratios, "all": np.concatenate(list(ratios.values()))}
    for name, own in named.items():
        for length in LENGTHS:
            found = {rule: rounds(own, rule, length) for rule in VERIFIERS}
            chosen = rng.integers(0, len(own), (RESAMPLES, len(own)))
            means = {rule: each.sum(1) for rule, each in found.items()}
            again = {rule: each[:, chosen].sum(2) for rule, each in found.items()}
            with np.errstate(invalid="ignore"):
                tokens, resampled = (
                    {rule: emitted / begun for rule, (emitted, begun) in each.items()}
                    for each in (means, again)
                )
            ratio = resampled["block"] / resampled["standard"]
            # Where texts end before the draft does, some resamples have no round.
            low, high = np.quantile(ratio, (0.025, 0.975)) if np.isfinite(ratio).all() else ("", "")
            yield {
                "set": name,
                "temperature": temperature,
                "draft_length": length,
                "prompts": len(own),
                **{f"tokens_per_step_{rule}": float(tokens[rule]) for rule in VERIFIERS},
                "block_over_standard": float(tokens["block"] / tokens["standard"]),
                "low": low,
                "high": high,
            }


def main() -> None:
    parser = options(__doc__, RESULTS / "paper_tables")
    parser.add_argument("--prompts", type=Path, help="JSON lines files of the sets, else fetched")
    parser.add_argument("--num-prompts", type=int, default=8, help="of each set")
    parser.add_argument("--tokens", type=int, default=96, help="of every text")
    chosen = parser.parse_args()
    target = os.path.relpath(qwen_coder("1.5B"))
    found = candidates(models=[os.path.relpath(qwen_coder("0.5B"))])
    models = ModelSet(target, found)
    files = {n: chosen.prompts / f"{n}.jsonl" if chosen.prompts else n for n in SETS}
    prompts = {name: read_prompts(file)[: chosen.num_prompts] for name, file in files.items()}
    rows: list[dict[str, Any]] = []
    for temperature in TEMPERATURES:
        sampling = Sampling(temperature=temperature)
        task = Task(target, found, sampling, max(LENGTHS), text_tokens=chosen.tokens)
        ratios = {}
        for name, own in prompts.items():
            contexts = [encode(models.tokenizer, prompt, LONGEST_PROMPT) for prompt in own]
            texts = scored_texts(models, len(found), contexts, task, (0, SETS.index(name)))
            # The prefill emits the first token, so the first draft starts after it.
            ratios[name] = (texts.log_probs[0] - texts.log_probs[1])[:, 1:]
            progress(f"temperature {temperature}, {name}: {int(texts.lengths.sum())} tokens")
        rows += table(ratios, temperature)
        write_csv(chosen.output / "family_verifiers.csv", rows)
    for row in rows:
        print(*(f"{v:.3f}" if isinstance(v, float) else v for v in row.values()), sep="\t")


if __name__ == "__main__":
    main()
