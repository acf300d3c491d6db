"""The EAGLE-3 recipe on a toy target: what it learns from, what it computes, what it saves."""

import pytest
import torch
import torch.nn.functional as F
from support.eagle3_head import roll_out
from transformers import AutoModelForCausalLM

from benchmarks.models.eagle3.batches import collate, epoch_batches, read_batch
from benchmarks.models.eagle3.chats import Chat
from benchmarks.models.eagle3.features import Shard, write_shard
from benchmarks.models.eagle3.loss import SoftCrossEntropy
from benchmarks.models.eagle3.start import warm_start
from benchmarks.models.eagle3.train import Recipe, Training, choose_draft_tokens

LAYERS = (1, 2)
RECIPE = Recipe(draft_vocab_size=40, layers=LAYERS, depth=3, unroll_every=2, batch_tokens=200)
PICKED = torch.tensor([0, 1])


@pytest.fixture(scope="module")
def target(family):
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(family.target, dtype=torch.float32)


@pytest.fixture(scope="module")
def shards(target, family, tmp_path_factory):
    directory = tmp_path_factory.mktemp("features")
    torch.manual_seed(3)
    chats = []
    for i in range(48):
        tokens = torch.randint(2, family.vocabulary, (12 + i % 7 * 5,)).tolist()
        chats.append(Chat(tuple(tokens[:6]), tuple(tokens[6:]), float(i % 2)))
    for name, part in (("0.safetensors", chats[:24]), ("1.safetensors", chats[24:])):
        write_shard(directory / name, target, part, LAYERS, 100)
    return directory


@pytest.fixture
def training(target, shards):
    names = sorted(p.name for p in shards.iterdir())
    tokens = choose_draft_tokens(shards, names, RECIPE.draft_vocab_size)
    training = Training(target, RECIPE, tokens, torch.float32)
    first = Shard(shards / names[0])
    warm_start(training.head, target, [first.chat(i) for i in range(24)], PICKED, torch.float32)
    training.average.load_state_dict(training.head.state_dict())
    return training


def test_every_step_of_the_training_time_test_is_that_of_drafting(training, shards):
    chat = Shard(shards / "0.safetensors").chat(6)
    batch = collate([chat])
    states = batch.states.float()
    with torch.no_grad():
        outputs = training.head(training.embedding[batch.tokens], states, 4)
    tokens = chat.tokens.tolist()
    for start in range(len(tokens) - 5):
        drafted = tokens[start + 2 : start + 5]
        wanted = roll_out(
            training.head, training.embedding, states[0, : start + 1], tokens[: start + 2], drafted
        )
        for j, want in enumerate(wanted):
            torch.testing.assert_close(outputs[j][0, start + j], want, atol=1e-4, rtol=1e-4)


def test_loss_and_gradient_are_those_of_plain_cross_entropy():
    torch.manual_seed(0)
    hidden = torch.randn(300, 16, requires_grad=True)
    matrix = torch.randn(40, 16)
    p = torch.randn(300, 50).softmax(-1)[:, :40]
    weights = torch.rand(300)
    SoftCrossEntropy.apply(hidden, matrix, p, weights).backward()
    found, hidden.grad = hidden.grad, None
    plain = -(weights[:, None] * p * F.log_softmax(hidden @ matrix.T, -1)).sum()
    plain.backward()
    torch.testing.assert_close(SoftCrossEntropy.apply(hidden, matrix, p, weights), plain)
    torch.testing.assert_close(found, hidden.grad, atol=1e-5, rtol=1e-4)


def steps(training, shards, first, last):
    batches = epoch_batches(shards, ["0.safetensors", "1.safetensors"], 7, 0, RECIPE.batch_tokens)
    return [training.update(read_batch(shards, batches[i]), PICKED) for i in range(first, last)]


def test_training_goes_on_bit_for_bit_where_it_stopped(training, target, shards, tmp_path):
    training.save(tmp_path / "state", {"batch": 0})
    again = Training(target, RECIPE, training.head.draft_tokens, torch.float32)
    again.load(tmp_path / "state")
    whole = steps(training, shards, 0, 6)
    parts = steps(again, shards, 0, 3)
    again.save(tmp_path / "state", {"batch": 3})
    third = Training(target, RECIPE, training.head.draft_tokens, torch.float32)
    assert third.load(tmp_path / "state")["batch"] == 3
    parts += steps(third, shards, 3, 6)
    assert whole == parts and [len(losses) for losses in whole] == [1, 1, 2, 2, 3, 3]
    for one, other in ((training.head, third.head), (training.average, third.average)):
        assert all(a.equal(b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not training.head.fc.weight.equal(training.average.fc.weight)
