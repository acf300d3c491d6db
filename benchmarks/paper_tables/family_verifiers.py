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

from benchmarks.columns import bootstrap
from benchmarks.common import RESULTS, options, write_csv
from benchmarks.models.qwen_coder import qwen_coder
from benchmarks.sweep import read_sets
from vllm_hsd.tools.cli.options import progress
from vllm_hsd.tools.planner.acceptance import scored_texts
from vllm_hsd.tools.planner.models import ModelSet
from vllm_hsd.tools.planner.profile import Sampling
from vllm_hsd.tools.planner.prompts import encode
from vllm_hsd.tools.planner.survival import (
    VERIFIERS,
    Floats,
    Verifier,
    round_starts,
    survival_along,
    windows,
)
from vllm_hsd.tools.planner.task import Task, candidates

LENGTHS, TEMPERATURES = (2, 4, 8, 16), (1.0, 0.6)
LONGEST_PROMPT = 1024


def rounds(ratios: Floats, rule: Verifier, length: int) -> Floats:
    """[2, N]: tokens and rounds of N texts, where rounds of a draft length follow one another.

    Args:
        ratios: [N, L] log q - log p of the texts' tokens, nan past their ends.
    """
    alive = survival_along(windows(ratios, length), rule)
    room = (~np.isnan(ratios)).sum(1, keepdims=True) - np.arange(ratios.shape[1])
    starts = round_starts(alive, length, room, by_position=False)
    return np.stack(((starts * alive.sum(-1)).sum(1), starts.sum(1)))


def table(ratios: dict[str, Floats], temperature: float) -> Iterator[dict[str, Any]]:
    """A row for every set, and for all, by draft length."""
    named = {**ratios, "all": np.concatenate(list(ratios.values()))}
    for name, own in named.items():
        for length in LENGTHS:
            found = [rounds(own, rule, length) for rule in VERIFIERS]
            emitted, begun = np.stack(found, axis=1)
            with np.errstate(invalid="ignore"):
                block, standard = (emitted.sum(1) / begun.sum(1)).tolist()
                low, high = bootstrap(emitted, begun)
            # Where texts end before the draft does, some resamples have no round.
            missing = np.isnan(low)
            yield {
                "set": name,
                "temperature": temperature,
                "draft_length": length,
                "prompts": len(own),
                "tokens_per_step_block": block,
                "tokens_per_step_standard": standard,
                "block_over_standard": block / standard,
                "low": "" if missing else low,
                "high": "" if missing else high,
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
    prompts, sets = read_sets(chosen.prompts, chosen.num_prompts)
    rows: list[dict[str, Any]] = []
    for temperature in TEMPERATURES:
        sampling = Sampling(temperature=temperature)
        task = Task(target, found, sampling, max(LENGTHS), text_tokens=chosen.tokens)
        ratios = {}
        for number, (name, own) in enumerate(sets.items()):
            contexts = [encode(models.tokenizer, prompts[i])[-LONGEST_PROMPT:] for i in own]
            texts = scored_texts(models, len(found), contexts, task, (0, number))
            # The prefill emits the first token, so the first draft starts after it.
            ratios[name] = (texts.log_probs[0] - texts.log_probs[1])[:, 1:]
            progress(f"temperature {temperature}, {name}: {int(texts.lengths.sum())} tokens")
        rows += table(ratios, temperature)
        write_csv(chosen.output / "family_verifiers.csv", rows)
    for row in rows:
        print(*(f"{v:.3f}" if isinstance(v, float) else v for v in row.values()), sep="\t")


if __name__ == "__main__":
    main()
