"""`vllm-hsd verify --url` at servers that speak the protocols of SGLang and llama.cpp."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from vllm_hsd.cli import main as cli
from vllm_hsd.lossless.other_servers import LlamaCppServer, SGLangServer, connect
from vllm_hsd.lossless.servers import Server

VOCABULARY = 30
LOGITS = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY)) * 1.5


def logprobs_after(token: int, count: int) -> list[tuple[int, float]]:
    """(token, log-probability) of the likeliest tokens."""
    row = LOGITS[token] - np.log(np.exp(LOGITS[token]).sum())
    return [(int(each), float(row[each])) for each in (-row).argsort()[:count]]


class Handler(BaseHTTPRequestHandler):
    """A model that is a table; every token is the likeliest one `wrong` of the time too often."""

    wrong = 0.0
    owner = ""
    incremental = False

    def log_message(self, *_):
        pass

    def do_GET(self):
        found = {
            "/v1/models": {"data": [{"id": "markov", "owned_by": self.owner}]},
            "/get_server_info": {"version": "0.5"},
            "/props": {"build_info": "b1"},
        }
        self.answer(found[self.path])

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        getattr(self, self.path.strip("/").replace("-", "_"))(body)

    def apply_template(self, body):
        self.answer({"prompt": "<user>" + body["messages"][0]["content"]})

    def tokenize(self, body):
        text = body["content"] if self.owner == "llamacpp" else body["prompt"]
        assert isinstance(text, str)
        self.answer({"tokens": [len(text) % VOCABULARY, 3]})

    def generate(self, body):
        """SGLang's."""
        prompt, sampling = body["input_ids"], body["sampling_params"]
        if body.get("stream"):
            seed = sampling.get("sampling_seed")
            sent: list[int] = []
            for new in self.steps(prompt[-1], sampling["max_new_tokens"], sampling, seed):
                sent += new
                ids = new if self.incremental else sent
                meta = {"completion_tokens": len(sent), "finish_reason": None}
                self.event({"text": "", "output_ids": ids, "meta_info": meta})
            self.wfile.write(b"data: [DONE]\n\n")
            return
        start, wanted = body["logprob_start_len"], body["top_logprobs_num"]
        top: list = [None]
        own: list = [[None, prompt[start], None]]
        for last, token in zip(prompt[start:], prompt[start + 1 :], strict=False):
            every = dict(logprobs_after(last, VOCABULARY))
            top.append([[lp, each, None] for each, lp in logprobs_after(last, wanted)])
            own.append([every[token], token, None])
        meta = {"input_top_logprobs": top, "input_token_logprobs": own}
        self.answer({"text": "", "output_ids": [0], "meta_info": meta})

    def completion(self, body):
        """llama.cpp's."""
        assert body["temperature"] == 0 or body["min_p"] == 0
        prompt = body["prompt"]
        if body.get("stream"):
            seed = None if body["seed"] < 0 else body["seed"]
            for new in self.steps(prompt[-1], body["n_predict"], body, seed):
                self.event({"content": "", "tokens": new, "stop": False})
            self.event({"content": "", "tokens": [], "stop": True})
            return
        row = [{"id": i, "logprob": lp} for i, lp in logprobs_after(prompt[-1], body["n_probs"])]
        self.answer({"completion_probabilities": [{"id": row[0]["id"], "top_logprobs": row}]})

    def steps(self, last: int, left: int, params: dict, seed: int | None) -> Iterator[list[int]]:
        rng, first = np.random.default_rng(seed), True
        self.send_response(200)
        self.end_headers()
        while left:
            new = []
            for _ in range(1 if first else int(rng.integers(1, 1 + min(left, 4)))):
                last = self.draw(last, params, rng)
                new.append(last)
            left, first = left - len(new), False
            yield new

    def draw(self, last: int, params: dict, rng: np.random.Generator) -> int:
        if params["temperature"] == 0 or rng.random() < self.wrong:
            return int(LOGITS[last].argmax())
        order = (-LOGITS[last]).argsort()[: params["top_k"]]
        probs = np.exp(LOGITS[last][order] / params["temperature"])
        return int(rng.choice(order, p=probs / probs.sum()))

    def event(self, document):
        self.wfile.write(f"data: {json.dumps(document)}\n\n".encode())

    def answer(self, document):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())


@contextlib.contextmanager
def stand_in(owner: str, wrong: float = 0.0, incremental: bool = False) -> Iterator[str]:
    """URL of a server."""
    attributes = {"owner": owner, "wrong": wrong, "incremental": incremental}

    class Listening(ThreadingHTTPServer):
        request_queue_size = 128

    server = Listening(("127.0.0.1", 0), type("Speaking", (Handler,), attributes))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


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
def test_verify_at_other_servers(tmp_path, capsys, owner, wrong):
    with stand_in(owner, wrong) as url, stand_in(owner) as plain:
        arguments = ["verify", "--url", url, "--plain-url", plain, "--dtype", "float32"]
        arguments += ["--temperatures", "0,1", "--tokens", "2048", "--workload", "steady"]
        status = cli.main([*arguments, "--output", str(tmp_path)])
    found = json.loads((tmp_path / "verify.json").read_text())
    assert status == (1 if wrong else 0), found["verdict"]
    assert found["greedy"]["passed"] and found["sampled"]["tokens"] == 2048
    capsys.readouterr()


def test_what_sglang_cannot_show_is_said(tmp_path, capsys):
    with stand_in("sglang") as url:
        arguments = ["verify", "--url", url, "--plain-url", url, "--top-p", "0.9"]
        status = cli.main([*arguments, "--temperatures", "1", "--output", str(tmp_path)])
    assert status == 2 and "leave out --top-p below 1" in capsys.readouterr().err
