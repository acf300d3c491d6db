"""`vllm-hsd verify --url` at servers that speak the protocols of SGLang and llama.cpp."""

import pytest
from support.stand_in_servers import stand_in

from vllm_hsd.tools.audit.other_servers import LlamaCppServer, SGLangServer, connect
from vllm_hsd.tools.audit.servers import Server

CLASSES = {"sglang": SGLangServer, "llamacpp": LlamaCppServer, "vllm": Server}


@pytest.mark.parametrize("owner", CLASSES)
def test_a_server_is_known_by_what_it_says(owner):
    with stand_in(owner) as url:
        assert type(connect("--url", url)) is CLASSES[owner]


@pytest.mark.parametrize("incremental", [False, True])
def test_tokens_of_both_ways_of_streaming(incremental):
    with stand_in("sglang", incremental=incremental) as url:
        params = {"temperature": 1.0, "top_k": 16, "max_tokens": 24, "seed": 5}
        found = connect("--url", url).generate([[4, 3]], params)
    assert len(found.token_ids[0]) == 24 == sum(found.step_lengths[0])


@pytest.mark.parametrize("owner", ["sglang", "llamacpp"])
@pytest.mark.parametrize("wrong", [0.0, 0.15])
def test_verify_at_other_servers(judged, owner, wrong):
    with stand_in(owner, wrong) as url, stand_in(owner) as plain:
        status, found = judged(url, plain, "--temperatures", "0,1", "--tokens", "2048")
    assert status == (1 if wrong else 0), found["verdict"]
    assert found["greedy"]["passed"] and found["sampled"]["tokens"] == 2048


def test_what_sglang_cannot_show_is_said(error):
    with stand_in("sglang") as url:
        said = error("--url", url, "--plain-url", url, "--top-p", "0.9", "--temperatures", "1")
    assert "leave out --top-p below 1" in said
