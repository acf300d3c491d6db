"""Drafters equal to the target: every draft token must be accepted."""

import pytest
from support.engines import run_engine
from support.level_files import cascade

PROMPTS = [[(7 * i + 3 * j) % 60 + 2 for j in range(3 + 5 * i)] for i in range(8)]
REQUEST = {"max_tokens": 24, "ignore_eos": True}
CASES = [{"temperature": t, "top_p": p} for t in (0.7, 1.0, 1.3) for p in (1.0, 0.8)]
CASES += [{"top_k": 5, "min_p": 0.05}, {"temperature": 0}]


@pytest.mark.parametrize(("levels", "verifier"), [(1, "block"), (2, "block"), (2, "coupled")])
def test_every_draft_is_accepted(family, levels, verifier):
    jobs = {str(case): {"prompts": PROMPTS, "params": {**REQUEST, **case}} for case in CASES}
    model = {"model": family.target}
    below = [{**model, "num_tokens": 2 + k} for k in range(levels - 1)]
    engine = {**model, **cascade(*below, model, verifier=verifier)}
    for name, result in run_engine(engine, jobs).items():
        assert all(len(output[0]["ids"]) == 24 for output in result["outputs"])
        counters = result["counters"]
        assert counters["spec_decode_num_draft_tokens"] > 100, name
        # vLLM's count of drafted tokens includes placeholders; the levels' counts do not.
        for level in result["levels"]:
            assert level["accepted"] == level["drafted"] > 0, name
        assert counters["spec_decode_num_accepted_tokens"] == result["levels"][-1]["accepted"], name
