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

    options = {"data-parallel-size": 2}
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    # Adaptive ranks switch levels in every step, each by itself.
    config = {**two_models(text_family), "adaptive": adaptive}
    plugin = "support.adversarial_depth:install" if adaptive else None
    with running_server(
        text_family.target, tmp_path, config, options, plugin, environment
    ) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)

        def answer(prompt: list[int]) -> list[int]:
            extra = {"ignore_eos": True, "return_token_ids": True}
            choice = client.completions.create(
                model="tiny", prompt=prompt, max_tokens=40, temperature=0, extra_body=extra
            ).choices[0]
            return choice.token_ids

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            found = list(pool.map(answer, PROMPTS))
        metrics = server.metrics()
    assert found == ids(plain)
    for engine in (0, 1):
        assert metrics[f'vllm_hsd:level_accepted_total{{engine="{engine}",level="1"}}'] > 0
