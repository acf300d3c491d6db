"""SmolLM2 on a CPU: greedy and seeded text is that of no speculation."""

import pytest
from support.cascades import stock
from support.engines import differing, run_engine

from benchmarks.models import smollm2
from benchmarks.models.quantize import int8_copy
from benchmarks.studies.configs import EAGLE3, NGRAM, SUFFIX, fixed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not smollm2.DIRECTORY.exists(), reason="needs `make smollm2`"),
]
QUESTIONS = (
    "Write a Python function that reverses a string, and a test of it.",
    "Repeat this list three times: apple, pear, plum, grape.",
    "What is the capital of France? Say it in three sentences.",
    "Count from 1 to 40 in words.",
)
ENGINE = {"max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 29, "block_size": 32}
# Prompts in chunks, and fewer blocks than four chats need.
CROWDED = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 12}


def jobs() -> dict[str, dict]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2.smollm2())
    prompts = []
    for question in QUESTIONS * 2:
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer.encode(text, add_special_tokens=False))
    greedy = {"temperature": 0, "max_tokens": 80, "ignore_eos": True}
    sampled = {**greedy, "temperature": 0.8}
    seeded = [{**sampled, "seed": i, "top_p": (1, 0.9)[i % 2]} for i in range(len(prompts))]
    arrive = [0, 0, 1, 5, 9, 30, 31, 60]
    return {
        "greedy": {"prompts": prompts, "params": greedy, "arrive": arrive},
        "seeded": {"prompts": prompts, "params": seeded, "arrive": arrive},
    }


NAMES = ("suffix", "sources", "branches", "suffix below a model", "head next to lookups")
NAMES += ("adaptive", "stock drafter")


def served(arguments: dict) -> dict:
    model = str(smollm2.smollm2())
    env = {} if arguments["enforce_eager"] else {"TORCHDYNAMO_DISABLE": "0"}
    return run_engine({**ENGINE, "model": model, **arguments}, jobs(), env=env, forks=not env)


@pytest.fixture(scope="module")
def plain() -> dict:
    return served({"enforce_eager": True})


@pytest.mark.parametrize("how", ["with room", "crowded", "compiled"])
@pytest.mark.parametrize("name", NAMES)
def test_texts_are_those_of_no_speculation(plain, name, how):
    arguments = {"enforce_eager": how != "compiled", **(CROWDED if how == "crowded" else {})}
    if (name, how) == ("branches", "crowded"):
        # It keeps three blocks for each of four requests.
        arguments["num_gpu_blocks_override"] += 12
    copy = {"model": str(int8_copy(smollm2.smollm2()))}
    config = {
        "suffix": fixed(SUFFIX),
        "sources": fixed({"sources": [NGRAM, SUFFIX]}),
        "branches": fixed({"sources": [NGRAM, SUFFIX], "branches": 3}, length=6),
        "suffix below a model": fixed({**SUFFIX, "num_tokens": 4}, copy),
        "head next to lookups": fixed({"sources": [SUFFIX, EAGLE3]}, length=4),
        "adaptive": fixed({**SUFFIX, "num_tokens": 4}, copy, adaptive=True),
        "stock drafter": stock("draft_model", **copy),
    }[name]
    found = served({**arguments, "speculative_config": config})
    counters = [result["counters"] for result in found.values()]
    assert sum(each["spec_decode_num_accepted_tokens"] for each in counters) > 50
    if how == "crowded":
        assert sum(each["num_preemptions"] for each in counters) > 0
    assert differing(found, plain) == []
