"""Odd bodies over HTTP: the server with a cascade answers what a plain server answers."""

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.engines import alike
from support.odd_requests import LETTERS, VOCABULARY
from support.openai_server import OpenAIServer, running_server

pytestmark = pytest.mark.slow
BASE: dict[str, Any] = {"model": "tiny", "prompt": "def f(", "max_tokens": 8, "temperature": 0}
BASE["return_token_ids"] = True
# Values for every field of a request, whatever its type.
JUNK: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 10**9, -(10**9), 2**31, 2**63 - 1, 2**63, 10**30),
    *(0.0, 0.5, -0.5, 1e-45, 1e-9, 1e39, 1e308, -0.0),
    *("", "a", "0", "-1", "1e3", "a" * 10_000, "\0"),
    *([], [0], [-1], [10**9], ["a"], [None], [[]], [{}], LETTERS, list(range(VOCABULARY))),
    *({}, {"a": 1}, {"5": 1.0}, {"5": None}, {"regex": "a+"}, {"type": "json_object"}),
]
FIELDS = [
    *("temperature", "top_p", "top_k", "min_p", "seed", "n", "max_tokens", "min_tokens", "stop"),
    *("stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs", "logprob_token_ids", "echo"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words"),
    *("allowed_token_ids", "structured_outputs", "response_format", "truncate_prompt_tokens"),
    *("include_stop_str_in_output", "skip_special_tokens", "priority", "repetition_detection"),
    *("use_beam_search", "length_penalty", "thinking_token_budget", "stream_interval", "prompt"),
    *("stream_options", "vllm_xargs", "kv_transfer_params", "cache_salt", "watermarking", "suffix"),
    *("add_special_tokens", "return_token_offsets", "truncation_side", "session_id"),
]


# After every so many bodies a greedy request shows that no other request is affected.
CANARY_EVERY = 10
CANARY = {**BASE, "max_tokens": 30, "ignore_eos": True}


@pytest.fixture(scope="module")
def servers(text_family, tmp_path_factory):
    """(without speculation, with a cascade)."""
    levels = [{"ngram": {"max": 3}, "num_tokens": 3}, {"model": text_family.small}]
    cascade = {"method": "hsd", "num_speculative_tokens": 5, "levels": levels}
    scratch, other = (tmp_path_factory.mktemp(name) for name in ("plain", "cascade"))
    with (
        running_server(text_family.target, scratch) as plain,
        running_server(text_family.target, other, cascade) as speculating,
    ):
        yield plain, speculating


def ask(server: OpenAIServer, body: dict) -> tuple[int, object]:
    """Status, and the choices where it is 200."""
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=600)
    whole = answer.is_success and "event-stream" not in answer.headers["content-type"]
    return answer.status_code, answer.json()["choices"] if whole else None


def differences(servers, bodies: dict[str, dict], certain: bool) -> dict:
    """Name -> answers of both servers, where they differ in status or in what is not random."""
    found, canaries = {}, set()
    with ThreadPoolExecutor(2) as pool:
        for number, (name, body) in enumerate(bodies.items()):
            plain, cascade = pool.map(lambda server, body=body: ask(server, body), servers)
            if plain[0] != cascade[0] or (certain and not alike(plain[1], cascade[1], 1e-3)):
                found[name] = (plain, cascade)
            if number % CANARY_EVERY == 0:
                canaries.update(str(ask(server, CANARY)[1][0]["token_ids"]) for server in servers)
    assert len(canaries) == 1, canaries
    return found


def test_junk_in_every_field(servers):
    """Three hundred times in one to four of them."""
    greedy, sampled, draw = {}, {}, random.Random(0)
    for i in range(300):
        fields = draw.sample(FIELDS, draw.choice((1, 2, 2, 3, 4)))
        change = {field: draw.choice(JUNK) for field in fields}
        body = {**BASE, **change}
        kind = greedy if str(body["temperature"]) == "0" else sampled
        kind[f"{i}: {change}"[:200]] = body
    assert differences(servers, greedy, certain=True) == {}
    assert differences(servers, sampled, certain=False) == {}
