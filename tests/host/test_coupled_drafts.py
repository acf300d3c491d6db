"""Coupled requests on the sampling side of vLLM's runner: their text is that without drafts."""

import pytest
from support.table_drafters import cascade, tables
from support.table_runner import TableRunner

from vllm_hsd.host import sampler

LENGTH = 7
FILTERS = ({}, {"top_p": 0.8, "temperature": 0.7}, {"top_k": 3}, {"min_p": 0.2, "temperature": 1.3})


def texts(params, name, **options):
    """Of `params` with a drafter: "plain" is vLLM's sampler alone."""
    kinds = {"plain": {"ours": False, "length": 0}, "stock": {"length": 3}}
    given = kinds[name] if name in kinds else {"length": 4, "cascade": cascade(name)}
    # As long as the widest window of a cascade, so that the first step drafts.
    served = TableRunner(*tables(), params, prompt_length=4, **given, **options)
    while min(map(len, served.texts())) < 4 + LENGTH:
        served.step()
    return [text[: 4 + LENGTH] for text in served.texts()]


@pytest.mark.parametrize("name", ["two", "stock"])
def test_all_sampled_requests_are_coupled_if_configured(name):
    params = [*FILTERS, {"temperature": 0.0}]
    expected = texts(params, "plain")
    assert texts(params, name, couples_all=True) == expected
    assert texts(params, name) != expected


@pytest.mark.parametrize("fault", ["position", "threshold"])
def test_faults_are_caught(fault, monkeypatch):
    """Negative controls: noise of the neighbouring position; a filter that the target ignores."""
    verify = sampler.verify_chain_padded

    def faulty(logits, *args, positions, **options):
        if fault == "position":
            return verify(logits, *args, positions=positions + 1, **options)
        return verify(logits.clamp(min=0.0), *args, positions=positions, **options)

    params = [{"seed": 100 + i, **case} for i, case in enumerate(FILTERS)]
    expected = texts(params, "plain")
    monkeypatch.setattr(sampler, "verify_chain_padded", faulty)
    assert texts(params, "stock") != expected
