"""`vllm-hsd verify --url`: servers whose model is a table, and slow: real ones."""

import json
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
from support import stand_in_servers
from support.openai_server import running_server
from support.soak_servers import two_models
from support.stand_in_servers import VOCABULARY, listening, logprobs_after

from vllm_hsd.tools.audit.quantiles import token_ranges
from vllm_hsd.tools.audit.servers import kept_probabilities, token_range


class VllmHandler(stand_in_servers.Handler):
    """vLLM's protocol."""

    max_logprobs = 20
    sends_token_ids = True
    ends = b"data: [DONE]\n\n"

    def do_GET(self):
        models = {"data": [{"id": "markov"}]}
        self.answer({"/v1/models": models, "/version": {"version": "0"}}[self.path])

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            text = body["messages"][0]["content"] if "messages" in body else body["prompt"]
            self.answer({"tokens": [len(text) % VOCABULARY, 3]})
        elif body.get("stream"):
            for new in self.steps(body["prompt"][-1], body["max_tokens"], body, body.get("seed")):
                self.event({"choices": [{"token_ids": new if self.sends_token_ids else None}]})
            self.wfile.write(self.ends)
        elif body["prompt_logprobs"] > self.max_logprobs:
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b"prompt_logprobs is above max_logprobs")
        else:
            self.answer({"choices": [{"prompt_logprobs": likeliest(body)}]})


def likeliest(body: dict) -> list:
    """vLLM's `prompt_logprobs`."""
    rows: list = [None]
    for last, token in zip(body["prompt"], body["prompt"][1:], strict=False):
        every = logprobs_after(last, VOCABULARY)
        kept = dict(every[: body["prompt_logprobs"]]) | {token: dict(every)[token]}
        rows.append({str(each): {"logprob": logprob} for each, logprob in kept.items()})
    return rows


def markov_server(**attributes) -> AbstractContextManager[str]:
    """URL of a server whose every token is the likeliest one, `wrong` of the time more than due."""
    return listening(type("Speaking", (VllmHandler,), attributes))


@pytest.mark.parametrize("top_p", [None, 0.6, 0.95])
def test_ranges_are_those_of_whole_rows(top_p):
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(size=40) * 2)
    logits[logits.argsort()[-18:-15]] = logits.sort().values[-16]  # a tie for the last place
    probs = torch.where(logits >= logits.topk(16).values[-1], logits / 0.7, -torch.inf).softmax(0)
    assert (probs > 0).sum() == 18
    if top_p is not None:
        order = probs.argsort(descending=True)
        above = probs[order].cumsum(0) - probs[order]
        probs[order[above >= top_p]] = 0
    given = dict(enumerate(logits.log_softmax(0).tolist()))
    params = {"temperature": 0.7, "top_k": 16} | ({} if top_p is None else {"top_p": top_p})
    for token in range(40):
        expected = token_ranges(probs.log()[None], torch.tensor([token]))[0].tolist()
        found = token_range(kept_probabilities(given, params), token)
        assert found == pytest.approx(expected, abs=1e-6)


def test_a_server_that_follows_the_target_passes(judged, capsys):
    with markov_server() as url, markov_server() as plain_url:
        options = ("--temperatures", "0,1", "--top-p", "0.9,1", "--tokens", "4096")
        status, found = judged(url, plain_url, *options)
    assert status == 0 and found["lossless"] and found["servers"] == [url, plain_url]
    page = capsys.readouterr().out
    assert "equal to no speculation" in page and "temperature 1, top-k 16, top-p 0.9" in page


def test_a_server_that_does_not_is_found(judged, capsys):
    with markov_server(wrong=0.1) as url, markov_server() as plain_url:
        status, found = judged(url, plain_url, "--temperatures", "1", "--tokens", "4096")
    assert status == 1
    assert not found["lossless"] and "follows the target" in found["verdict"]
    page = capsys.readouterr().out
    assert "NOT LOSSLESS" in page and "FAILS" in page


@pytest.mark.parametrize(
    ("ends", "reason"), [(b"", "no end"), (b'data: {"cho', "Unterminated"), (b"data: [1]\n\n", "")]
)
def test_an_answer_that_breaks_off_is_no_verdict(ends, reason, judged, capsys):
    with markov_server(ends=ends) as url, markov_server() as plain_url:
        assert judged(url, plain_url, "--temperatures", "1", "--tokens", "64") == (2, {})
    said = capsys.readouterr().err
    assert f"--url '{url}' broke off an answer ({reason}" in said and "Traceback" not in said


# vLLM binds every server's worker to the first core.
FREE = {"environment": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_real_servers(text_family, tmp_path_factory, judged, capsys):
    """A server without speculation judges a cascade, then one with a biased sampler.

    vLLM's own methods are no control on a CPU: with top_k its fault there ends the engine.
    """
    target, cascade = text_family.target, two_models(text_family)
    options = ("--temperatures", "0,1", "--top-p", "0.9,1", "--tokens", "4096")
    options += ("--drafter", text_family.mid, "--engine-args", '{"enforce_eager": true}')
    found = []
    with running_server(target, tmp_path_factory.mktemp("plain"), **FREE) as plain:
        for plugin in (None, "support.biased_sampler:install_drafts_of_other_rows"):
            directory = tmp_path_factory.mktemp("cascade")
            with running_server(target, directory, cascade, plugin=plugin, **FREE) as server:
                found.append(judged(server.url, plain.url, *options))
    (status, sound), (biased_status, biased) = found
    assert (status, biased_status) == (0, 1), capsys.readouterr().out
    assert sound["sampled"]["tokens"] == 2 * 4096
    assert sound["greedy"]["passed"] and biased["greedy"]["passed"] and not biased["lossless"]
    assert "mid" in {check["order"] for check in sound["sampled"]["checks"]}


def test_mistakes_are_named(error):
    assert "--plain-url belong together" in error("--url", "http://127.0.0.1:1")
    assert "--drafter names what a server" in error("--drafter", "m")
    both = ("--url", "http://127.0.0.1:1", "--plain-url", "http://127.0.0.1:1")
    assert "--url 'http://127.0.0.1:1' cannot be reached" in error(*both)
    unreadable = ("--url", "http://127.0.0.1:port", "--plain-url", "http://127.0.0.1:1")
    assert "--url 'http://127.0.0.1:port' cannot be reached" in error(*unreadable)
    alone = "--self-test reads --tokens, --output alone: leave out"
    for option in ("--url", "http://a"), ("--dtype", "float32"), ("--temperatures", "1"):
        assert f"{alone} {option[0]}." in error("--self-test", *option)
    assert "leave out --speculative-config" in error(*both, "--speculative-config", "{}")
    assert "is not a URL" in error("--url", "localhost", "--plain-url", "localhost")
    with markov_server(sends_token_ids=False) as url:
        message = error("--url", url, "--plain-url", url, "--temperatures", "1")
        assert "answers with no token ids: is it a server of vLLM?" in message
    with markov_server() as url, markov_server(max_logprobs=5) as plain_url:
        message = error("--url", url, "--plain-url", plain_url, "--temperatures", "1")
        assert "start it with --max-logprobs 20" in message
