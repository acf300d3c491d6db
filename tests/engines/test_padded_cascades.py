"""Levels whose logits are wider or narrower than the target's: whole engines."""

import pytest
from support import engines
from support.engines import run_engine
from support.level_files import cascade
from support.tiny_models import byte_tokenizer, resized

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_greedy_text_is_that_of_no_speculation(text_family, tmp_path):
    size = text_family.vocabulary
    rows = {"target": size, "mid": size + 9, "small": size - 9}
    paths = {n: resized(getattr(text_family, n), tmp_path / n, rows[n]) for n in rows}
    for path in paths.values():
        byte_tokenizer().save_pretrained(path)
    # The narrow drafter has no row for the last tokens of the vocabulary.
    prompts = [[5, 9, size - 1, 40, 7], [30, 31, 32]]
    params = [{"temperature": t, "max_tokens": 10, "ignore_eos": True} for t in (0, 1)]
    jobs = {"text": {"prompts": prompts, "params": params}}
    plain = engines.run_engine({"model": paths["target"]}, jobs)["text"]["outputs"]
    levels = [{"model": paths["small"], "num_tokens": 1}, {"model": paths["mid"]}]
    config = cascade(*levels, num_speculative_tokens=3)
    found = run_engine({"model": paths["target"], **config}, jobs)["text"]
    assert found["outputs"][0][0]["ids"] == plain[0][0]["ids"]
    assert len(found["outputs"][1][0]["ids"]) == 10
    assert found["counters"]["spec_decode_num_accepted_tokens"] > 0
