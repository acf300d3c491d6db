"""Targets that keep recurrent state: what is refused, and what only the key "untested" lets pass.

No engine serves one on a CPU, so nothing here runs any; as on a GPU means a patched platform.
"""

import re
from types import SimpleNamespace
from unittest import mock

import pytest
from support.engines import configuration_errors, in_process
from transformers import Lfm2Config, Qwen3Config
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from vllm_hsd.config import level_checks
from vllm_hsd.config.cascade_config import CascadeConfig
from vllm_hsd.errors import UserError
from vllm_hsd.tools.audit.tiny_models import CONFIG

NGRAM = {"ngram": {"max": 3}}
REFUSED = {
    "exits": ({"early_exit": 1}, r"^levels\[0\]\.early_exit does not run on .*: use lookups"),
    "exit heads": ({"exit_head": "d"}, r"^levels\[0\]\.exit_head does not run on"),
    "heads": ({"eagle3": "d"}, r"^levels\[0\]\.eagle3 does not run on"),
    "MTP": ({"mtp": {}}, r"^levels\[0\]\.mtp does not run on"),
    "branches": ({"sources": [NGRAM, {"suffix": {}}], "branches": 2}, r"\.branches .*: set it to"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """Directories of configurations, without weights."""
    sizes = {**CONFIG, "vocab_size": 64, "num_hidden_layers": 3}
    layers = {"layer_types": ["conv", "full_attention", "conv"]}
    wide = {name: CONFIG["hidden_size"] for name in ("conv_dim", "block_dim", "conv_dim_out")}
    written = {}
    for kind, config in (("Lfm2", Lfm2Config(**sizes, **layers, **wide)), ("Qwen3", None)):
        config = config or Qwen3Config(**sizes)
        config.architectures = [f"{kind}ForCausalLM"]
        written[kind] = str(tmp_path_factory.mktemp(kind))
        config.save_pretrained(written[kind])
    return written


def mistakes(*levels: dict, recurrent: bool = True, **keys) -> list[str]:
    target = SimpleNamespace(model="mamba", is_hybrid=recurrent, is_attention_free=False)
    given = {"num_speculative_tokens": 4, "levels": list(levels), **keys}
    return list(level_checks.state_mistakes(CascadeConfig.parse(given), target))


@pytest.fixture
def as_on_a_gpu():
    with mock.patch.object(level_checks, "current_platform", SimpleNamespace(is_cpu=bool)):
        yield


def test_on_a_cpu_the_key_changes_nothing():
    for keys in ({}, {"untested": True}):
        (said,) = mistakes(NGRAM, **keys)
        assert said.startswith("the target 'mamba' keeps") and "speculative_config" in said


def test_only_the_key_lets_it_pass(as_on_a_gpu):
    (said,) = mistakes(NGRAM)
    assert said.endswith("or set untested to true.")
    assert mistakes(NGRAM, untested=True) == []
    assert mistakes({**NGRAM, "num_tokens": 2}, {"model": "d"}, untested=True) == []


@pytest.mark.parametrize(("level", "said"), REFUSED.values(), ids=REFUSED)
def test_what_the_key_does_not_let_pass(as_on_a_gpu, level, said):
    (sentence,) = mistakes(level, untested=True)
    assert re.search(said, sentence)


def test_the_key_has_a_meaning_only_there():
    assert mistakes(NGRAM, recurrent=False) == []
    (said,) = mistakes(NGRAM, recurrent=False, untested=True)
    assert said.startswith("untested has no meaning on 'mamba'")
    with pytest.raises(UserError, match="untested must be true or false"):
        mistakes(NGRAM, untested=1)


def test_layers_that_are_never_told_what_was_accepted():
    def check(kind: str) -> None:
        kinds = MambaAttentionBackendEnum
        spec = MambaSpec(block_size=1, shapes=((1,),), dtypes=(), mamba_type=kinds[kind])
        level_checks.check_states(
            SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
        )

    for kind in level_checks.STATES_PER_DRAFT:
        check(kind)
    for kind in ("MAMBA1", "LINEAR"):
        with pytest.raises(UserError, match=f"kind {kind}, whose recurrent state"):
            check(kind)


def configured(engine: dict) -> list[str]:
    """Warnings of vLLM's configuration, made as on a GPU."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_hsd.host import spec_config

    with (
        mock.patch.object(level_checks, "current_platform", SimpleNamespace(is_cpu=bool)),
        mock.patch.object(spec_config.logger, "warning_once") as warned,
    ):
        EngineArgs(**engine).create_engine_config()
    return [call.args[0] % call.args[1:] for call in warned.call_args_list]


def test_configurations_of_vllm(models):
    levels = [{**NGRAM, "num_tokens": 2}, {"model": models["Qwen3"]}]
    cascade = {"method": "hsd", "num_speculative_tokens": 4, "levels": levels}
    engine = {"model": models["Lfm2"], "skip_tokenizer_init": True, "max_model_len": 256}
    (error,) = configuration_errors([{**engine, "speculative_config": cascade}])
    assert "UserError: the target" in error and "\n" not in error
    engine["speculative_config"] = {**cascade, "untested": True}
    (said,) = in_process(configured, {"engine": engine})
    assert said.startswith("No cascade was ever tested on a target that keeps recurrent state, as")
