"""Cascades against their target: each fault is one sentence, before any model is loaded."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from support.cascades import head, target_of
from support.damage import change_config, damaged_copy
from support.engines import configuration_errors

from vllm_hsd.cascade.exit_head import ExitHead, write_exit_head
from vllm_hsd.cascade.text_store import collect_texts, write_store


def hsd(*levels, **keys) -> dict:
    return {"method": "hsd", "num_speculative_tokens": 6, "levels": list(levels), **keys}


def with_config(source: str, target: Path, **changes) -> str:
    return damaged_copy(source, target, change_config(**changes))


@pytest.fixture(scope="module")
def engine_faults(family, text_family, small_vocabulary, tmp_path_factory):
    """(arguments of the engine, what the message must say) of every fault."""
    scratch = tmp_path_factory.mktemp("faults")
    padded = with_config(text_family.target, scratch / "padded", vocab_size=512)
    renamed = scratch / "renamed"
    shutil.copytree(text_family.small, renamed)
    tokenizer = (renamed / "tokenizer.json").read_text()
    (renamed / "tokenizer.json").write_text(
        tokenizer.replace('"A":', '"A\\u0001":').replace('"B":', '"A":').replace("A\\u0001", "B")
    )

    def of_kind(kind: str, source: str, **keys) -> str:
        keys |= {"model_type": kind, "architectures": [f"{kind.capitalize()}ForCausalLM"]}
        return with_config(source, scratch / kind, **keys)

    gemma, mtp, eagle3 = of_kind("gemma", family.target), target_of("mtp", family), head(family)
    whisper = str(scratch / "whisper")
    named = {"architectures": ["WhisperForConditionalGeneration"], "bos_token_id": 1}
    ends = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1}
    transformers.WhisperConfig(vocab_size=64, **named, **ends).save_pretrained(whisper)
    parallel = with_config(eagle3, scratch / "parallel", ptd_token_id=3)
    another = with_config(eagle3, scratch / "another", vocab_size=60)
    store, short, cut = (str(scratch / name) for name in ("store", "short", "cut"))
    write_store(collect_texts([np.arange(5)], vocab_size=5), store)
    write_store(collect_texts([np.array([1]), np.array([2])], vocab_size=64), short)
    Path(cut).write_bytes(Path(store).read_bytes()[:100])
    for layer, hidden in ((1, 64), (9, 64), (1, 32)):
        own = ExitHead(layer, torch.ones(hidden), torch.ones(64, hidden), 1e-6)
        write_exit_head(own, scratch / "heads" / f"layer-{layer}-of-{hidden}")

    def exit_head(name: str) -> dict:
        return {"exit_head": str(scratch / "heads" / name)}

    def on(target: str, *levels, engine=(), **keys) -> dict:
        return {"model": target, "speculative_config": hsd(*levels, **keys), **dict(engine)}

    def target(*levels, **keys) -> dict:
        return on(family.target, *levels, **keys)

    def named(level: dict, said: str) -> str:
        return rf"levels\[0\]\.{next(iter(level))}{said}"

    # A level alone, and what the message must say after its name and kind.
    alone = [
        ({"model": "/nowhere/model"}, ".*/nowhere/model"),
        (
            {"model": small_vocabulary.mid},
            ".*5 tokens.*64, and there are not two tokenizers.*vocab_size 64",
        ),
        ({"model": of_kind("mamba", family.small)}, ".*recurrent"),
        ({"model": whisper}, ".* has an encoder"),
        ({"model": eagle3}, " '.*' is a drafter of method 'eagle3' to vLLM: give it as such"),
        ({"mtp": {}}, ": '.*' has nothing that vLLM runs as method 'mtp'"),
        ({"early_exit": 9}, " is 9.*2 layers: lower it"),
        ({"bigram": store}, ": '.*' was built for 5 tokens .* 64: build it with"),
        ({"bigram": cut}, ": '.*' is not a store of texts .* `vllm-hsd build store`"),
        ({"bigram": "/nowhere.npz"}, r".*/nowhere\.npz"),
        ({"bigram_model": store}, ": '.*' was built for 5 tokens .* 64: build it with"),
        ({"bigram_model": short}, ": '.*' has no text of two tokens: build it"),
        (exit_head("layer-9-of-64"), ": '.*' sits on layer 9, but the target has 2: train it"),
        (exit_head("layer-1-of-32"), r": '.*' has the shape \(64, 32\) .* \(64, 64\): train it"),
        (exit_head(""), ": '.*' holds no readable .* layer-K"),
        ({"exit_head": "/nowhere"}, ".*/nowhere"),
        ({"eagle3": another}, " '.*' has a vocabulary of 60 tokens and the target .* 64: use"),
        ({"eagle3": parallel}, " '.*' drafts all tokens in parallel.*: use"),
        ({"eagle3": "/nowhere"}, ": no dir.*/nowhere"),
    ]
    experts = of_kind("mixtral", family.target, num_local_experts=4)
    text = {"skip_tokenizer_init": False}
    differs = r"levels\[0\]\.model.*another tokenizer.*token \d+ is '.' in one and '.' in the other"
    return [
        *((target(level), named(level, said)) for level, said in alone),
        (on(padded, {"model": str(renamed)}), differs),
        (on(text_family.target, {"model": str(renamed)}, engine=text), differs),
        (
            target({"model": family.mid, "draft_tensor_parallel_size": 2}),
            r"levels\[0\]\.draft_tensor_parallel_size is 2.*1",
        ),
        (target({"model": family.mid, "quantization": "no-such"}), r"levels\[0\].*quantization"),
        (
            on(experts, {"early_exit": 1}, engine={"data_parallel_size": 2}),
            "set data_parallel_size to 1",
        ),
        (
            target({"model": family.mid}, engine={"pipeline_parallel_size": 2}),
            "pipeline_parallel_size",
        ),
        (
            target({"ngram": {"max": 2}}, engine={"runner": "pooling"}),
            "runner 'pooling' generates no tokens .*: remove the speculative configuration",
        ),
        (
            target({"mtp": {}, "num_tokens": 2}, {"model": family.mid}),
            r"levels\[0\]\.mtp drafts in the only level, alone or after lookups; .*: keep it there",
        ),
        (
            on(mtp, {"mtp": {}}, adaptive=True),
            r"adaptive has no meaning with levels\[0\]\.mtp, .*: remove it\.$",
        ),
        (
            on(mtp, {"mtp": {}}, disable_by_batch_size=4, engine={"data_parallel_size": 2}),
            "disable_by_batch_size does not run data-parallel .*: remove it, or set",
        ),
        (
            on(mtp, {"mtp": {}, "max_model_len": 64}),
            r"levels\[0\]\.max_model_len has no meaning with levels\[0\]\.mtp, .*: remove it\.$",
        ),
        (
            target(
                {"ngram": {}, "num_tokens": 2},
                {"model": family.small},
                adaptive=True,
                horizontal_tokens=2,
            ),
            r"horizontal_tokens follow a top level .* 'adaptive' .*: remove one of them\.$",
        ),
        *(
            (on(gemma, level), named(level, " works with the .*, not GemmaForCausalLM: use"))
            for level in ({"early_exit": 1}, exit_head("layer-1-of-64"))
        ),
        (
            target({"early_exit": 2, "num_tokens": 2}, {"early_exit": 1}),
            r"levels\[1\]\.early_exit runs 1 layers .* levels\[0\]\.early_exit, which runs 2: ",
        ),
        (
            target(
                {"early_exit": 1, "num_tokens": 2},
                {"model": family.small, "num_tokens": 3},
                exit_head("layer-1-of-64"),
            ),
            r"levels\[2\]\.exit_head runs 1 layers .* levels\[0\]\.early_exit, which runs 1: ",
        ),
    ]


def test_a_fault_names_the_level_and_the_fix(engine_faults):
    wrong = []
    errors = configuration_errors([engine for engine, _ in engine_faults])
    for message, (_, said) in zip(errors, engine_faults, strict=True):
        sentence = message and message.startswith("UserError: ") and "\n" not in message
        if not sentence or not re.search(said, message):
            wrong.append((said, message))
    assert wrong == []


def test_a_drafter_may_have_fewer_rows_of_padding(text_family, tmp_path):
    """As the smaller of Qwen's models have."""
    target = with_config(text_family.target, tmp_path / "152064", vocab_size=152064)
    drafter = with_config(text_family.small, tmp_path / "151936", vocab_size=151936)
    engine = {"model": target, "speculative_config": hsd({"model": drafter})}
    assert configuration_errors([engine]) == [None]
