"""SmolLM2 on a CPU: greedy and seeded text is that of no speculation.

Chats in chunks of prompts, found in the prefix cache, and preempted; eager and compiled.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from support.cascades import stock
from support.engines import differing, run_engine
from support.openai_server import running_server

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
ENGINE = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": True,
    "kv_cache_memory_bytes": 1 << 29,
    "block_size": 32,
}
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
    seeded = [
        {**greedy, "temperature": 0.8, "seed": i, **({"top_p": 0.9} if i % 2 else {})}
        for i in range(len(prompts))
    ]
    arrive = [0, 0, 1, 5, 9, 30, 31, 60]
    return {
        "greedy": {"prompts": prompts, "params": greedy, "arrive": arrive},
        "seeded": {"prompts": prompts, "params": seeded, "arrive": arrive},
    }


NAMES = (
    *("suffix", "sources", "branches", "suffix below a model", "head next to lookups", "adaptive"),
    "stock drafter",
)


def configurations() -> dict[str, dict]:
    copy = {"model": str(int8_copy(smollm2.smollm2()))}
    return {
        "suffix": fixed(SUFFIX),
        "sources": fixed({"sources": [NGRAM, SUFFIX]}),
        "branches": fixed({"sources": [NGRAM, SUFFIX], "branches": 3}, length=6),
        "suffix below a model": fixed({**SUFFIX, "num_tokens": 4}, copy),
        "head next to lookups": fixed({"sources": [SUFFIX, EAGLE3]}, length=4),
        "adaptive": fixed({**SUFFIX, "num_tokens": 4}, copy, adaptive=True),
        "stock drafter": stock("draft_model", **copy),
    }


EAGER, COMPILED = {"enforce_eager": True}, {"enforce_eager": False}


def served(arguments: dict) -> dict:
    model = str(smollm2.smollm2())
    env = {} if arguments["enforce_eager"] else {"TORCHDYNAMO_DISABLE": "0"}
    return run_engine({**ENGINE, "model": model, **arguments}, jobs(), env=env, forks=not env)


@pytest.fixture(scope="module")
def plain() -> dict:
    return served(EAGER)


@pytest.mark.parametrize("how", ["with room", "crowded", "compiled"])
@pytest.mark.parametrize("name", NAMES)
def test_texts_are_those_of_no_speculation(plain, name, how):
    arguments = {"with room": EAGER, "crowded": {**EAGER, **CROWDED}, "compiled": COMPILED}[how]
    if (name, how) == ("branches", "crowded"):
        # It keeps three blocks for each of four requests.
        arguments["num_gpu_blocks_override"] += 12
    found = served({**arguments, "speculative_config": configurations()[name]})
    counters = [result["counters"] for result in found.values()]
    assert sum(each["spec_decode_num_accepted_tokens"] for each in counters) > 50
    if how == "crowded":
        assert sum(each["num_preemptions"] for each in counters) > 0
    assert differing(found, plain) == []


def answers_of_server(directory: Path, config: dict | None) -> list[str]:
    """Greedy and seeded answers of a server in processes of its own, all asked for at once."""
    directory.mkdir()
    arguments = {key: ENGINE[key] for key in ("max_model_len", "max_num_seqs", "block_size")}
    options = {name.replace("_", "-"): value for name, value in arguments.items()}
    options["kv-cache-memory-bytes"] = ENGINE["kv_cache_memory_bytes"]
    drafts_by = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    model = str(smollm2.smollm2())
    with running_server(model, directory, config, options, environment=drafts_by) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600)

        def ask(i: int) -> str:
            message = {"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}
            asked = {"messages": [message], "max_tokens": 64, "model": "tiny"}
            sampling = {"temperature": 0.8, "seed": i} if i % 2 else {"temperature": 0}
            return client.chat.completions.create(**asked, **sampling).choices[0].message.content

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(ask, range(8)))
        assert config is None or server.total("vllm:spec_decode_num_accepted_tokens_total") > 20
    return found


def test_servers_answer_as_without_speculation(tmp_path):
    plain = answers_of_server(tmp_path / "plain", None)
    for name in ("suffix", "branches", "suffix below a model", "stock drafter"):
        found = answers_of_server(tmp_path / name.replace(" ", "_"), configurations()[name])
        assert found == plain, name
