"""The registry of names of vLLM's V2 runner, and the wall between the two runners."""

import ast
import pickle
from pathlib import Path

import pytest

import vllm_hsd
from vllm_hsd.errors import UserError

SOURCE = Path(vllm_hsd.__file__).parent
# Names that the modules of runner_v2 give to objects of vLLM, and their classes.
VARIABLES = {
    "runner": ("GPUModelRunner",),
    "sampler": ("Sampler",),
    "states": ("SamplingStates",),
    "req_states": ("RequestState",),
    "speculator": ("DraftModelSpeculator",),
    "block_tables": ("BlockTables",),
    "input_batch": ("InputBatch",),
    "parsed": ("SpeculativeConfig",),
    "group": ("AttentionGroup",),
    "compilation_config": ("CompilationConfig",),
}
interpret = pytest.mark.interpret


def imported(path: Path) -> set[str]:
    """Modules that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


@pytest.mark.parametrize(
    ("package", "other"), [("runner_v1", "runner_v2"), ("runner_v2", "runner_v1")]
)
def test_neither_runner_imports_the_other(package, other):
    for path in SOURCE.glob(f"{package}/*.py"):
        assert not [name for name in imported(path) if name.startswith(f"vllm_hsd.{other}")], path


def test_only_the_entrance_and_the_doctor_import_the_v2_runner():
    importing = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if path.parent.name != "runner_v2"
        and any(name.startswith("vllm_hsd.runner_v2") for name in imported(path))
    }
    assert importing == {"entrance.py", "cli/doctor.py"}


@interpret
def test_every_name_is_as_tested_in_the_installed_vllm():
    from support import triton_cpu

    triton_cpu.prepare_vllm()
    from vllm_hsd.runner_v2 import hooks

    assert hooks.REGISTRY.faults() == []
    assert all(hook.why for hook in hooks.HOOKS.values())


@interpret
def test_every_attribute_that_is_read_from_vllm_is_registered():
    from vllm_hsd.runner_v2 import hooks

    hooks.REGISTRY.load()
    known: dict[str, set[str]] = {}
    for name in hooks.HOOKS:
        owner, _, attribute = name.rpartition(".")
        known.setdefault(owner.rpartition(".")[2], set()).add(attribute)
    missing = set()
    for source in SOURCE.glob("runner_v2/*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if not isinstance(node, ast.Attribute):
                continue
            variable = getattr(node.value, "attr", getattr(node.value, "id", None))
            classes = VARIABLES.get(variable, ())
            if classes and not any(node.attr in known[cls] for cls in classes):
                missing.add(f"{source.name}: {variable}.{node.attr}")
    ours = {"sampler.py: sampler.processed", "sampler.py: sampler.sampler"}
    ours |= {"stock_drafters.py: kept.lse"}
    ours |= {f"sampler.py: speculator.{name}" for name in ("req_states", "schedule", "hsd")}
    ours |= {f"sampler.py: speculator.{name}" for name in ("state", "scales")}
    ours |= {"levels.py: speculator.longest", "levels.py: speculator.schedule"}
    ours |= {f"sampler.py: sampler.{name}" for name in ("verify", "target_logits")}
    ours |= {"metrics.py: speculator.counts"}
    assert missing <= ours


@pytest.fixture
def v2(monkeypatch):
    """vLLM chooses the V2 runner."""
    from support import triton_cpu

    triton_cpu.prepare_vllm()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")


def configure(family, speculative_config: dict, **engine):
    from vllm.engine.arg_utils import EngineArgs

    from vllm_hsd.plugin import register

    register()
    return EngineArgs(
        model=family.target,
        skip_tokenizer_init=True,
        speculative_config=speculative_config,
        **engine,
    ).create_engine_config()


@interpret
def test_a_configuration_of_the_v2_runner_stays_there(family, v2):
    given = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    config = configure(family, {**given, "rejection_sample_method": "hierarchical"})
    assert config.use_v2_model_runner
    assert config.speculative_config.hsd_runner == "V2"
    copied = pickle.loads(pickle.dumps(config.speculative_config))
    assert copied.rejection_sample_method == "block" and copied.hsd_runner == "V2"


@interpret
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"method": "custom_class", "model": "a.B"}, "works on vLLM's V2 runner with the methods"),
        ({"method": "ngram", "num_speculative_tokens": 64}, "num_speculative_tokens is 64, above"),
        ({"method": "ngram", "levls": []}, r"^vLLM refuses levls: [^\n]*\.$"),
    ],
)
def test_what_the_v2_runner_refuses(family, v2, keys, message):
    given = {"num_speculative_tokens": 2, "rejection_sample_method": "hierarchical", **keys}
    with pytest.raises(UserError, match=message):
        configure(family, given)


@interpret
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"adaptive": {"profile": "a"}}, r"adaptive.profile .* measures the V1 runner: give"),
        ({"horizontal_tokens": 1}, "horizontal_tokens is 1, but vLLM's V2 runner"),
        ({"levels": [{"suffix": {}}]}, r"levels\[0\].suffix does not run on vLLM's V2"),
        ({"levels": [{"eagle3": "a"}]}, r"levels\[0\].eagle3 does not run on vLLM's V2"),
        ({"levels": [{"first_of": [{"ngram": {}}]}]}, r"levels\[0\].first_of does not run on"),
        ({"levels": [{"bigram": "none.npz"}]}, r"levels\[0\].bigram: no file 'none.npz'"),
        (
            {"levels": [{"bigram": "a", "temperature_scale": 2.0}]},
            r"levels\[0\].temperature_scale has no meaning on vLLM's V2",
        ),
        (
            {"levels": [{"ngram": {}, "num_tokens": 2}, {"bigram": "a"}]},
            r"levels\[1\].bigram verifies levels\[0\], but on vLLM's V2 runner",
        ),
        ({"levels": [{"early_exit": 90}]}, r"levels\[0\].early_exit is 90, but the target has"),
        ({"levels": [{"exit_head": "none"}]}, r"levels\[0\].exit_head: .*none"),
        ({"levels": [{"model": "/none"}]}, r"levels\[0\].model: no directory '/none'"),
    ],
)
def test_what_cascades_of_the_v2_runner_refuse(family, v2, keys, message):
    levels = [{"model": family.small, "num_tokens": 2}, {"model": family.mid}]
    with pytest.raises(UserError, match=message):
        configure(family, {"method": "hsd", "num_speculative_tokens": 5, "levels": levels, **keys})


@interpret
def test_a_cascade_of_the_v2_runner_stays_there(family, v2):
    levels = [{"model": family.small, "num_tokens": 2}, {"model": family.mid}]
    config = configure(family, {"method": "hsd", "num_speculative_tokens": 5, "levels": levels})
    assert config.use_v2_model_runner and config.speculative_config.hsd_runner == "V2"
    copied = pickle.loads(pickle.dumps(config.speculative_config))
    assert copied.hsd == config.speculative_config.hsd


LOOKUP = {"method": "hsd", "num_speculative_tokens": 3, "levels": [{"ngram": {}}]}


@interpret
@pytest.mark.parametrize(
    ("keys", "max_num_seqs", "drafts"),
    [
        ({}, 65, {1: 3, 64: 3, 65: 0}),
        ({}, 64, None),
        ({"disable_by_batch_size": 8}, 16, {1: 3, 8: 3, 9: 0, 16: 0}),
        ({"disable_by_batch_size": 16}, 16, None),
        ({"adaptive": True, "disable_by_batch_size": 16}, 16, {1: 3, 16: 3}),
    ],
)
def test_large_batches_draft_nothing(family, v2, keys, max_num_seqs, drafts):
    """By vLLM's own schedule of draft lengths, only where a batch can be as large."""
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    config = configure(family, {**LOOKUP, **keys}, max_num_seqs=max_num_seqs)
    given = config.speculative_config.num_speculative_tokens_per_batch_size
    assert (given is None) == (drafts is None)
    if drafts is not None:
        by_size = build_dynamic_sd_schedule_lookup(given, max_num_seqs, 3)
        assert {size: by_size[size] for size in drafts} == drafts


@interpret
@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_the_batch_size_is_a_key_of_v2(family, v2, monkeypatch, runner):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1" if runner == "V2" else "0")
    given = {**LOOKUP, "disable_by_batch_size": 8}
    if runner == "V2":
        configure(family, given)
        return
    with pytest.raises(UserError, match="disable_by_batch_size works on vLLM's V2 runner only"):
        configure(family, given)


@interpret
@pytest.mark.parametrize("kind", ["cascade", "stock drafter"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_grammar_needs_asynchronous_scheduling(family, v2, kind, asynchronous):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    stock = {"method": "ngram_gpu", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    given = {"cascade": LOOKUP}.get(kind, {**stock, "rejection_sample_method": "hierarchical"})
    config = configure(family, given)
    # vLLM schedules synchronously on CPUs.
    assert config.speculative_config.hsd_synchronous
    if asynchronous:
        config.scheduler_config.async_scheduling = True
        config.speculative_config.adapt(config.scheduler_config)
    speculative = pickle.loads(pickle.dumps(config.speculative_config))
    SamplingParams()._validate_spec_decode(speculative)
    constrained = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
    if asynchronous:
        constrained._validate_spec_decode(speculative)
        return
    with pytest.raises(UserError, match="exact with asynchronous scheduling only"):
        constrained._validate_spec_decode(speculative)
