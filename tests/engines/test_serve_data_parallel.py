"""Two data-parallel engines behind one server: dense ranks do not know of each other."""

import os
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from support.engines import ids, run_engine
from support.openai_server import running_server
from support.soak_servers import two_models

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PROMPTS = [[(7 * i + j * j) % 200 + 5 for j in range(5 + 3 * i)] for i in range(12)]


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs a core for each rank")
@pytest.mark.parametrize("adaptive", [False, True])
def test_both_engines_serve_text_of_no_speculation(text_family, tmp_path, adaptive):
    params = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    jobs = {"text": {"prompts": PROMPTS, "params": params}}
    plain = run_engine({"model": text_family.target}, jobs)["text"]
    asked = {"model": "tiny", "max_tokens": 40, "temperature": 0}
    asked["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
    options, ranks = {"data-parallel-size": 2}, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    # Adaptive ranks switch levels in every step, each by itself.
    config = {**two_models(text_family), "adaptive": adaptive}
    plugin = "support.adversarial_depth:install" if adaptive else None
    with running_server(text_family.target, tmp_path, config, options, plugin, ranks) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)

        def answer(prompt: list[int]) -> list[int]:
            return client.completions.create(prompt=prompt, **asked).choices[0].token_ids

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            found = list(pool.map(answer, PROMPTS))
        metrics = server.metrics()
    assert found == ids(plain)
    for engine in (0, 1):
        assert metrics[f'vllm_hsd:level_accepted_total{{engine="{engine}",level="1"}}'] > 0
