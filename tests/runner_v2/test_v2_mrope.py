"""A target with multi-dimensional positions (M-RoPE) below a cascade on the V2 runner."""

import pytest
from support import v2_engines
from support.level_files import cascade
from support.mrope_target import write_mrope_models

pytestmark = [pytest.mark.triton, pytest.mark.slow]
REQUEST = {"max_tokens": 14, "ignore_eos": True}
PARAMS = [{**REQUEST, "temperature": t, "seed": 3} for t in (0, 0, 1)]
JOBS = {"text": {"prompts": v2_engines.PROMPTS[:3], "params": PARAMS}}


def run(engine: dict) -> dict:
    return v2_engines.run_engine(engine, JOBS, patch="support.mrope_target:register")["text"]


def test_texts_are_those_of_no_speculation(tmp_path):
    target, drafter = write_mrope_models(tmp_path)
    lowest, model = {"ngram": {"max": 3}, "num_tokens": 3}, {"model": drafter}
    crowded = {"max_num_batched_tokens": 24, "max_num_seqs": 4}
    plain, ours = (
        run({"model": target}),
        run({"model": target, **crowded, **cascade(lowest, model)}),
    )
    for mine, wanted in zip(ours["outputs"], plain["outputs"], strict=True):
        assert mine[0]["ids"] == wanted[0]["ids"]
    assert all(level["accepted"] > 0 for level in ours["levels"])
