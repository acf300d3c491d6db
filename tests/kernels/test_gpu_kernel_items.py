"""The items of `make gpu-proof` that need kernels only, in toy sizes."""

import pytest
import torch

from benchmarks.gpu import kernel_distribution, kernel_times, pit
from benchmarks.gpu.items import Setting
from benchmarks.kernels.drafts import Drafts

CPU = torch.device("cpu")


@pytest.fixture
def setting(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_times, "WARM_UP", 0)
    return Setting("cpu", tmp_path)


@pytest.mark.slow
def test_times_of_every_sampler(setting):
    found = kernel_times.run(setting)
    samplers = [row["sampler"] for row in found.rows]
    assert samplers[0] == "block, lse given" and "vLLM V2 block" in samplers
    assert all(row["us"] > 0 and row["copy_bytes_per_s"] > 0 for row in found.rows)
    ours = [row for row in found.rows if row["floor_us"] is not None]
    assert len(ours) == 4 and not found.left_out
    assert "vLLM's block verification" in found.lines[1]


def test_a_kernel_that_is_wrong_is_not_timed(monkeypatch):
    drafts = Drafts.make(40, 3, 1, 0.7, noise=1.5)
    kernel_times.check_case(drafts, 3)
    right = kernel_times.reference.verify_chain

    def wrong(*args, **options):
        result = right(*args, **options)
        return result._replace(token_ids=result.token_ids + 1)

    monkeypatch.setattr(kernel_times.reference, "verify_chain", wrong)
    with pytest.raises(kernel_times.NotTimed, match="3 of 3 requests differ"):
        kernel_times.check_case(drafts, 3)


def test_a_short_text_is_written():
    """The next test is slow; this one notices arguments that it is not given."""
    found, rate = kernel_distribution.texts((2, 5), kernel_distribution.TOY, CPU, tokens=6)
    assert all(len(places) == 6 for places in found) and rate > 1


@pytest.mark.slow
def test_the_distribution_of_two_and_three_levels_and_of_the_control(setting):
    found = kernel_distribution.run(setting)
    assert [row["control"] for row in found.rows] == [False, True, False]
    assert all(row["tokens_per_step"] > 1 for row in found.rows)


def test_a_distribution_that_is_missed_is_a_failure(setting, monkeypatch):
    monkeypatch.setattr(kernel_distribution, "texts", lambda *args: ([], 2.0))
    monkeypatch.setattr(pit, "p_value", lambda *args: 1e-5)
    with pytest.raises(pytest.fail.Exception, match="does not follow the target"):
        kernel_distribution.run(setting)
    p_values = iter([0.5, 0.5])
    monkeypatch.setattr(pit, "p_value", lambda *args: next(p_values))
    with pytest.raises(pytest.fail.Exception, match="control is not noticed"):
        kernel_distribution.run(setting)
