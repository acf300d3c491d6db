"""`vllm-hsd verify` on the tiny models: sound configurations pass, broken samplers are found."""

from unittest import mock

import numpy as np
import pytest
from support.cascades import cascade
from support.engines import forked, started
from support.marks import slow

from vllm_hsd.errors import UserError
from vllm_hsd.tools.audit import sampled, self_test
from vllm_hsd.tools.audit.drafters import OFFERS, drafters_of
from vllm_hsd.tools.audit.mutants import MUTANTS
from vllm_hsd.tools.audit.sampled import Setting, Texts
from vllm_hsd.tools.audit.seeded import Seeded
from vllm_hsd.tools.audit.statistics import Check
from vllm_hsd.tools.audit.workloads import Found
from vllm_hsd.tools.cli import verify_report, verify_runs
from vllm_hsd.tools.cli.verify_report import NOT_ENOUGH, Outcome, Verification


def test_a_cascade_passes(text_family, verify, capsys):
    below = {"ngram": {"max": 2}, "num_tokens": 2}, {"early_exit": 1, "num_tokens": 3}
    config = cascade([*below, {"model": text_family.mid}])
    status, found = verify(text_family.target, config, temperatures="0,1", tokens=1024)
    page = capsys.readouterr().out
    assert status == 0 and found["lossless"]
    assert "PASSED" in page and "equal to no speculation" in page and "place 1" in page
    assert max(map(len, page.splitlines())) <= 98 and len(page.splitlines()) < 60
    assert found["sampled"]["tokens"] == 1024 and found["sampled"]["accepted"] > 100
    assert all(check["passed"] for check in found["sampled"]["checks"])
    assert found["seeded"]["passed"] and not found["seeded"]["partings"]
    assert "Seeded text: 16 answers, 1024 tokens, equal to no speculation." in page
    orders = {check["order"] for check in found["sampled"]["checks"]}
    assert {"mid", OFFERS} < orders and len(found["power"]["leaning"]) == 2
    same = {"answers": 8, "tokens": 512, "partings": [], "bound": 1e-4, "passed": True}
    assert found["greedy"] == same


def test_a_run_that_shows_nothing_is_no_pass(text_family, verify):
    """A lookup of longer matches than there are."""
    levels = [{"ngram": {"min": 60, "max": 60}}]
    config = {"method": "hsd", "num_speculative_tokens": 3, "levels": levels}
    status, found = verify(text_family.target, config, temperatures="0", tokens=256)
    assert status == NOT_ENOUGH and "no greedy text has drafts in it" in found["verdict"]


def drafts_of(name: str, drafts: int, steps: list[int]) -> Found:
    """Greedy answers of a workload, equal to those of no speculation; of so many drafts."""
    exact = Texts([""], drafts=drafts, drafted=drafts, step_lengths=[steps])
    return Found(name, Texts([""]), exact, None, Seeded(1, 64, []))


@pytest.mark.parametrize(
    ("drafts", "steps", "said"),
    # A server counts no drafts.
    [(0, [1, 1], "no greedy text has drafts in it"), (3, [1, 1], None), (0, [1, 2], None)],
)
def test_equal_greedy_texts_without_drafts_show_nothing(drafts, steps, said):
    asked = Verification(mock.Mock(), [], 64, greedy=True, equal_drafter=False)
    served = [drafts_of("crowd16", 0, [1]), drafts_of("turns", drafts, steps)]
    found = Outcome(asked, {}, Texts([]), [], {}, [], served=served)
    assert found.too_little_drafted == said
    nothing = Outcome(asked, {}, Texts([]), [], {}, [])
    assert nothing.status == NOT_ENOUGH and "nothing was tested" in verify_report.verdict(nothing)


def test_a_setting_without_drafts_is_no_pass():
    """Whatever was drafted in another one."""
    asked = Verification(mock.Mock(), [Setting(0.7), Setting(2.0)], 64, False, False)
    texts = Texts(["a", "b"], settings=[0, 1], token_ids=[[1] * 200] * 2)
    texts.offered = [np.ones(200, dtype=bool), np.zeros(200, dtype=bool)]
    found = Outcome(asked, {}, texts, [Check("a", "", "id", "all", 200, 1.0, 0.0)], {}, [])
    said = "drafts reached 200 of 400 places; b: 0 of them, 100 are needed"
    assert found.too_little_drafted == said
    texts.offered[1][:100] = True
    assert found.too_little_drafted is None


@pytest.mark.parametrize(
    ("given", "dtype"),
    [("auto", "bfloat16"), ("float", "float32"), ("half", "float16"), ("float32", "float32")],
)
def test_a_dtype_by_which_nothing_can_be_judged_is_refused(given, dtype):
    assert verify_runs.judged_dtype(given) == dtype
    with pytest.raises(UserError, match="--dtype fp32: rounding is known for"):
        verify_runs.judged_dtype("fp32")


def test_a_drafter_is_read_as_it_was_served():
    keys = {"revision": "v2", "quantization": "gptq"}
    level = {"model": "a/d", "max_model_len": 64, **keys}
    hsd = {"method": "hsd", "num_speculative_tokens": 2, "levels": [level]}
    for config in (hsd, {"method": "draft_model", "model": "a/d", **keys}):
        (drafter,) = drafters_of(config).models
        assert (drafter.name, drafter.model, dict(drafter.keys)) == ("d", "a/d", keys)


def test_every_drafter_has_a_name_of_its_own():
    """By which its rows are kept; most of two names may be alike."""
    common = "Distill-Qwen-Instruct-"
    models = f"a/{common}1.5B", f"a/{common}7B", f"b/{common}7B"
    levels = [{"model": model, "num_tokens": n} for n, model in enumerate(models, 1)]
    config = {"method": "hsd", "num_speculative_tokens": 3, "levels": levels}
    names = [drafter.name.removeprefix(common) for drafter in drafters_of(config).models]
    assert names == ["1.5B", "7B (2)", "7B (3)"]


LOOKUP = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
OFFERED = {
    "a cascade's lookup": {"method": "hsd", "levels": [{"ngram": {"max": 3}}], "adaptive": False},
    "a hosted lookup": {"method": "ngram", "rejection_sample_method": "hierarchical", **LOOKUP},
    "vLLM's own lookup": {"method": "ngram", **LOOKUP},
}


# A cascade's lookup is recorded by other tests, too.
@pytest.mark.parametrize("name", [*slow("a cascade's lookup"), *list(OFFERED)[1:]])
def test_what_is_drafted_is_recorded(text_family, verify, name):
    config = OFFERED[name] | {"num_speculative_tokens": 3}
    status, found = verify(text_family.target, config, tokens=1024)
    # A lookup finds too little for a pass.
    assert found["lossless"] and (status == 0) == found["enough_drafted"], found["verdict"]
    assert OFFERS in {check["order"] for check in found["sampled"]["checks"]}
    assert found["power"]["leaning"][0].count(OFFERS) == 1 and not found["power"]["untested"]


def test_one_length_for_all_is_fixed_too(text_family, verify):
    """Adaptive as on GPUs, where the scheduler learns lengths."""
    config = {"method": "hsd", "num_speculative_tokens": 3, "levels": [{"model": text_family.mid}]}
    config["adaptive"] = True
    status, found = verify(text_family.target, config, patch="support.adversarial_depth:idle")
    assert status == 0 and found["sampled"]["places_drafted"] > 1000


def test_several_drafts_are_said_not_to_be_recorded(text_family, verify):
    sources = [{"ngram": {"max": 3}}, {"ngram": {"max": 1}}]
    config = cascade([{"sources": sources, "branches": 2}], tokens=3)
    status, found = verify(text_family.target, config, tokens=1024)
    assert found["lossless"] and found["power"]["untested"] == [verify_runs.NOT_RECORDED]
    assert found["sampled"]["accepted"] > 0 and status in (0, NOT_ENOUGH)


# The first mutant of every workload, and of those that take few tokens some.
QUICK = "neighbouring row", "unscored grammar cut", "noise met twice", "row of another"
QUICK += "token after a stop", "block of another", "late mask", "budget of another"


@pytest.mark.parametrize(
    ("num_tokens", "workload_tokens", "names"),
    [
        (4096, 1024, QUICK),
        pytest.param(
            *(16384, self_test.WORKLOAD_TOKENS, tuple(MUTANTS)),
            marks=[pytest.mark.slow, pytest.mark.timeout(6000)],
        ),
    ],
    ids=["fast", "all"],
)
def test_mutants_are_found_and_the_sound_sampler_is_not(
    tmp_path, monkeypatch, num_tokens, workload_tokens, names
):
    """Those that deviate least take too many tokens for the fast form."""
    monkeypatch.setattr(self_test, "WORKLOAD_TOKENS", workload_tokens)
    results = self_test.run(tmp_path, num_tokens, print, forked(), names)
    assert [result.name for result in results] == [self_test.SOUND, *names]
    assert "SELF-TEST PASSED" in verify_report.self_test_page(results)


# Trials of every place, temperature and filter.
TRIALS = 131_072


@pytest.mark.slow
@pytest.mark.timeout(6000)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}])
def test_many_tokens_follow_the_target(family, temperature, filters):
    settings = [Setting(temperature, filters)]
    prompts = [[2 + i, 3, 5 + 2 * i] for i in range(20)]
    # Its drafts are too sure of themselves, and long enough that few tokens show the last place.
    levels = [{"model": family.target, "temperature_scale": 0.7}]
    # A drafter as slow as the target would not pay.
    config = cascade(levels, tokens=3)
    with started({"model": family.target, "speculative_config": config}) as engine:
        plan = sampled.planned(prompts, settings, 21 * TRIALS // 4, 64)
        texts = sampled.generate(engine, plan, 64, print)
    with started({"model": family.target}) as engine:
        ranges = sampled.scored(engine, texts, 64, print)
    checks = sampled.checks(texts, ranges, "float32", 0)
    assert not sampled.failures(checks)
    tested = {check.place: check.num_tokens for check in checks if check.method == "KS"}
    assert set(tested) == {"all", "drafted", "after a whole draft", "0", "1", "2", "3", "4"}
    assert min(tested[place] for place in "1234") >= TRIALS


@pytest.mark.parametrize("served", [False, True])
def test_a_sampler_that_accepts_too_much_does_not_pass(text_family, verify, served):
    """The default configuration, which adapts, and a ratio 1.6 times too large."""
    # With an exit, what is drafted is recorded, too.
    below = [] if served else [{"early_exit": 1, "num_tokens": 3}]
    levels = [*below, {"model": text_family.mid}]
    config = {"method": "hsd", "num_speculative_tokens": 5, "levels": levels}
    generous = "support.biased_sampler:install_generous_ratio"
    options = ["--as-served"] * served
    status, found = verify(text_family.target, config, *options, patch=generous)
    leaning = {check["order"] for check in found["sampled"]["checks"] if not check["passed"]}
    if not served:
        assert found["sampled"]["places_drafted"] > 1000 and OFFERS in leaning
    # What it drafts as served depends on the machine's clock.
    assert status == 1 or (served and status == NOT_ENOUGH), found["verdict"]
    assert found["enough_drafted"] == (status == 1)
    expected = "leans to mid" if status == 1 else "NOT ENOUGH WAS DRAFTED"
    assert expected in found["verdict"] and "PASSED" not in found["verdict"]


def test_settings_that_16_bits_round_too_coarsely_for_are_refused():
    fine = [Setting(0.1), Setting(1.0, {"top_p": 0.8, "top_k": 3})]
    for dtype in ("bfloat16", "float16"):
        sampled.refuse_coarse(dtype, fine)
        for setting, named in (
            (Setting(0.09), "temperature 0.09"),
            (Setting(1.0, {"top_p": 0.79}), "top_p 0.79"),
        ):
            sampled.refuse_coarse("float32", [setting])
            with pytest.raises(UserError, match=f"{dtype} rounds .* {named}: give --dtype float32"):
                sampled.refuse_coarse(dtype, [*fine, setting])
