"""Members of a family: laws, early exits, drawn text, and families that cannot be."""

import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from vllm_hsd.errors import UserError
from vllm_hsd.planner.models import Family, Sampling


@pytest.fixture(scope="module")
def members(text_family):
    return Family(text_family.target, [text_family.small, text_family.mid], early_exits=[1])


def test_laws_are_softmax_then_top_p():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert torch.allclose(Sampling().laws(logits), logits.exp())
    warm = Sampling(temperature=2.0).laws(logits)
    assert torch.allclose(warm, logits.exp().sqrt() / logits.exp().sqrt().sum())
    # 0.5 + 0.3 hold less than 0.81: the third stays too.
    kept = Sampling(top_p=0.81).laws(logits)
    assert torch.allclose(kept, torch.tensor([[0.5, 0.3, 0.15, 0.0]]) / 0.95)
    assert torch.allclose(Sampling(top_p=0.1).laws(logits), torch.eye(4)[:1])
    assert torch.equal(Sampling(temperature=0).laws(logits), torch.eye(4)[:1])


def test_one_pass_over_the_target_gives_its_exits(members, text_family):
    tokens = torch.randint(3, text_family.vocabulary, (2, 20))
    found = members.logits(tokens, 5, range(4))
    assert [members.layers(member) for member in range(4)] == [None, None, 1, 2]
    for member, path in ((0, text_family.small), (1, text_family.mid), (3, text_family.target)):
        alone = AutoModelForCausalLM.from_pretrained(path)(input_ids=tokens).logits[:, 5:]
        assert torch.allclose(found[member], alone, atol=1e-5)
    exit_alone = members.members[2](input_ids=tokens).logits[:, 5:]
    assert torch.allclose(found[2], exit_alone, atol=1e-5)
    assert not torch.allclose(found[2], found[3], atol=0.1)
    assert members.size(2) < members.size(3)


def test_drawing_with_a_cache_and_padding_follows_the_law(members):
    """First tokens after two contexts of different lengths, by their frequencies."""
    contexts = [[5, 9, 30], [7, 7, 7, 80, 81, 12]]
    draws = 400
    generator = torch.Generator().manual_seed(0)
    tokens = members.draw(0, contexts * draws, 2, Sampling(temperature=0.7), generator).numpy()
    for row, context in enumerate(contexts):
        drawn = tokens[row::2]
        logits = members.logits(torch.tensor([context]), len(context) - 1, [0])[0][0, 0]
        law = Sampling(temperature=0.7).laws(logits).numpy()
        seen = np.bincount(drawn[:, 0], minlength=len(law)) / draws
        assert 0.5 * np.abs(seen - law).sum() < 0.3
        # The second token, given the most frequent first one.
        first = int(seen.argmax())
        extended = torch.tensor([[*context, first]])
        logits = members.logits(extended, len(context), [0])[0][0, 0]
        law = Sampling(temperature=0.7).laws(logits).numpy()
        follows = drawn[drawn[:, 0] == first, 1]
        likely = int(law.argmax())
        error = 4 * np.sqrt(0.25 / len(follows))
        assert (follows == likely).mean() == pytest.approx(law[likely], abs=error)


@pytest.mark.parametrize(
    ("candidates", "exits", "message"),
    [
        ([], [], "at least one candidate"),
        (["target"], [], "is among its own candidates"),
        (["small", "small"], [], "is given twice"),
        (["small"], [1, 1], "repeat themselves"),
        (["small"], [2], "has 2 layers, so give 1 to 1"),
        (["small"], [0], "early exit 0 does not exist"),
    ],
)
def test_families_that_cannot_be(text_family, candidates, exits, message):
    paths = [getattr(text_family, name) for name in candidates]
    with pytest.raises(UserError, match=message):
        Family(text_family.target, paths, exits)


def test_another_vocabulary(text_family, family, tmp_path):
    with pytest.raises(UserError, match=r"vocabulary of 64 entries .* must be the same"):
        Family(text_family.target, [family.small])
    other = tmp_path / "other"
    shutil.copytree(text_family.small, other)
    tokenizer = (other / "tokenizer.json").read_text()
    swapped = (
        tokenizer.replace('"a":', '"\x00":').replace('"b":', '"a":').replace('"\x00":', '"b":')
    )
    (other / "tokenizer.json").write_text(swapped)
    with pytest.raises(UserError, match="another vocabulary than the target"):
        Family(text_family.target, [str(other)])


def test_models_that_cannot_be_loaded(text_family, tmp_path):
    missing = str(tmp_path / "missing")
    with pytest.raises(UserError, match=r"model '.*missing' cannot be loaded \("):
        Family(missing, [text_family.small])
    with pytest.raises(UserError, match=r"model '.*missing' cannot be loaded \("):
        Family(text_family.target, [missing])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1}, "temperature is -1: it must be at least 0"),
        ({"top_p": 0}, "top_p is 0: it must be above 0 and at most 1"),
    ],
)
def test_impossible_sampling(arguments, message):
    with pytest.raises(UserError, match=message):
        Sampling(**arguments)
