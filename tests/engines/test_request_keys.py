"""What a request says of its drafts: predictions, draft lengths; none of it changes a text."""

import os
from types import SimpleNamespace
from unittest import mock

import pytest
from support.cascades import stock
from support.eagle3_head import write_eagle3_head
from support.engines import AS_ON_GPUS, configure, ids, in_process, run_engine, run_jobs
from support.level_files import cascade
from support.marks import slow

from vllm_hsd.errors import UserError
from vllm_hsd.host.request_keys import process_inputs

PROMPTS = [[(7 * i + j * j) % 60 + 2 for j in range(5 + 12 * i)] for i in range(8)]
LENGTH = 40
GREEDY = {"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True}
SEEDED = [{**GREEDY, "temperature": 1, "seed": i} for i in range(8)]
PREDICTION: dict = {"prediction": {}}
TWO, THREE = {"num_tokens": 2}, {"num_tokens": 3}
FOUR, SIX = {"num_speculative_tokens": 4}, {"num_speculative_tokens": 6}


def job(params: list[dict], keys: list[dict], prompts: list[list[int]] = PROMPTS) -> dict:
    params = [{**each, "extra_args": key} for each, key in zip(params, keys, strict=True)]
    return {"prompts": prompts, "params": params}


def predicted(answers: list[list[int]]) -> list[dict]:
    """A prediction for each answer."""
    one, two, three, four, _, six, seven, _ = answers
    predictions = {
        "equal": one,
        "a part less": [*two[:9], *two[14:]],
        "a part more": [*three[:9], 3, 4, 5, *three[9:]],
        "by another tokenizer": [63 - token for token in four],
        "empty": [],
        "longer than the answer": six + [7] * (256 - LENGTH),
        "backwards": [*reversed(seven)],
        "garbage": [(37 * i * i + 11) % 64 for i in range(90)],
    }
    return [{"hsd_prediction": tokens, "other": "key"} for tokens in predictions.values()]


CROWDED = {"max_num_batched_tokens": 24, "max_num_seqs": 8, "num_gpu_blocks_override": 9}
LOOKUPS = {"sources": [PREDICTION, {"ngram": {"max": 3}}]}
ENGINES = {
    "adaptive": lambda family: cascade(PREDICTION, **SIX, adaptive=True),
    "sources": lambda family: cascade(LOOKUPS),
    "branches": lambda family: cascade(LOOKUPS | {"branches": 4}),
    "next to a model": lambda family: cascade({"sources": [PREDICTION, {"model": family.small}]}),
    "below a model": lambda family: cascade(PREDICTION | THREE, {"model": family.mid}, **SIX),
    "chunked prefill and preemption": lambda family: cascade(PREDICTION, **FOUR) | CROWDED,
    "as on a GPU": lambda family: ENGINES["sources"](family),
    "chunked, below a model as on a GPU": lambda family: (
        cascade(PREDICTION | TWO, {"model": family.mid}, **FOUR) | CROWDED
    ),
}
SLOW = ("adaptive", "next to a model", "as on a GPU")


@pytest.fixture(scope="module")
def plain(family) -> dict:
    params = {"greedy": GREEDY, "seeded": SEEDED}
    jobs = {name: {"prompts": PROMPTS, "params": each} for name, each in params.items()}
    return run_engine({"model": family.target}, jobs)


@pytest.fixture(scope="module")
def jobs(plain) -> dict:
    answers, drawn = ids(plain["greedy"]), ids(plain["seeded"])
    lengths = [{"hsd_num_tokens": n} for n in (0, 1, 2, 3, 0, 99, 4, 5)]
    one, siblings = {"hsd_prediction": answers[2]}, [{**SEEDED[i], "n": 3} for i in range(2)]
    return {
        "greedy": job([GREEDY] * 8, predicted(answers)),
        # What a seed draws is predicted as well as what is greedy.
        "seeded": job(SEEDED, predicted(drawn)),
        "lengths": job([GREEDY] * 8, lengths),
        "none": job([GREEDY] * 8, [{"hsd_num_tokens": 0}] * 8),
        "equal": job([GREEDY], [one], PROMPTS[2:3]),
        "both": job([GREEDY], [{**one, "hsd_num_tokens": 2}], PROMPTS[2:3]),
        "siblings": job(siblings, [{"hsd_prediction": each} for each in drawn[:2]], PROMPTS[:2]),
    }


@pytest.fixture(scope="module", params=[*(n for n in ENGINES if n not in SLOW), *slow(*SLOW)])
def results(request, family, jobs) -> tuple[str, dict]:
    # Small blocks: later jobs find their prompts computed.
    engine = {"model": family.target, "block_size": 32, **ENGINES[request.param](family)}
    with mock.patch.dict(os.environ, {AS_ON_GPUS: "1"} if "as on a GPU" in request.param else {}):
        return request.param, run_engine(engine, jobs)


def test_no_key_changes_a_text(results, plain):
    _, found = results
    assert ids(found["greedy"]) == ids(plain["greedy"])
    assert ids(found["seeded"]) == ids(plain["seeded"])
    assert ids(found["lengths"]) == ids(found["none"]) == ids(plain["greedy"])
    assert ids(found["equal"]) == ids(found["both"]) == ids(plain["greedy"])[2:3]
    # The first sibling draws with the seed itself.
    assert ids(found["siblings"]) == ids(plain["seeded"])[:2]


def test_drafts_follow_the_keys(results):
    name, found = results
    assert all(level["drafted"] == 0 for level in found["none"]["levels"])
    *_, level = found["equal"]["levels"]
    # All but the first token of each step; a GPU may draft after the last one.
    assert level["drafted"] - level["accepted"] <= 6 or "model" in name
    assert level["accepted"] > LENGTH // 2
    *_, level = found["both"]["levels"]
    # Of every branch too.
    assert 0 < level["drafted"] - level["branch_tokens"] <= 2 * level["rounds"]
    # In so few blocks nothing stays that a later job could find.
    happens = "num_preemptions" if name.startswith("chunked") else "prefix_cache_hits"
    assert sum(job["counters"][happens] for job in found.values()) > 0


def goes_on(llm, jobs) -> dict:
    """A request that drafts nothing, and one whose prompt is all that it has computed."""
    results = run_jobs(llm, jobs)
    [(before, answer)] = zip(jobs["off"]["prompts"], ids(results["off"]), strict=True)
    prompts = [[*before, *answer]]
    return run_jobs(llm, {"on": {"prompts": prompts, "params": GREEDY}})["on"]


def test_a_request_that_drafts_nothing_leaves_no_hole_in_shared_blocks(proposals, family):
    """Models equal to the target: what they lack would cost acceptance."""
    model = {"model": family.target}
    engine = {**model, **cascade({**model, "num_tokens": 2}, model), "block_size": 32}
    off = {**GREEDY, "max_tokens": 100, "extra_args": {"hsd_num_tokens": 0}}
    jobs = {"off": {"prompts": PROMPTS[2:3], "params": off}}
    found = run_engine(engine, jobs, work=goes_on)
    assert found["counters"]["prefix_cache_hits"] >= 96
    for level in found["levels"]:
        # A GPU may draft after the last token.
        assert level["drafted"] - level["accepted"] <= 5 < level["accepted"]


@pytest.mark.slow
def test_next_to_a_head(family, jobs, plain, tmp_path):
    """vLLM's own drafter runs the head."""
    head = write_eagle3_head(family.target, tmp_path, trained=True)
    engine = {"model": family.target, **cascade({"sources": [PREDICTION, {"eagle3": head}]})}
    found = run_engine(engine, {name: jobs[name] for name in ("greedy", "none", "equal")})
    assert ids(found["greedy"]) == ids(found["none"]) == ids(plain["greedy"])
    assert found["none"]["counters"]["spec_decode_num_accepted_tokens"] == 0
    assert found["equal"]["counters"]["spec_decode_num_accepted_tokens"] > LENGTH // 2


REFUSED = {
    "is no key": {"hsd_predictions": [1]},
    "give text or a list": {"hsd_prediction": 7},
    "give text or": {"hsd_prediction": [1, True]},
    "has no tokenizer": {"hsd_prediction": "abc"},
    "outside the vocabulary of 64": {"hsd_prediction": [63, 64]},
    "token -1": {"hsd_prediction": [-1]},
    "max_model_len is 256": {"hsd_prediction": [1] * 257},
    "0 for none": {"hsd_num_tokens": -1},
    "give the most": {"hsd_num_tokens": True},
    "of a draft": {"hsd_num_tokens": "2"},
}


def refusals(llm, requests: list[dict]) -> list[str]:
    """What an engine says of each request's `extra_args`; it goes on serving."""
    from vllm import SamplingParams

    said = []
    for keys in requests:
        params = SamplingParams(max_tokens=2, extra_args=keys)
        try:
            llm.generate([{"prompt_token_ids": [5, 6]}], params, use_tqdm=False)
            said.append("")
        except ValueError as error:
            said.append(str(error))
        assert params.extra_args == keys
    return said


def test_keys_are_refused_in_one_sentence(family):
    engine = {"model": family.target, **cascade(PREDICTION)}
    right = {"hsd_prediction": (5, 6), "hsd_num_tokens": 2**31 - 1, "mine": "x"}
    *found, served = run_engine(engine, [*REFUSED.values(), right], work=refusals)
    for sentence, mistake in zip(REFUSED, found, strict=True):
        assert sentence in mistake and mistake.count(". ") == 0 and mistake.endswith(".")
    assert served == ""


def test_servers_that_do_not_draft_from_it(family):
    """As their front ends say."""

    def ask(speculative: dict, keys: dict) -> None:
        config = configure(family, speculative)
        front_end = SimpleNamespace(**vars(config), tokenizer=None)
        params = SimpleNamespace(extra_args=keys)
        request = SimpleNamespace(sampling_params=params)
        process_inputs(lambda *_: request, front_end, "id", [], params)

    prediction, length = {"hsd_prediction": [5]}, {"hsd_num_tokens": 1}
    lookup = cascade({"ngram": {"max": 3}})["speculative_config"]
    ask(lookup, length)
    with pytest.raises(UserError, match="no source of this server drafts from it"):
        ask(lookup, prediction)
    for keys in (prediction, length):
        with pytest.raises(UserError, match="vLLM's own drafter"):
            ask(stock("ngram", num_speculative_tokens=2, prompt_lookup_max=3), keys)


def openai_fields() -> list:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    from vllm_hsd.host.hooks import install

    install()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"messages": [{"role": "user", "content": "x"}]}
    fields = [
        {},
        {"prediction": {"type": "content", "content": "abc"}},
        {"prediction": {"type": "content", "content": parts}, "vllm_xargs": {"hsd_num_tokens": 3}},
        {"prediction": {"type": "content", "content": 5}},
        {"prediction": None},
    ]
    requests = [ChatCompletionRequest(**message, **each) for each in fields]
    return [request.to_sampling_params(5, {}).extra_args for request in requests]


def test_the_field_of_openai():
    assert in_process(openai_fields, {}) == [
        None,
        {"hsd_prediction": "abc"},
        {"hsd_prediction": "ab", "hsd_num_tokens": 3},
        {"hsd_prediction": 5},
        None,
    ]
