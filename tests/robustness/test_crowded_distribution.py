"""Sampled tokens keep the target's distribution where a grammar or the scheduler cuts drafts.

Drafters do not know the allowed letters; there are few others, so that many drafts get through.
"""

import pytest
from support.engines import run_engine, run_jobs
from support.exact_joint_distribution import chi_square_p_value, joint_distribution
from support.level_files import cascade
from support.sampling_cases import SIGNIFICANCE

from vllm_hsd.tools.audit.tiny_models import EOS, Family, build_family, byte_tokenizer

TOKENIZER = byte_tokenizer("abcdef")
LETTERS = TOKENIZER.convert_tokens_to_ids(list("abcdef"))
# The outputs begin in one cache block and end in the next: more requests start than can go on.
PROMPT = TOKENIZER.encode("acabaabedabeadacafeacedabeefadedacab")[:30]
PARAMS = {
    "grammar": {"structured_outputs": {"regex": "[a-d]{3}"}, "temperature": 2.0, "max_tokens": 40},
    "free": {"allowed_token_ids": [*LETTERS[:3], EOS], "temperature": 2.0, "max_tokens": 4},
}


# Two tokens for most requests of a step, and blocks for half of them.
CROWDED = {"max_model_len": 96, "max_num_seqs": 24, "max_num_batched_tokens": 48}
CROWDED |= {"block_size": 32, "num_gpu_blocks_override": 8}


def sample(
    family, room: dict, count: int, kinds: list[str], patch: str | None = None
) -> tuple[dict[str, list], dict]:
    """Kind of request -> token ids of its outputs, and the result of the job."""
    # Far from the target: otherwise a plain bonus token after a cut is hardly an error.
    top = {"model": family.mid, "temperature_scale": 0.4}
    levels = cascade({"model": family.small, "num_tokens": 3}, top, num_speculative_tokens=6)
    engine = {"model": family.target, "skip_tokenizer_init": False, **levels, **room}
    engine["structured_outputs_config"] = {"backend": "xgrammar"}
    params = [PARAMS[kind] for _ in range(count) for kind in kinds]
    job = {"prompts": [PROMPT] * len(params), "params": params}
    result = run_engine(engine, {"job": job}, patch=patch)["job"]
    outputs = [tuple(output[0]["ids"]) for output in result["outputs"]]
    return {kind: outputs[i :: len(kinds)] for i, kind in enumerate(kinds)}, result


@pytest.fixture(scope="module")
def letters(tmp_path_factory) -> Family:
    """Models with TOKENIZER."""
    family = build_family(tmp_path_factory.mktemp("letters"), len(TOKENIZER), peak=4.0)
    for path in (family.target, family.mid, family.small):
        TOKENIZER.save_pretrained(path)
    return family


@pytest.fixture(scope="module")
def exact(letters) -> dict[str, dict[tuple[int, ...], float]]:
    """Kind of request -> outcome -> probability, in float64."""
    # What the grammar allows: three of the letters, and then nothing but the end.
    three = {"allowed_token_ids": LETTERS[:4], "temperature": 2.0}
    grammar = joint_distribution(letters.target, PROMPT, 3, three)
    return {
        "grammar": {(*outcome, EOS): p for outcome, p in grammar.items()},
        "free": joint_distribution(letters.target, PROMPT, 4, PARAMS["free"], EOS),
    }


SLOW = pytest.mark.slow, pytest.mark.timeout(9000)


@pytest.mark.parametrize(
    ("room", "count"),
    [
        (CROWDED, 150),
        *(pytest.param(room, count, marks=SLOW) for room, count in (({}, 2000), (CROWDED, 2500))),
    ],
)
def test_samples_follow_the_target(letters, exact, room, count):
    outputs, result = sample(letters, room, count, list(PARAMS))
    assert result["counters"]["num_preemptions"] > 5 or not room
    assert result["counters"]["spec_decode_num_accepted_tokens"] > count
    assert len(set(map(len, outputs["free"]))) > 1
    for kind in PARAMS:
        assert chi_square_p_value(outputs[kind], exact[kind]) > SIGNIFICANCE, kind


@pytest.mark.parametrize(
    ("room", "fault", "kind", "count"),
    [
        pytest.param({}, "unscored_grammar_cut", "grammar", 2000, marks=SLOW),
        pytest.param(CROWDED, "unscored_grammar_cut", "grammar", 2500, marks=SLOW),
        pytest.param(CROWDED, "unsubtracted", "free", 2500, marks=SLOW),
    ],
)
def test_a_biased_sampler_is_caught(letters, exact, room, fault, kind, count):
    # A mutant of what is installed later would be mended.
    patch = f"vllm_hsd.host.hooks:install support.biased_sampler:{fault}"
    outputs, _ = sample(letters, room, count, [kind], patch)
    assert chi_square_p_value(outputs[kind], exact[kind]) < SIGNIFICANCE


def reserved(llm, jobs: dict) -> set[tuple[int, int]]:
    """(tokens of a draft, slots after the text that the scheduler wants for it) of all drafts."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    coordinator, found = scheduler.kv_cache_manager.coordinator, set()
    needed = coordinator.get_num_blocks_to_allocate

    def record(request_id: str, num_tokens: int, **rest) -> int:
        request = scheduler.requests[request_id]
        if request.num_output_tokens:
            found.add((len(request.spec_token_ids), num_tokens - request.num_tokens))
        return needed(request_id=request_id, num_tokens=num_tokens, **rest)

    coordinator.get_num_blocks_to_allocate = record
    run_jobs(llm, jobs)
    return found


def test_how_long_a_draft_is_does_not_decide_whether_its_request_is_preempted(letters):
    top = {"model": letters.mid, "stopping": "entropy"}
    levels = cascade({"model": letters.small, "num_tokens": 3}, top, num_speculative_tokens=6)
    params = {"temperature": 1.5, "max_tokens": 40, "ignore_eos": True, "seed": 0}
    job = {"prompts": [PROMPT] * 2, "params": params}
    found = run_engine({"model": letters.target, **levels}, {"job": job}, work=reserved)
    drafted, slots = map(set, zip(*found, strict=True))
    assert len(drafted) > 2 and len(slots) == 1
