"""Which combinations of stock vLLM meet which of its known faults."""

import json
from dataclasses import replace
from unittest import mock

import pytest
from pydantic import ValidationError
from vllm.config import SpeculativeConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from tools import key_reference
from vllm_hsd.errors import UserError
from vllm_hsd.host.registry import installed_release
from vllm_hsd.tools.cli.doctor import configuration_findings
from vllm_hsd.tools.known_faults import Combination, met_by

STOCK = Combination("mtp", ours=False, device="cuda", runner="V2", release="0.33")
OURS = replace(STOCK, method="hsd", ours=True)
HYBRID = {"recurrent": True, "prefix_caching": True}
# What is said, and which changes of a combination suffice, each alone not.
MET = [
    ("#53912", {"recurrent": True}, {"prefix_caching": True}),
    ("#54360", {"recurrent": True}, {"prefix_caching": True}),
    ("#53919", {"runner": "V1"}, {"async_scheduling": True}, HYBRID),
    ("#49548", {"runner": "V1"}, {"by_batch_size": True}),
    ("#54011", {"adaptive_verification": True}, {"tensor_parallel": 2}),
    ("#57964", {"method": "dspark"}, {"short_draft": True}, {"release": "0.32"}),
    ("uniforms again", {"rule": "block"}, {"release": "0.32"}),
    ("by intention", {"rule": "fly"}),
    ("#37865", {"short_graphs": True}),
    ("#47825", {"method": "medusa"}),
    ("#55005", {"device": "cpu"}, {"runner": "V1"}),
    ("#45447", {"device": "cpu"}, {"compiled_ahead": True}),
]


@pytest.mark.parametrize(("issue", "changes"), [(issue, changes) for issue, *changes in MET])
def test_all_of_a_condition_and_no_less(issue, changes):
    plain = replace(STOCK, prefix_caching=False)

    def said(*parts):
        keys = {key: value for part in parts for key, value in part.items()}
        return [text for text in met_by(replace(plain, **keys)) if issue in text]

    assert len(said(*changes)) == 1
    for i in range(len(changes)):
        assert not said(*changes[:i], *changes[i + 1 :])


def test_ours_meets_none_that_is_stock_vllms_verification():
    assert not list(met_by(replace(OURS, recurrent=True, by_batch_size=True, runner="V1")))


def findings(target, **config):
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, **config}
    _, *found = configuration_findings(target, json.dumps(config), ())
    return "\n".join(finding.text for finding in found)


def test_a_configuration_is_read(text_family, monkeypatch):
    target = text_family.target
    assert configuration_findings(target, None, ())[0].text.endswith("no speculation")
    assert "uniforms again" not in findings(target)
    said = findings(target, rejection_sample_method="block")
    assert ("uniforms again" in said) == (installed_release() == "0.32")
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5] * 3}
    assert "by intention" in findings(target, **synthetic)
    assert ("#45447" in findings(target)) == (current_platform.device_type == "cpu")
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "0")
    assert "#45447" not in findings(target)


def test_a_method_that_vllm_no_longer_has(text_family, monkeypatch):
    with pytest.raises(ValidationError) as refused:
        SpeculativeConfig(method="no such method")
    refuse = mock.Mock(side_effect=refused.value)
    monkeypatch.setattr(AsyncEngineArgs, "create_engine_config", refuse)
    with pytest.raises(UserError, match=r"Way out: an EAGLE-3 head .*#47825"):
        findings(text_family.target, method="medusa")
    with pytest.raises(UserError) as error:
        findings(text_family.target, method="no such method")
    assert "Way out" not in str(error.value)


def test_the_generated_pages_are_not_stale():
    """docs/keys.md and docs/known-faults.md are what their sources say today."""
    pages = {key_reference.PAGE: key_reference.page}
    pages[key_reference.FAULTS] = key_reference.faults_page
    for path, page in pages.items():
        assert path.read_text() == page(), "write it again: python -m tools.key_reference"
