"""How much of a level's drafts is accepted: of built files, and where drafts end by entropy."""

import numpy as np
from support.engines import run_engine
from support.level_files import cascade

from vllm_hsd.tools.cli.main import main

PROMPTS = [[(3 * i + j * j) % 5 for j in range(4 + 6 * i)] for i in range(8)]
SAMPLED = {"temperature": 1, "max_tokens": 40, "ignore_eos": True}


def acceptance_rates(model: str, *levels: dict, repeat: int = 1, **keys) -> list[float]:
    """Accepted share of each level's drafts at temperature 1."""
    job = {"prompts": PROMPTS * repeat, "params": SAMPLED}
    result = run_engine({"model": model, **cascade(*levels, **keys)}, {"sampled": job})
    return [level["accepted"] / level["drafted"] for level in result["sampled"]["levels"]]


def test_files_written_by_the_commands_are_served(text_family, tmp_path):
    """A trained head accepts more than the plain exit that its training started from."""
    text = np.random.default_rng(0).integers(32, 127, 6000, dtype=np.uint8).tobytes().decode()
    corpus, table = str(tmp_path / "text"), str(tmp_path / "table")
    (tmp_path / "text").write_text(text)
    assert main(["build", "store", "--target", text_family.target, corpus, "-o", table]) == 0
    arguments = ["--target", text_family.target, "--layers", "1", "--steps", "80"]
    assert main(["build", "exit-heads", *arguments, "-o", str(tmp_path), corpus]) == 0
    lowest, head = {"bigram": table, "num_tokens": 1}, {"exit_head": str(tmp_path / "layer-1")}
    # Short drafts: the accepted share of longer drafts depends on their length.
    drafts = {"repeat": 8, "num_speculative_tokens": 2}
    (plain,) = acceptance_rates(text_family.target, {"early_exit": 1}, **drafts)
    bigram, trained = acceptance_rates(text_family.target, lowest, head, **drafts)
    assert trained > plain + 0.02 and bigram > 0


def test_entropy_based_stopping_wastes_fewer_tokens(small_vocabulary):
    level = {"model": small_vocabulary.small}
    (fixed,) = acceptance_rates(small_vocabulary.target, level)
    (ended,) = acceptance_rates(small_vocabulary.target, {**level, "stopping": "entropy"})
    assert ended > fixed
