"""The items of `make gpu-proof` that run engines, in toy sizes."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support import triton_cpu
from support.engines import ENVIRONMENT, configure
from support.soak_servers import write_table
from support.table_drafters import tables
from support.table_runner import TableRunner

from benchmarks.gpu import (
    boot,
    defaults,
    engine_distribution,
    engines,
    faults,
    forwards,
    levels,
    memory,
    same_text,
    soak,
    step_times,
)
from benchmarks.gpu.items import Setting
from vllm_hsd.tools.engine import EngineProcess

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
def setting(tmp_path):
    small = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "kv_cache_memory_bytes": 64 << 20,
        # vLLM wants this part of the machine's memory to be free.
        "gpu_memory_utilization": 0.05,
        "attention_backend": None,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "num_gpu_blocks_override": None,
    }
    options = {"environment": ENVIRONMENT, "prepare": triton_cpu.prepare_vllm}
    return Setting("cpu", tmp_path, engine_args=small, engine_options=options)


def paths(family) -> dict[str, str]:
    return {name: getattr(family, name) for name in ("small", "mid", "target")}


def test_without_vllm_no_engine_item_runs(tmp_path, monkeypatch):
    items = boot, defaults, engine_distribution, forwards, levels, memory, same_text, soak
    without_extensions = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    for spec, reason in ((None, "not installed"), (without_extensions, "no compiled extensions")):
        monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name, spec=spec: spec)
        for module in items:
            with pytest.raises(pytest.skip.Exception, match=reason):
                module.run(Setting("cpu", tmp_path))


@pytest.mark.slow
def test_boot(setting):
    found = boot.run(setting)
    assert "runner V2" in found.lines[0] and "HostSpeculator" in found.lines[1]


@pytest.mark.slow
def test_same_text(setting, text_family):
    found = same_text.run(setting, paths(text_family))
    assert sum("equals that of no speculation" in line for line in found.lines) == 4
    assert found.lines[-1].startswith("A drafter equal to the target, no seeds: 1.0000")


@pytest.mark.slow
def test_levels(setting, text_family, tmp_path):
    # Blocks have 128 tokens on a CPU, and each row has some of its own.
    longer = replace(setting, engine_args={**setting.engine_args, "max_model_len": 512})
    store = write_table(tmp_path / "store.safetensors")
    found = levels.run(longer, paths(text_family), store)
    assert not found.left_out and not found.waiting
    assert sum("equals that of no speculation" in line for line in found.lines) == 13


@pytest.mark.slow
def test_defaults(setting):
    found = defaults.run(setting)
    assert [line.split(";")[0] for line in found.lines] == [
        "sources below a model: 5 requests of 30 tokens",
        "three levels, adaptive: 5 requests of 30 tokens",
        "ends by entropy: 5 requests of 30 tokens",
    ]


@pytest.mark.slow
def test_engine_distribution(setting, family):
    found = engine_distribution.run(setting, paths(family))
    assert [row["control"] for row in found.rows] == [False] * 5 + [True] * 2
    assert all(row["tokens_per_step"] > 1 for row in found.rows)


@pytest.mark.slow
def test_soak(setting, family):
    found = soak.run(setting, paths(family))
    assert found.lines[0].startswith("8 requests in")
    assert found.lines[1].startswith("2 of 2 texts equal")


@pytest.mark.slow
def test_step_times(setting):
    found = step_times.run(setting)
    assert len({row["stack"] for row in found.rows}) == 8
    assert all(row["ms_low"] <= row["ms_per_step"] <= row["ms_high"] for row in found.rows)


@pytest.mark.slow
def test_forwards_and_memory(setting):
    assert len(forwards.run(setting).rows) == 6
    rows = memory.run(setting).rows
    assert all(row["bytes"] > 0 for row in rows[:2]) and rows[3]["bytes"] > 0


def test_engine_arguments_of_the_setting_take_the_place_of_the_items(setting):
    process = engines.engine(setting, "name", engines.TINY_ARGS | {"model": "m"})
    assert isinstance(process, EngineProcess)
    assert process.engine_args["max_num_seqs"] == 8 and process.engine_args["model"] == "m"


def test_all_requests_of_the_distribution_draft(family):
    """And none has a seed: of such a request drafts change nothing, whatever the verifier does."""
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    from vllm_hsd.host.spec_config import CascadeSpeculativeConfig

    count = engine_distribution.REQUESTS
    assert not any("seed" in params for params in engine_distribution.requests(count, 8)[1])
    for name, given in engine_distribution.configurations(paths(family)).items():
        found = configure(family, given, max_num_seqs=count)
        spec = found.speculative_config
        table, longest = spec.num_speculative_tokens_per_batch_size, spec.num_speculative_tokens
        lookup = build_dynamic_sd_schedule_lookup(table, count, longest) if table else None
        assert lookup is None or lookup[count] == longest, name
        if isinstance(spec, CascadeSpeculativeConfig):
            assert spec.max_batch_size(found.scheduler_config) >= count, name


@pytest.mark.parametrize("fault", ["install", "install_generous"])
def test_a_control_of_the_distribution_changes_text(monkeypatch, fault):
    def texts():
        np.random.seed(0)
        _, params = engine_distribution.requests(16, 8)
        runner = TableRunner(*tables(), params, length=4)
        for _ in range(5):
            runner.step()
        return runner.texts()

    right = texts()
    getattr(faults, fault)(monkeypatch.setattr)
    assert texts() != right


def test_a_configuration_that_does_not_draft_fails(setting, monkeypatch):
    answer = SimpleNamespace(num_tokens=8, num_target_steps=8, drafted=0)
    engine = contextlib.nullcontext(SimpleNamespace(generate=lambda *_: answer))
    monkeypatch.setattr(engine_distribution.engines, "engine", lambda *_, **__: engine)
    with pytest.raises(pytest.fail.Exception, match="0 tokens drafted"):
        engine_distribution._row(setting, {"target": "t", "mid": "m"}, "two levels", {}, None)
