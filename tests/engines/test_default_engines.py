"""Engines as users start them: compiled models, prefix caching, the model's sampling parameters."""

import json
import shutil

import pytest
from support.cascades import head
from support.engines import GREEDY, PROMPTS, ids, run_engine, run_jobs
from support.level_files import cascade

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SAMPLING = {"temperature": 0.7, "top_k": 20, "top_p": 0.9}


def run_compiled_jobs(llm, jobs: dict[str, dict]) -> dict:
    """The jobs with the model's own sampling parameters, and how many models were compiled."""
    from vllm.compilation.counter import compilation_counter

    own = llm.get_default_sampling_params()
    sampling = {key: getattr(own, key) for key in ("temperature", "top_k", "top_p")}
    for job in jobs.values():
        job["params"] = [{**sampling, **params} for params in job["params"]]
    results = run_jobs(llm, jobs)
    return {**results, "sampling": sampling, "compiled": compilation_counter.num_models_seen}


@pytest.mark.parametrize("name", ["two levels", "three levels", "head"])
def test_compiled_levels_write_the_targets_text(name, family, greedy_tokens, tmp_path):
    """Above two requests nothing is drafted; the later prompts begin in cached blocks."""
    target = shutil.copytree(family.target, tmp_path / "target")
    (target / "generation_config.json").write_text(json.dumps({"do_sample": True, **SAMPLING}))
    one, mid = {"num_tokens": 1}, {"model": family.mid}
    levels = {
        "head": [{"eagle3": head(family), **one}, mid],
        "two levels": [{"model": family.small, **one}, mid],
        "three levels": [{"ngram": {"max": 3}, **one}, {"early_exit": 1, "num_tokens": 2}, mid],
    }[name]
    engine = {"model": str(target), "enforce_eager": False, "compilation_config": {"mode": 3}}
    engine |= {"block_size": 32, "max_num_seqs": 4, **cascade(*levels, disable_by_batch_size=2)}
    sampled = {"max_tokens": GREEDY["max_tokens"], "ignore_eos": True}
    # Below a head vLLM computes the last block of a prefix again.
    shared = [(5 * j) % 60 + 2 for j in range(72)]
    jobs = {
        "greedy": {"prompts": PROMPTS, "params": [GREEDY] * 4, "arrive": [0, 2, 3, 5]},
        "sampled": {
            "prompts": [shared, shared, shared[:33], PROMPTS[0]],
            "params": [sampled, {**sampled, "seed": 1}, sampled, GREEDY],
            "arrive": [0, 9, 9, 9],
        },
    }
    # One place for what torch compiles, which tests run in parallel must not share half written.
    env = {"TORCHDYNAMO_DISABLE": "0", "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    found = run_engine(engine, jobs, env=env, forks=False, work=run_compiled_jobs)
    assert found["sampling"] == SAMPLING
    # The target and every level with weights; an early exit runs the target's layers.
    models = sum("model" in level or "eagle3" in level for level in levels)
    assert found["compiled"] == 1 + models
    assert ids(found["greedy"]) == greedy_tokens
    assert found["sampled"]["outputs"][3][0]["ids"] == greedy_tokens[0]
    counters = found["sampled"]["counters"]
    assert counters["prefix_cache_hits"] > 0 and counters["spec_decode_num_accepted_tokens"] > 0
