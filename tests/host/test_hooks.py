"""The registry of vLLM names: complete, as installed, all replaced or none."""

import re
import subprocess
import sys

import pytest
from support.engines import configuration_errors
from vllm import SamplingParams

from vllm_hsd.errors import UserError
from vllm_hsd.host import registry
from vllm_hsd.host.engine_hooks import NeedsHooks, validate_spec_decode
from vllm_hsd.host.hooks import HOOKS, REGISTRY
from vllm_hsd.host.registry import TESTED, installed_release
from vllm_hsd.tools.cli import doctor

REGISTRY.load()


def test_the_installed_release_is_tested():
    assert installed_release() in TESTED
    assert REGISTRY.faults() == []


@pytest.mark.parametrize("hook", HOOKS.values(), ids=lambda hook: hook.name[5:])
def test_a_name_says_why_and_a_replacement_when_it_can_go(hook):
    assert hook.why and set(hook.missing) < set(TESTED)
    if hook.how in ("replaced", "changed", "on runner"):
        assert hook.until and re.fullmatch(r"vllm-project/vllm#\d+|none filed", hook.issue)


def test_a_seed_is_refused_where_one_of_n_answers_would_have_too_large_a_one():
    served, most = NeedsHooks(), 2**63 - 1
    asked = []
    for seed, n in ((most, 1), (most - 1, 2), (None, 3)):
        given = SamplingParams(seed=seed, n=n)
        validate_spec_decode(lambda *each: asked.append(each), given, served)
    assert len(asked) == 3
    with pytest.raises(UserError, match=r"seed is 9223372036854775807: .* the i-th of which"):
        validate_spec_decode(asked.append, SamplingParams(seed=most, n=2), served)


@pytest.mark.parametrize(
    "patch", ["other_release", "other_parameters", "missing_method", "missing_entrance"]
)
def test_only_this_package_refuses_another_vllm(family, patch):
    cascade = {"method": "hsd", "num_speculative_tokens": 4, "levels": [{"model": family.mid}]}
    stock = {"method": "draft_model", "model": family.mid, "num_speculative_tokens": 3}
    ours, block = ({**stock, "rejection_sample_method": m} for m in ("hierarchical", "block"))
    engines = [
        {"model": family.target, "speculative_config": given}
        for given in (cascade, ours, block, stock, None)
    ]
    cascade_error, hierarchical_error, *others = configuration_errors(
        engines, patch=f"support.other_vllm:{patch}"
    )
    said = {
        "other_release": ["0.99"] * 2,
        "other_parameters": ["_validate_spec_decode"] * 2,
        "missing_method": ["prepare_attn"] * 2,
        # vLLM's own refusals.
        "missing_entrance": ["method", "rejection_sample_method"],
    }[patch]
    assert said[0] in cascade_error and said[1] in hierarchical_error
    assert others == [None, None, None]


# All of this package that a process imports whose configuration does not use it.
UNUSED = ("errors", "host", "host.hooks", "host.read_config", "host.registry", "plugin")
IMPORTS = """
import sys
from vllm.engine.arg_utils import EngineArgs
on_cpu = "vllm_hsd.kernels.cpu_backend.driver" in sys.modules
if on_cpu:
    from vllm.v1.sample.ops import topk_topp_sampler
before = {name for name in sys.modules if not name.startswith("vllm_hsd")}
unused = {"vllm_hsd", *(f"vllm_hsd.{name}" for name in sys.argv[2:])}
# vLLM's entry point for platforms, which it calls where it is installed, and where there is no GPU
# Triton's backend for CPUs.
kernels = [name for name in sys.modules if name.startswith("vllm_hsd.kernels")]
unused |= {name for name in kernels if "cpu_backend" in name} | {"vllm_hsd.kernels"} & set(kernels)
from vllm_hsd import plugin
plugin.register()
plugin.register()
assert set(sys.modules) - before == unused, set(sys.modules) - before
config = EngineArgs(sys.argv[1], skip_tokenizer_init=True).create_engine_config()
assert config.speculative_config is None
assert {name for name in sys.modules if name.startswith("vllm_hsd")} == unused
from vllm_hsd.host.registry import in_place, is_ours
from vllm_hsd.host.hooks import HOOKS, REGISTRY
assert is_ours(EngineArgs.create_speculative_config)
assert not is_ours(EngineArgs.create_speculative_config.__wrapped__)
REGISTRY.load()
replaced = [hook for hook in HOOKS.values() if hook.how == "replaced"]
from vllm_hsd.host.read_config import ENTRANCE, FILTER
assert [hook.name for hook in replaced if in_place(hook)] == [ENTRANCE, FILTER][: 1 + on_cpu]
REGISTRY.install()
assert all(map(in_place, replaced))
"""


def test_a_process_without_a_cascade_imports_and_replaces_next_to_nothing(family):
    """No model runner, no kernel, no configuration class: neither torch nor Triton code of ours."""
    command = [sys.executable, "-c", IMPORTS, family.target, *UNUSED]
    subprocess.run(command, check=True, timeout=300)


def test_doctor_says_which_names_differ_in_an_unverified_release(monkeypatch):
    monkeypatch.setattr(registry, "TESTED", ("0.1",))
    monkeypatch.setattr(registry, "fault_of", lambda hook: f"{hook.name} differs.")
    unverified, *names = doctor._names(verbose=False)
    assert "is unverified" in unverified.text
    assert len(names) == len(REGISTRY.hooks) and all("differs" in each.text for each in names)


def test_a_new_release_is_asked_for_names_that_an_old_one_lacks(monkeypatch):
    hook = registry.Hook("vllm.config.no_such_name", "overridden", "why", missing=("0.32",))
    for release, there in (("0.32", True), ("0.33", False), ("9.9", False)):
        monkeypatch.setattr(registry, "installed_release", lambda release=release: release)
        assert (registry.fault_of(hook) is None) == there
