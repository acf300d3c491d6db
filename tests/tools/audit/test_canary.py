"""`vllm-hsd verify --watch`, and the test that it makes after every answer."""

import json

import numpy as np
import pytest
import torch
from support.command_line import refused
from support.stand_in_servers import stand_in

from vllm_hsd.tools.audit.canary import Canary
from vllm_hsd.tools.audit.quantiles import token_ranges
from vllm_hsd.tools.cli import main as cli

VOCABULARY, ANSWER = 20, 32


def watched(seed: int, answers: int, wrong: float = 0.0) -> Canary:
    """A canary after so many answers, whose tokens are the likeliest ones `wrong` of the time."""
    rng, canary = np.random.default_rng(seed), Canary("float32")
    for _ in range(answers):
        probs = rng.dirichlet(np.full(VOCABULARY, 0.5), ANSWER)
        tokens = np.array([rng.choice(VOCABULARY, p=p) for p in probs])
        replaced = rng.random(ANSWER) < wrong
        tokens[replaced] = probs[replaced].argmax(1)
        ranges = token_ranges(torch.from_numpy(probs).log(), torch.from_numpy(tokens))
        canary.observe(ranges.numpy(), [1, *[3] * 10, 1], rng)
    return canary


def test_a_sound_server_is_hardly_ever_accused_at_any_time():
    # p below .05 once in 20 runs at most, whenever one looks: `highest` remembers.
    lowest = [watched(seed, 12).p_value for seed in range(30)]
    assert np.mean(np.array(lowest) < 0.05) <= 0.1 and min(lowest) > 1e-4


def test_a_faulty_server_is_found_and_its_state_does_not_grow():
    before, after = watched(0, 2, wrong=0.1), watched(0, 120, wrong=0.1)
    assert after.p_value < 1e-4 and before.p_value > 1e-4
    assert np.size(before.counts) == np.size(after.counts) == 60
    assert Canary(**json.loads(json.dumps(after.document()))) == after


def test_a_token_that_cannot_be_is_found_at_once():
    canary, rng = Canary("float32"), np.random.default_rng(0)
    own = np.array([[1e-12, 0.5, 1 - 1e-12, 1e-12]])
    canary.observe(own, [1], rng)
    assert canary.p_value < 1e-3


@pytest.mark.parametrize("wrong", [0.0, 0.2])
def test_watch(tmp_path, capsys, wrong):
    with stand_in("sglang", wrong) as url, stand_in("sglang") as plain:
        arguments = ["verify", "--watch", url, "--plain-url", plain, "--dtype", "float32"]
        arguments += ["--temperatures", "1", "--tokens", "2048", "--output", str(tmp_path)]
        statuses = [cli.main(arguments) for _ in range(2)]
        said = capsys.readouterr().out
        with stand_in("sglang") as other:
            arguments[2] = other
            assert f"is of the url '{url}', not '{other}'" in refused(capsys, *arguments)
    state = json.loads((tmp_path / "watch.json").read_text())
    assert statuses == [1 if wrong else 0] * 2, said
    if wrong:
        # It ends as soon as it knows, and stays so.
        assert state["tokens"] <= 2048 and "NOT LOSSLESS" in said
    else:
        assert state["tokens"] == 4096


def test_mistakes_are_named(tmp_path, error):
    assert "--watch needs --plain-url" in error("--watch", "http://a")
    both = ("--watch", "http://a", "--plain-url", "http://b")
    engine = "--engine-args", '{"seed": 1}'
    for option in ("--model", "m"), engine, ("--as-served",), ("--self-test",):
        assert f"--output alone: leave out {option[0]}." in error(*both, *option)
    assert "--temperatures above 0" in error(*both, "--temperatures", "0")
    assert "--tokens must be at least 64" in error(*both, "--tokens", "0")
    with stand_in("sglang") as url:
        (tmp_path / "watch.json").write_text("{}")
        assert "remove it" in error("--watch", url, "--plain-url", url)
        (tmp_path / "a.jsonl").write_text('{"prompt": "a", "extra_args": {"b": 1}}')
        prompts = "--prompts", str(tmp_path / "a.jsonl")
        for served in (
            ("--watch", url, "--plain-url", url),
            ("--model", "m", "--speculative-config", "{}"),
        ):
            assert "only `vllm-hsd bench` reads 'extra_args'" in error(*served, *prompts)
