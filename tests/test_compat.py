"""The table of vLLM names, and what happens where they differ."""

import dataclasses
import re

import pytest
from support.engines import configuration_errors

from vllm_hsd import compat, plugin

CASCADE = {"method": "hsd", "num_speculative_tokens": 4}


@pytest.mark.parametrize("hook", compat.HOOKS, ids=lambda hook: hook.name.removeprefix("vllm."))
def test_hook_agrees_with_the_installed_vllm(hook):
    assert compat.hook_fault(hook) is None
    assert hook.why and hook.place in ("class", "runner", "subclass", "late")


def test_installed_release_is_tested():
    assert compat.installed_release() in compat.TESTED
    assert compat.faults() == []


def test_a_name_that_is_gone_is_reported():
    hook = dataclasses.replace(compat.HOOKS[0], name="vllm.engine.arg_utils.EngineArgs.gone")
    assert "EngineArgs.gone is not there" in compat.hook_fault(hook)
    hook = dataclasses.replace(compat.HOOKS[0], name="vllm.no_such_module.gone")
    assert "vllm.no_such_module.gone is not there" in compat.hook_fault(hook)


def test_other_parameters_are_reported(monkeypatch):
    hook = compat.HOOKS[0]
    changed = dataclasses.replace(hook, parameters=(*hook.parameters, "another"))
    fault = compat.hook_fault(changed)
    assert hook.name in fault and re.search(r"takes \(.*\), not \(.*another\)", fault)
    monkeypatch.setattr(compat, "HOOKS", (changed,))
    assert compat.faults() == [fault]


def test_an_unknown_release_is_reported(monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.99.1")
    assert re.search(r"vLLM 0\.99 .*0\.32\.\*", compat.version_fault())


def test_registering_again_changes_nothing():
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()
    assert plugin.is_registered()
    hooked = EngineArgs.create_speculative_config
    plugin.register()
    assert EngineArgs.create_speculative_config is hooked


@pytest.mark.parametrize("patch", ["other_release", "other_parameters"])
def test_only_this_package_refuses_another_vllm(family, patch):
    stock = {"method": "draft_model", "model": family.mid, "num_speculative_tokens": 3}
    ours = {**stock, "rejection_sample_method": "hierarchical"}
    cascade = {**CASCADE, "levels": [{"model": family.mid}]}
    cascade_error, ours_error, *others = configuration_errors(
        [
            {"model": family.target, "speculative_config": cascade},
            {"model": family.target, "speculative_config": ours},
            {"model": family.target, "speculative_config": stock},
            {"model": family.target},
        ],
        patch=f"runner_v1.other_vllm:{patch}",
    )
    said = "0.99" if patch == "other_release" else "_validate_spec_decode"
    assert said in cascade_error and said in ours_error
    assert others == [None, None]
