"""Drafters with fewer and with more rows of logits than the target, for one tokenizer."""

import pytest
from support.engines import run_engine
from support.level_files import cascade
from support.sampling_cases import CASES, SIGNIFICANCE, p_values, sampling_job
from support.tiny_models import resized
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

COMPARED = {name: CASES[name] for name in ("temperature 0.7", "top_p", "greedy")}
PROMPTS = [[(3 * i + j * j) % 5 for j in range(4 + 6 * i)] for i in range(4)]
GREEDY = {"prompts": PROMPTS, "params": {"temperature": 0, "max_tokens": 30, "ignore_eos": True}}


@pytest.fixture(scope="module")
def models(small_vocabulary, tmp_path_factory) -> dict[str, str]:
    scratch = tmp_path_factory.mktemp("padded")
    found = {
        "target": resized(small_vocabulary.target, scratch / "target", 5),
        "narrow": resized(small_vocabulary.small, scratch / "narrow", 4),
        "wide": resized(small_vocabulary.mid, scratch / "wide", 7),
    }
    # Four tokens, so that all of them pad.
    words = Tokenizer(WordLevel({word: i for i, word in enumerate("abcd")}, unk_token="a"))
    for path in found.values():
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a").save_pretrained(path)
    return found


@pytest.mark.parametrize("order", [("narrow", "wide"), ("wide", "narrow")])
def test_text_is_the_targets(models, order):
    lower, upper = (models[name] for name in order)
    engine = {"model": models["target"]}
    jobs = {"sampled": sampling_job(COMPARED, 400, 10), "greedy": GREEDY}
    levels = cascade({"model": lower, "num_tokens": 2}, {"model": upper})
    found = run_engine({**engine, **levels}, jobs)
    plain = run_engine(engine, {"greedy": GREEDY})
    assert found["greedy"]["outputs"] == plain["greedy"]["outputs"]
    # The token that the narrow drafter lacks occurs.
    assert any(4 in output[0]["ids"][:-1] for output in plain["greedy"]["outputs"])
    assert all(level["accepted"] > 0 for level in found["sampled"]["levels"])
    p = p_values(models["target"], COMPARED, found["sampled"])
    assert min(p.values()) > SIGNIFICANCE, p
