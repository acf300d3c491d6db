"""An error that concerns one request ends that request, where vLLM's interface allows it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from support import server_faults
from support.openai_server import OpenAIServer, running_server
from support.soak_servers import two_models

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NEIGHBOURS = 6
ALL_OTHERS = {"temperature": 0, "max_tokens": 160, "extra_body": {"ignore_eos": True}}
FORCED = {"structured_outputs": {"regex": "(ab){40}"}}
# name -> (the request's parameters, status or finish_reason)
ENDS_ALONE = {
    "refused by vLLM": ({"extra_body": {"allowed_token_ids": [10**6]}}, 400),
    "refused by vLLM's limit": ({"logprobs": 10**6}, 400),
    "raised in validation": ({"seed": server_faults.VALIDATED}, 500),
    "raised where the engine adds it": ({"seed": server_faults.ADDED}, 500),
    "refused by its grammar": ({"seed": server_faults.GRAMMAR, "extra_body": FORCED}, 500),
}


def client(server: OpenAIServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600, max_retries=0)


def stream(client: openai.OpenAI, number: int) -> Iterator[str]:
    """Parts of the text of a request of a neighbour."""
    prompt = "a cab " * number + "a bed"
    for part in client.completions.create(model="tiny", prompt=prompt, stream=True, **ALL_OTHERS):
        yield part.choices[0].text


def begun(server: OpenAIServer) -> tuple[list[str], list[Iterator[str]]]:
    """The first part of each neighbour's text, and the streams of what follows."""
    streams = [stream(client(server), i) for i in range(NEIGHBOURS)]
    return [next(parts) for parts in streams], streams


@pytest.fixture(scope="module")
def server(text_family, tmp_path_factory):
    config, plugin = two_models(text_family), "support.server_faults:install"
    directory = tmp_path_factory.mktemp("server")
    with running_server(text_family.target, directory, config, plugin=plugin) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server) -> list[str]:
    return ["".join(stream(client(server), i)) for i in range(NEIGHBOURS)]


@pytest.mark.parametrize("name", ENDS_ALONE)
@pytest.mark.parametrize("streamed", [False, True])
def test_an_error_of_one_request_ends_that_request_only(server, undisturbed, name, streamed):
    params, status = ENDS_ALONE[name]
    asking = client(server)
    texts, streams = begun(server)
    with ThreadPoolExecutor(NEIGHBOURS) as pool:
        rest = [pool.submit("".join, parts) for parts in streams]
        with pytest.raises(openai.APIError) as raised:
            answer = asking.completions.create(
                model="tiny", prompt="abc", max_tokens=120, stream=streamed, **params
            )
            for _ in answer if streamed else ():
                pass
        found = [text + others.result() for text, others in zip(texts, rest, strict=True)]
    code = getattr(raised.value, "status_code", None) or raised.value.code
    assert int(code) == status, raised.value
    assert found == undisturbed
    assert "".join(stream(asking, 0)) == undisturbed[0]


@pytest.mark.parametrize("place", ["drafting", "verification"])
def test_an_error_in_the_worker_ends_every_stream_and_the_server(text_family, tmp_path, place):
    """A step's output has no field for a failed request: no client may wait forever."""
    config, plugin = two_models(text_family), f"support.server_faults:{place}"
    seed = {"drafting": server_faults.DRAFTED, "verification": server_faults.VERIFIED}[place]
    with running_server(text_family.target, tmp_path, config, plugin=plugin) as server:
        _, streams = begun(server)
        with ThreadPoolExecutor(NEIGHBOURS + 1) as pool:
            ends = [pool.submit("".join, parts) for parts in streams]
            asked = {"model": "tiny", "prompt": "abc", "max_tokens": 160, "seed": seed}
            ends.append(pool.submit(client(server).completions.create, **asked))
            errors = [end.exception() for end in ends]
        assert all(isinstance(error, openai.APIError) for error in errors), errors
        server.process.wait(timeout=600)
        log = server.log.read_text()
    assert "OwnFault: the test's own fault" in log


def test_a_server_that_is_stopped_answers_what_is_under_way(text_family, tmp_path):
    config, options = two_models(text_family), {"shutdown-timeout": 300}
    with running_server(text_family.target, tmp_path, config, options) as server:
        wanted = ["".join(stream(client(server), i)) for i in range(NEIGHBOURS)]
        texts, streams = begun(server)
        server.process.terminate()
        with ThreadPoolExecutor(NEIGHBOURS) as pool:
            rest = pool.map("".join, streams)
            assert [text + more for text, more in zip(texts, rest, strict=True)] == wanted
        assert server.process.wait(timeout=600) == 0
