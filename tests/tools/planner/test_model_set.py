"""A target and its candidates: probabilities, exits, tables, drawn text, refused inputs."""

import gc
import re
import shutil
import weakref

import numpy as np
import pytest
import torch
from support.architectures import write_models
from support.damage import change_file, damaged_copy
from transformers import AutoModelForCausalLM, Gemma3Config

from vllm_hsd.cascade.exit_head import ExitHead, read_exit_head, write_exit_head
from vllm_hsd.cascade.text_store import collect_texts, write_store
from vllm_hsd.errors import UserError
from vllm_hsd.tools.audit.tiny_models import CONFIG, byte_tokenizer
from vllm_hsd.tools.exit_head_training import plain_exit_head
from vllm_hsd.tools.planner.models import ModelSet, probabilities, truncated
from vllm_hsd.tools.planner.profile import Sampling
from vllm_hsd.tools.planner.task import candidates as make_candidates


@pytest.fixture(scope="module")
def models(text_family):
    """Small, mid, exit 1, target."""
    found = make_candidates(models=[text_family.small, text_family.mid], exits=[1])
    return ModelSet(text_family.target, found)


@pytest.fixture(scope="module")
def level_files(text_family, tmp_path_factory):
    """A store of texts and an exit head at layer 1 for the target."""
    directory = tmp_path_factory.mktemp("levels")
    rng = np.random.default_rng(0)
    size = text_family.vocabulary
    write_store(collect_texts([rng.integers(size, size=500)], size), str(directory / "pairs"))
    model = AutoModelForCausalLM.from_pretrained(text_family.target)
    weight = model.lm_head.weight.detach() + 0.1 * torch.randn(model.lm_head.weight.shape)
    norm = torch.rand(model.config.hidden_size)
    for layer, name in ((1, "head"), (0, "embedding")):
        write_exit_head(ExitHead(layer, norm, weight, 1e-5), directory / name)
    return directory


def test_probabilities_are_softmax_then_top_p():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert torch.allclose(probabilities(Sampling(), logits), logits.exp())
    warm = probabilities(Sampling(temperature=2.0), logits)
    assert torch.allclose(warm, logits.exp().sqrt() / logits.exp().sqrt().sum())
    # 0.5 + 0.3 hold less than 0.81: the third stays too.
    kept = probabilities(Sampling(top_p=0.81), logits)
    assert torch.allclose(kept, torch.tensor([[0.5, 0.3, 0.15, 0.0]]) / 0.95)
    assert torch.allclose(probabilities(Sampling(top_p=0.1), logits), torch.eye(4)[:1])
    assert torch.equal(probabilities(Sampling(temperature=0), logits), torch.eye(4)[:1])


def test_one_pass_over_the_target_gives_its_exits(models, text_family):
    tokens = torch.randint(3, text_family.vocabulary, (2, 20))
    found = models.logits(tokens, 5, range(4))
    assert [models.layers(model) for model in range(4)] == [None, None, 1, 2]
    for model, path in ((0, text_family.small), (1, text_family.mid), (3, text_family.target)):
        alone = AutoModelForCausalLM.from_pretrained(path)(input_ids=tokens).logits[:, 5:]
        assert torch.allclose(found[model], alone, atol=1e-5)
    exit_alone = models.models[2](input_ids=tokens).logits[:, 5:]
    assert torch.allclose(found[2], exit_alone, atol=1e-5)
    assert not torch.allclose(found[2], found[3], atol=0.1)


def test_drawing_with_a_cache_and_padding_follows_the_probabilities(models):
    """First tokens after two contexts of different lengths, by their frequencies."""
    contexts, cooler, draws = [[5, 9, 30], [7, 7, 7, 80, 81, 12]], Sampling(temperature=0.7), 400

    def after(text):
        logits = models.logits(torch.tensor([text]), len(text) - 1, [0])[0][0, 0]
        return probabilities(cooler, logits).numpy()

    generator = torch.Generator().manual_seed(0)
    tokens = models.draw(0, contexts * draws, 2, cooler, generator).numpy()
    for row, context in enumerate(contexts):
        drawn, probs = tokens[row::2], after(context)
        seen = np.bincount(drawn[:, 0], minlength=len(probs)) / draws
        assert 0.5 * np.abs(seen - probs).sum() < 0.3
        # The second token, given the most frequent first one.
        first = int(seen.argmax())
        probs = after([*context, first])
        follows = drawn[drawn[:, 0] == first, 1]
        likely = int(probs.argmax())
        error = 4 * np.sqrt(0.25 / len(follows))
        assert (follows == likely).mean() == pytest.approx(probs[likely], abs=error)


def assert_continued(found, models, model, contexts, tokens):
    """The logits are those of the model on each whole text."""
    for row, context in enumerate(contexts):
        whole = torch.tensor([[*context, *tokens[row, :-1]]])
        alone = models.logits(whole, len(context) - 1, [model])[model][0]
        assert torch.allclose(found[row], alone, atol=1e-4)


def test_contexts_of_one_text_are_continued_from_one_reading(models, text_family, monkeypatch):
    text = torch.randint(3, text_family.vocabulary, (30,)).tolist()
    contexts = [text[:n] for n in (30, 21, 8)] + [[5], [9, 5, 30, 7]]
    tokens = torch.randint(3, text_family.vocabulary, (len(contexts), 4))
    read = []
    for model in range(4):
        forward = models._forward
        models._texts.clear()
        monkeypatch.setattr(
            models, "_forward", lambda m, t, f=forward, **k: read.append(t.shape[1]) or f(m, t, **k)
        )
        found = models.continued(model, contexts, tokens)
        # Each text without its last token, then all contexts at once.
        assert read == [29, 1, 3, 4]
        monkeypatch.undo()
        read.clear()
        assert_continued(found, models, model, contexts, tokens)


def test_models_are_freed_for_the_engine_that_is_timed_next(text_family):
    """At once, not when garbage is collected."""
    models = ModelSet(text_family.target, make_candidates(models=[text_family.small]))
    models.draw(0, [[5, 9]], 2, Sampling(), torch.Generator().manual_seed(0))
    freed = weakref.ref(models.models[0])
    gc.disable()
    try:
        del models
        assert freed() is None
    finally:
        gc.enable()


def test_another_vocabulary(text_family, family, tmp_path):
    with pytest.raises(UserError, match=r"vocabulary of 64 entries .* must be the same"):
        ModelSet(text_family.target, make_candidates(models=[family.small]))
    new = {b'"a":': b'"b":', b'"b":': b'"a":'}
    swap = change_file(lambda t: re.sub(rb'"[ab]":', lambda m: new[m[0]], t), "tokenizer.json")
    other = damaged_copy(text_family.small, tmp_path / "other", swap)
    with pytest.raises(UserError, match="another vocabulary than the target"):
        ModelSet(text_family.target, make_candidates(models=[other]))


@pytest.mark.parametrize("name", ["Gemma2", "Granite"])
def test_exits_keep_soft_caps_and_scaling(name, tmp_path):
    target, _ = write_models(name, tmp_path)
    byte_tokenizer().save_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target)
    write_exit_head(plain_exit_head(model, 2), tmp_path / "head")
    found = make_candidates(exits=[1], exit_heads=[(str(tmp_path / "head"), 2)])
    models = ModelSet(target, found)
    tokens = torch.randint(3, 60, (2, 20))
    together = models.logits(tokens, 5, range(3))
    contexts = [row[:5] + row[:1] * n for n, row in enumerate(tokens.tolist())]
    for i in range(3):
        alone = models.logits(tokens, 5, [i])[i]
        assert torch.allclose(together[i], alone, atol=1e-4)
        # Beyond the window, where there is one.
        assert_continued(models.continued(i, contexts, tokens), models, i, contexts, tokens)
    assert torch.allclose(together[2], model(input_ids=tokens).logits[:, 5:], atol=1e-4)
    # The head's start is the plain exit of its layer, but for the cap.
    exits = truncated(model, 2)(input_ids=tokens).logits[:, 5:]
    cap = model.config.final_logit_softcapping if name == "Gemma2" else 1e6
    assert torch.allclose(torch.tanh(together[1] / cap) * cap, exits, atol=1e-2)


def test_weights_that_are_cut_off(text_family, tmp_path):
    cut = change_file(lambda weights: weights[:-100], "model.safetensors")
    target = damaged_copy(text_family.target, tmp_path / "target", cut)
    with pytest.raises(UserError, match=r"model '.*' cannot be loaded \("):
        ModelSet(target, make_candidates(models=[text_family.small]))


def test_a_tokenizer_of_a_later_release(text_family, tmp_path):
    later = change_file(lambda text: b'{"pre_tokenizer": {"type": "later"}}', "tokenizer.json")
    target = damaged_copy(text_family.target, tmp_path / "target", later)
    with pytest.raises(UserError, match=r"the tokenizer of '.*' cannot be loaded"):
        ModelSet(target, make_candidates(models=[text_family.small]))


def test_a_target_that_reads_pictures(tmp_path):
    text = {**CONFIG, "vocab_size": 64, "num_hidden_layers": 2}
    picture = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Gemma3Config(text_config=text, vision_config=picture)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "target")
    byte_tokenizer("abcdefgh").save_pretrained(tmp_path / "target")
    shutil.copytree(tmp_path / "target", tmp_path / "drafter")
    found = ModelSet(tmp_path / "target", make_candidates(models=[str(tmp_path / "drafter")]))
    assert (found.vocabulary, found.longest, found.layers(1)) == (64, 512, 2)
    drafted, verified = found.logits(torch.arange(3, 11)[None], 5, range(2)).values()
    assert torch.equal(drafted, verified)


def test_tables_heads_and_lookups_are_scored_without_further_passes(text_family, level_files):
    found = make_candidates(
        models=[text_family.small],
        exit_heads=[(str(level_files / "head"), 1)],
        bigram_model=str(level_files / "pairs"),
        ngram=3,
    )
    assert [c.name for c in found] == ["ngram 3", "bigram model", "small", "head"]
    models = ModelSet(text_family.target, found)
    assert models.with_probabilities == [1, 2, 3, 4]
    tokens = torch.randint(3, text_family.vocabulary, (2, 12))
    logits = models.logits(tokens, 4, models.with_probabilities)
    pairs = models.models[1].pairs
    rows = np.array([[pairs.distribution(t) for t in row[4:]] for row in tokens.numpy()])
    assert np.allclose(torch.softmax(logits[1], -1).numpy(), rows, atol=1e-6)
    target = AutoModelForCausalLM.from_pretrained(text_family.target)
    hidden = target(input_ids=tokens, output_hidden_states=True).hidden_states[1][:, 4:]
    head = read_exit_head(str(level_files / "head"))
    assert torch.allclose(logits[3], head.logits(hidden), atol=1e-4)
    alone = models.logits(tokens, 4, [3])[3]
    assert torch.allclose(logits[3], alone, atol=1e-4)
    assert models.drafters_for(3) == [0, 1, 2] and models.drafters_for(2) == [0, 1, 3]
    assert models.drafters_for(0) == models.drafters_for(1) == []
    drawn = models.draw(3, [[5, 9], [7, 8, 30]], 4, Sampling(), torch.Generator().manual_seed(0))
    assert drawn.shape == (2, 4)


def test_a_head_on_the_embedding_sees_the_last_token_alone(text_family, level_files):
    heads = [(str(level_files / "embedding"), 0), (str(level_files / "head"), 1)]
    models = ModelSet(text_family.target, make_candidates(exit_heads=heads))
    assert [models.layers(m) for m in range(3)] == [0, 1, 2]
    assert [models.drafters_for(m) for m in range(3)] == [[], [0], [0, 1]]
    tokens = torch.randint(3, text_family.vocabulary, (2, 12))
    rows = models.logits(tokens, 4, range(3))[0]
    assert torch.allclose(rows, models.logits(tokens, 4, [0])[0], atol=1e-4)
    assert torch.allclose(rows, models.logits(tokens[:, 4:], 0, [0])[0], atol=1e-4)
    drawn = models.draw(0, [[5, 9], [7, 8, 30]], 4, Sampling(), torch.Generator().manual_seed(0))
    assert drawn.shape == (2, 4)
