"""Adaptive drafting that begins with a profile: what is taken from the file, and right choices.

Serving is simulated: time is counted, not measured. Fixed seeds.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.plain_profile import save_profile
from support.simulated_serving import SimulatedServing, flat, model, steep

from vllm_hsd import host
from vllm_hsd.config import CascadeConfig
from vllm_hsd.core.controller import DepthController, Selection
from vllm_hsd.core.levels import LevelOptions
from vllm_hsd.core.step_times import StepTimes
from vllm_hsd.errors import UserError
from vllm_hsd.planner import seeds

NGRAM, MODEL = {"ngram": {"max": 3}}, {"model": "models/small"}
SLOTS, LENGTH = 16, 8


def lookup(tokens):
    return 0.0002


def write(path: Path, target=flat, drafter=model, **rates) -> dict:
    """A profile at `path`; the keys of a cascade that begins with it."""
    seconds = (lookup, drafter, target)
    ms = [lambda tokens, each=each: 1e3 * each(tokens) for each in seconds]
    save_profile(path, "models/target", [NGRAM, MODEL], ms, **rates)
    return keys({**NGRAM, "num_tokens": LENGTH}, MODEL, adaptive={"profile": str(path)})


def keys(*levels: dict, **other) -> dict:
    return {"num_speculative_tokens": LENGTH, "levels": list(levels), **other}


def seeded(raw: dict) -> SimpleNamespace:
    """What `seed` reads and fills of a cascade of a lookup and a model."""
    controller = DepthController([LENGTH, LENGTH], [True, False], SLOTS, 2048)
    cascade = SimpleNamespace(
        target_times=controller.target_times,
        level_times=controller.level_times,
        controller=controller,
        options=[LevelOptions(LENGTH), LevelOptions(LENGTH)],
    )
    cascade.learning = cascade
    seeds.seed(CascadeConfig.parse(raw), [0, 1], cascade)
    return cascade


def test_times_and_acceptance_are_the_profiles(tmp_path):
    controller = seeded(write(tmp_path / "p.json", rate=0.7, found=0.4)).controller
    tokens = np.array([1, 4, 8, 20])
    assert np.allclose(controller.target_times.seconds(tokens), flat(tokens), rtol=0.02)
    assert np.allclose(controller.level_times[1].seconds(tokens), model(tokens), rtol=0.05)
    assert float(controller.level_times[0].seconds(4)) == pytest.approx(lookup(4), rel=0.02)
    for low, high, found in ((0, 1, 0.4), (0, 2, 0.4), (1, 2, 1.0)):
        pair = controller.pair(low, high)
        assert controller.acceptance.hazard(pair)[:4] == pytest.approx(0.3, abs=0.03)
        assert controller.acceptance.fill(pair) == pytest.approx(found)
    assert controller.seeded


def test_what_was_not_measured_is_learned_as_without_a_profile(tmp_path):
    raw = write(tmp_path / "p.json")
    raw["levels"][0] = {"first_of": [NGRAM, MODEL], "num_tokens": LENGTH}
    controller = seeded(raw).controller
    assert controller.level_times[0].empty and not controller.level_times[1].empty
    assert not controller.seeded


def test_a_lookup_alone_begins_with_the_targets_times(tmp_path):
    raw = write(tmp_path / "p.json")
    raw["levels"] = [NGRAM]
    cascade = SimpleNamespace(
        target_times=StepTimes(),
        level_times=[StepTimes()],
        controller=None,
        options=[LevelOptions(LENGTH)],
    )
    cascade.learning = cascade
    seeds.seed(CascadeConfig.parse(raw), [0], cascade)
    assert cascade.target_times.age(1) == 0 and not cascade.level_times[0].empty


FIXED = [
    Selection(),
    *(Selection((0,), (k,)) for k in (2, 4, 8)),
    *(Selection((1,), (k,)) for k in (1, 2, 4, 8)),
    *(Selection((0, 1), (2, k)) for k in (2, 4, 8)),
]
CASES = [(t, b, r) for t in (flat, steep) for b in (1, 16) for r in (0.1, 0.85)]


def of_the_best(target, batch, rate, controllers, steps) -> list[float]:
    """Tokens per second of successive steps, over those of the best fixed choice."""
    slots, acceptance = np.arange(batch), np.full(SLOTS, rate)
    fixed = SimulatedServing(target, model, acceptance)
    best = max(fixed.tokens_per_second(choice, slots, 1000 // batch + 40) for choice in FIXED)
    speeds = []
    for number, controller in enumerate(controllers):
        serving = SimulatedServing(target, model, acceptance, seed=number)
        speeds.append(
            [serving.adaptive_tokens_per_second(controller, slots, n) / best for n in steps]
        )
    return np.mean(speeds, axis=0).tolist()


@pytest.mark.parametrize(("target", "batch", "rate"), CASES)
def test_a_true_profile_gives_the_right_choices_from_the_first_step_on(
    target, batch, rate, tmp_path
):
    raw = write(tmp_path / "p.json", target, rate=rate)
    controllers = [seeded(raw).controller for _ in range(4)]
    for controller in controllers:
        # The simulation's lookup, whatever the model's rate.
        for verifier in (1, 2):
            controller.acceptance.seed(controller.pair(0, verifier), 0.3 ** np.arange(9), 0.5)
    first, _, later = of_the_best(target, batch, rate, controllers, (32, 16, 200))
    assert first > 0.85 and later > 0.9


@pytest.mark.parametrize("wrong", ["acceptance", "times"])
@pytest.mark.parametrize(("target", "batch", "rate"), CASES)
def test_a_wrong_profile_is_overcome_within_fifty_steps(target, batch, rate, wrong, tmp_path):
    false = {"rate": 0.95 - rate} if wrong == "acceptance" else {"rate": rate}
    other, factor = (steep if target is flat else flat), (0.2 if rate < 0.5 else 5)
    if wrong == "times":
        raw = write(tmp_path / "p.json", other, lambda n: factor * model(n), **false)
    else:
        raw = write(tmp_path / "p.json", target, **false)
    controllers = [seeded(raw).controller for _ in range(4)]
    first, _, later = of_the_best(target, batch, rate, controllers, (32, 18, 100))
    assert later > 0.85
    if (target, batch, rate) == (flat, 1, 0.85):
        assert first < 0.7, "the profile was not wrong enough to tell"


@pytest.fixture
def raw(tmp_path):
    return write(tmp_path / "p.json")


def check(raw, target="models/target") -> list[str]:
    return seeds.check_seeds(CascadeConfig.parse(raw), target)


def test_a_profile_of_this_machine_and_target_is_taken_without_a_word(raw):
    assert check(raw) == []


def test_what_differs_is_said(raw, monkeypatch, tmp_path):
    path = tmp_path / "p.json"
    path.write_text(path.read_text().replace('"versions":{', '"versions":{"vllm":"0.1"'))
    monkeypatch.setattr(host, "versions", lambda: {"vllm": "0.2"})
    other, versions = check(raw, "models/other")
    assert "measured for models/target and this is models/other" in other
    assert versions.startswith("adaptive.profile '") and "0.1" in versions


def test_a_path_and_a_link_to_it_are_one_model(raw, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "small").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "models" / "small")
    raw["levels"][1] = {"model": str(tmp_path / "link")}
    assert check(raw) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.unlink(), "adaptive.profile: no file"),
        (lambda p: p.write_text("{"), "adaptive.profile: .* is not JSON"),
        (lambda p: p.write_text("{}"), 'adaptive.profile .* lacks "schema": 3'),
        (lambda p: p.write_text(p.read_text().replace('"ms":[[', '"ms":[[-1,')), "ms and spread"),
        (lambda p: p.with_suffix(".npz").write_bytes(b""), "belongs to another profile"),
        (lambda p: p.write_text(p.read_text().replace("models/small", "x")), r"levels\[1\].model"),
    ],
)
def test_files_that_cannot_seed_are_refused_in_one_sentence(raw, tmp_path, change, message):
    change(tmp_path / "p.json")
    with pytest.raises(UserError, match=message) as caught:
        check(raw)
    assert str(caught.value).startswith("adaptive.profile") and "p.json" in str(caught.value)


def test_a_profile_without_latencies_is_refused(raw, tmp_path):
    path = tmp_path / "p.json"
    text = path.read_text()
    path.write_text(text[: text.index(',"latencies"')] + "}")
    with pytest.raises(UserError, match=r"adaptive.profile .* holds no latencies: .*--skip-timing"):
        check(raw)
