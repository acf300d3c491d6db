"""`vllm-hsd verify --url`: servers whose model is a table, and slow: real ones."""

import itertools
from http.server import BaseHTTPRequestHandler

import numpy as np
import pytest
import torch
from support.marks import slow_but
from support.openai_server import running_server
from support.soak_servers import two_models
from support.stand_in_servers import LOGITS, Handler, listening, stand_in

from vllm_hsd.tools.audit.other_servers import connect
from vllm_hsd.tools.audit.quantiles import token_ranges
from vllm_hsd.tools.audit.servers import kept_probabilities, token_range


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


SERVERS = list(itertools.product(("vllm", "sglang", "llamacpp"), (0.0, 0.1)))


@pytest.mark.parametrize(("owner", "wrong"), slow_but(SERVERS[:-1], SERVERS))
def test_a_server_passes_if_it_follows_the_target(judged, capsys, owner, wrong):
    top_p = () if owner == "sglang" else ("--top-p", "0.9,1")
    options = ("--temperatures", "0,1", *top_p, "--tokens", "4096")
    with stand_in(owner, wrong) as url, stand_in(owner) as plain:
        status, found = judged("--url", url, "--plain-url", plain, *options)
    page = capsys.readouterr().out
    assert found["greedy"]["passed"] and found["servers"] == [url, plain]
    assert found["sampled"]["tokens"] == 4096 * (2 if top_p else 1)
    assert ("temperature 1, top-k 16, top-p 0.9" in page) is bool(top_p)
    if wrong:
        assert status == 1 and "follows the target" in found["verdict"]
        assert "NOT LOSSLESS" in page and "FAILS" in page and not found["lossless"]
    else:
        assert status == 0 and found["lossless"] and "equal to no speculation" in page


def test_greedy_answers_that_are_not_the_targets_are_found(judged, capsys):
    def draw(handler, last, params, rng):
        """The second likeliest token after every prompt, which end alike."""
        return int((-LOGITS[last]).argsort()[int(last == 3)])

    with stand_in("vllm", draw=draw) as url, stand_in("vllm") as plain:
        status, found = judged("--url", url, "--plain-url", plain, "--temperatures", "0")
    best, second = sorted(LOGITS[3])[:-3:-1]
    parting = found["greedy"]["partings"][0]
    assert (status, parting["place"], parting["explained"]) == (1, 0, False)
    assert parting["gap"] == pytest.approx(best - second)
    page = " ".join(capsys.readouterr().out.split())
    assert "of them first where nothing ties (largest gap" in page
    assert found["verdict"] == "NOT LOSSLESS. greedy text differs from no speculation."


def test_tokens_that_are_streamed_without_those_before_them():
    with stand_in("sglang", incremental=True) as url:
        params = {"temperature": 1.0, "top_k": 16, "max_tokens": 24, "seed": 5}
        found = connect("--url", url).generate([[4, 3]], params)
    assert len(found.token_ids[0]) == 24 == sum(found.step_lengths[0])


@pytest.mark.parametrize(
    ("ends", "reason"), [(b"", "no end"), (b'data: {"cho', "Unterminated"), (b"data: [1]\n\n", "")]
)
def test_an_answer_that_breaks_off_is_no_verdict(ends, reason, judged, capsys):
    with stand_in("vllm", ends=ends) as url, stand_in("vllm") as plain_url:
        asked = "--url", url, "--plain-url", plain_url, "--temperatures", "1", "--tokens", "64"
        assert judged(*asked) == (2, {})
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
                found.append(judged("--url", server.url, "--plain-url", plain.url, *options))
    (status, sound), (biased_status, biased) = found
    assert (status, biased_status) == (0, 1), capsys.readouterr().out
    assert sound["sampled"]["tokens"] == 2 * 4096
    assert sound["greedy"]["passed"] and biased["greedy"]["passed"] and not biased["lossless"]
    assert "mid" in {check["order"] for check in sound["sampled"]["checks"]}


def test_the_key_of_a_server_is_given(monkeypatch):
    asked = []

    def do_GET(handler):
        asked.append(handler.headers["Authorization"])
        Handler.do_GET(handler)

    with stand_in("sglang", do_GET=do_GET) as url:
        connect("--url", url)
        monkeypatch.setenv("VLLM_API_KEY", "key")
        connect("--url", url)
    assert set(asked[: len(asked) // 2]) == {None} and set(asked[-2:]) == {"Bearer key"}


@pytest.mark.parametrize(
    ("status", "body", "length", "message"),
    [
        (502, b"bad gateway", 4096, "refuses /v1/models: HTTP Error 502"),
        (200, b'{"data": ["m"]}', 15, "answers with models without names"),
    ],
)
def test_odd_answers_are_named(error, status, body, length, message):
    class Odd(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)

    with listening(Odd) as url:
        assert message in error("--url", url, "--plain-url", url)


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
    with stand_in("vllm", sends_token_ids=False) as url:
        message = error("--url", url, "--plain-url", url, "--temperatures", "1")
        assert "answers with no token ids: is it a server of vLLM?" in message
    with stand_in("vllm") as url, stand_in("vllm", max_logprobs=5) as plain_url:
        message = error("--url", url, "--plain-url", plain_url, "--temperatures", "1")
        assert "start it with --max-logprobs 20" in message
    with stand_in("sglang") as url:
        message = error("--url", url, "--plain-url", url, "--top-p", "0.9", "--temperatures", "1")
        assert "leave out --top-p below 1" in message
