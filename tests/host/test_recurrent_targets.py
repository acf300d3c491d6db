"""Targets that keep recurrent state: what is refused, and what the key "untested" lets pass."""

import re
from types import SimpleNamespace
from unittest import mock

import pytest
from support.engines import configuration_errors, in_process
from transformers import Lfm2Config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from vllm_hsd.config import level_checks
from vllm_hsd.config.cascade_config import CascadeConfig
from vllm_hsd.errors import UserError
from vllm_hsd.host import spec_config
from vllm_hsd.tools.audit.tiny_models import CONFIG

NGRAM = {"ngram": {"max": 3}}
REFUSED = {
    "exits": ({"early_exit": 1}, r"^levels\[0\]\.early_exit does not run on .*: use lookups"),
    "exit heads": ({"exit_head": "d"}, r"^levels\[0\]\.exit_head does not run on"),
    "heads": ({"eagle3": "d"}, r"^levels\[0\]\.eagle3 does not run on"),
    "MTP": ({"mtp": {}}, r"^levels\[0\]\.mtp does not run on"),
    "branches": ({"sources": [NGRAM, {"suffix": {}}], "branches": 2}, r"\.branches .*: set it to"),
}


def mistakes(*levels: dict, recurrent: bool = True, **keys) -> list[str]:
    target = SimpleNamespace(model="mamba", is_hybrid=recurrent, is_attention_free=False)
    given = {"num_speculative_tokens": 4, "levels": list(levels), **keys}
    return list(level_checks.state_mistakes(CascadeConfig.parse(given), target))


on_a_gpu = mock.patch.object(level_checks, "current_platform", SimpleNamespace(is_cpu=bool))


def test_on_a_cpu_the_key_changes_nothing():
    for keys in ({}, {"untested": True}):
        (said,) = mistakes(NGRAM, **keys)
        assert said.startswith("the target 'mamba' keeps") and "speculative_config" in said


@on_a_gpu
def test_only_the_key_lets_it_pass():
    (said,) = mistakes(NGRAM)
    assert said.endswith("or set untested to true.")
    assert mistakes(NGRAM, untested=True) == []
    assert mistakes({**NGRAM, "num_tokens": 2}, {"model": "d"}, untested=True) == []


@pytest.mark.parametrize(("level", "said"), REFUSED.values(), ids=REFUSED)
@on_a_gpu
def test_what_the_key_does_not_let_pass(level, said):
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
        group = SimpleNamespace(kv_cache_spec=spec)
        level_checks.check_states(SimpleNamespace(kv_cache_groups=[group]))

    for kind in level_checks.STATES_PER_DRAFT:
        check(kind)
    for kind in ("MAMBA1", "LINEAR"):
        with pytest.raises(UserError, match=f"kind {kind}, whose recurrent state"):
            check(kind)


def configured(engine: dict) -> list[str]:
    """Warnings of vLLM's configuration, made as on a GPU."""
    with on_a_gpu, mock.patch.object(spec_config.logger, "warning_once") as warned:
        EngineArgs(**engine).create_engine_config()
    return [call.args[0] % call.args[1:] for call in warned.call_args_list]


def test_configurations_of_vllm(family, tmp_path):
    """Of a target without weights."""
    sizes = {**CONFIG, "vocab_size": family.vocabulary, "num_hidden_layers": 3}
    wide = {name: CONFIG["hidden_size"] for name in ("conv_dim", "block_dim", "conv_dim_out")}
    config = Lfm2Config(**sizes, **wide, layer_types=["conv", "full_attention", "conv"])
    config.architectures = ["Lfm2ForCausalLM"]
    config.save_pretrained(tmp_path)
    levels = [{**NGRAM, "num_tokens": 2}, {"model": family.mid}]
    cascade = {"method": "hsd", "num_speculative_tokens": 4, "levels": levels}
    engine = {"model": str(tmp_path), "skip_tokenizer_init": True, "max_model_len": 256}
    (error,) = configuration_errors([{**engine, "speculative_config": cascade}])
    assert "UserError: the target" in error and "\n" not in error
    verified = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    verified["rejection_sample_method"] = "hierarchical"
    assert configuration_errors([{**engine, "speculative_config": verified}]) == [error]
    engine["speculative_config"] = {**cascade, "untested": True}
    (said,) = in_process(configured, {"engine": engine})
    assert said.startswith("No cascade was ever tested on a target that keeps recurrent state, as")
