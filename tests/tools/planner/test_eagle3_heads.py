"""EAGLE-3 heads in a profile: their chances where a draft began, and served cascades predicted."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.damage import change_config, damaged_copy
from support.eagle3_head import roll_out, states, write_eagle3_head
from support.engines import started
from support.level_files import cascade
from support.marks import slow

from vllm_hsd.errors import UserError
from vllm_hsd.tools.planner.acceptance import measure_acceptance
from vllm_hsd.tools.planner.eagle3_head import HeadDrafter, load_head
from vllm_hsd.tools.planner.latencies import Latencies, LatencyTable
from vllm_hsd.tools.planner.models import ModelSet, probabilities
from vllm_hsd.tools.planner.predict import Measured, Selection, predict
from vllm_hsd.tools.planner.profile import Sampling
from vllm_hsd.tools.planner.survival import Acceptance
from vllm_hsd.tools.planner.task import Task, candidates

HEAD, MID, TARGET = range(3)
chances = partial(probabilities, Sampling())
# Where all distributions are flat, a head of seconds is right often enough.
WARM = 2.0


@pytest.fixture(scope="module")
def head(text_family, tmp_path_factory):
    """A head that drafts most of the target's tokens, some of them right."""
    directory = tmp_path_factory.mktemp("head")
    size = text_family.vocabulary
    return write_eagle3_head(text_family.target, directory, draft_vocabulary=size - 8, trained=True)


@pytest.fixture(scope="module")
def models(text_family, head):
    return ModelSet(text_family.target, candidates(models=[text_family.mid], eagle3=head))


def test_every_start_of_a_draft_has_its_own_chances(models, text_family):
    drafter = models.models[HEAD]
    tokens = torch.randint(3, text_family.vocabulary, (14,))
    found = drafter.log_probs(tokens[:5], tokens[5:], 4, chances)
    read = states(models.target, tokens[None])[0]
    ids = tokens.tolist()
    for start in range(5, 14):
        outputs = roll_out(
            drafter.head, drafter.embedding, read[: start - 1], ids[:start], ids[start : start + 3]
        )
        for step, output in enumerate(outputs):
            got = found[start - 5, step]
            if start + step >= 14:
                assert torch.isnan(got)
                continue
            with torch.no_grad():
                row = drafter.head.lm_head(output).softmax(-1)
            at = (drafter.head.draft_tokens == ids[start + step]).nonzero()
            want = float(row[at[0, 0]].log()) if len(at) else -np.inf
            assert float(got) == pytest.approx(want, abs=1e-4)
    logits = models.logits(tokens[None, :-1], 4, [HEAD])[HEAD][0]
    first = chances(logits).gather(-1, tokens[5:, None]).log()[:, 0]
    assert torch.allclose(first.double(), found[:, 0], atol=1e-4)


def test_a_text_of_one_token_has_nothing_to_draft_from(models):
    found = models.models[HEAD].log_probs(torch.tensor([5]), torch.tensor([7, 9]), 4, chances)
    assert float(found[0, 0]) == pytest.approx(-np.log(models.vocabulary), abs=1e-4)
    assert torch.isfinite(found[1, 0]) or found[1, 0] == -torch.inf


@pytest.fixture(scope="module")
def measured(models, text_family):
    rng = np.random.default_rng(0)
    contexts = [rng.integers(3, text_family.vocabulary, size=6).tolist() for _ in range(96)]
    task = Task(text_family.target, models.candidates, Sampling(temperature=WARM), 5, 48, 192)
    return measure_acceptance(models, contexts, task)


@pytest.mark.parametrize("verifier", ["block", *slow("standard")])
def test_tokens_per_step_are_predicted(measured, models, text_family, verifier):
    """Of an engine: the head alone, and below a model whose drafts the target verifies."""
    levels = [{**each.keys(), "num_tokens": 5} for each in models.candidates]
    arguments = {"model": text_family.target, **cascade(*levels, verifier=verifier)}
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, text_family.vocabulary, size=6).tolist() for _ in range(64)]
    # A seed would couple the drafts to the target's draws.
    params = {"max_tokens": 42, "ignore_eos": True, "temperature": WARM}
    table = LatencyTable(batch_sizes=[1], tokens=[1], ms=[[1.0]])
    acceptance = Acceptance(measured.tables[verifier])
    sets = Measured(Latencies(forward=[table] * 3), acceptance, reread=frozenset({HEAD}))
    nothing = np.where(np.arange(6) > 0, 0.0, acceptance.survival)
    with started(arguments) as engine:
        for selection in (Selection((HEAD,), (3,)), Selection((HEAD, MID), (2, 5))):
            engine.select_levels(selection.levels, selection.draft_lengths)
            found = engine.generate(prompts, params)
            # The prefill emits the first token.
            steps = np.array([len(each) - 1 for each in found.step_lengths])
            tokens, error = 41 / steps.mean(), 4 * (41 / steps).std() / 8
            predicted = predict(selection, sets, output_tokens=42)
            assert predicted.tokens_per_step == pytest.approx(tokens, abs=error)
            # A head or a model that is never right would miss it.
            none = predict(selection, replace(sets, acceptance=Acceptance(nothing)))
            assert abs(none.tokens_per_step - tokens) > error
            passes = found.levels[HEAD]["drafted"] / steps.sum()
            assert predicted.level_calls[0] == pytest.approx(passes, rel=0.05)


def test_a_head_reads_all_kept_tokens_once_more():
    """A head that is always right: 4 tokens a step, read in one call, and two calls more."""
    head = LatencyTable(batch_sizes=[1], tokens=[1, 11], ms=[[1.0, 11.0]])
    target = LatencyTable(batch_sizes=[1], tokens=[1], ms=[[20.0]])
    survival = np.ones((2, 2, 4, 4, 4))
    sets = Measured(Latencies(forward=[head, target]), Acceptance(survival))
    alone = Selection((0,), (3,))
    # The last drafted token and the bonus token are new to a model.
    assert predict(alone, sets).ms_per_step == pytest.approx(2 + 1 + 1 + 20)
    again = predict(alone, replace(sets, reread=frozenset({0})))
    assert again.ms_per_step == pytest.approx(4 + 1 + 1 + 20)


def test_a_published_head_without_norms_and_with_its_own_embedding(head, models, tmp_path):
    drafter = models.models[HEAD]
    published = damaged_copy(head, tmp_path / "head", change_config(fc_norm=False))
    weights = load_file(f"{head}/model.safetensors")
    for i in range(3):
        assert weights.pop(f"fc_norm.{i}.weight") is not None
    weights["embed_tokens.weight"] = drafter.embedding.bfloat16()
    weights = {k.replace("midlayer.", "layers.0."): v for k, v in weights.items()}
    weights["t2d"] = torch.ones(models.vocabulary, dtype=torch.bool)
    save_file(weights, f"{published}/model.safetensors")
    found = HeadDrafter(published, models.target)
    assert not found.head.shape.fc_norm
    assert torch.allclose(found.embedding, drafter.embedding, atol=0.02)
    assert found.head.draft_tokens.equal(drafter.head.draft_tokens)


@pytest.mark.parametrize(
    "nested",
    [
        {"eagle_aux_hidden_state_layer_ids": [0, 1, 9], "layer_ids": [2, 1, 0]},
        {"eagle_aux_hidden_state_layer_ids": [2, 1, 0]},
    ],
)
def test_layers_are_those_that_vllm_reads_in_the_order_in_which_they_run(
    head, models, tmp_path, nested
):
    change = change_config(eagle_aux_hidden_state_layer_ids=None, eagle_config=nested)
    found = load_head(damaged_copy(head, tmp_path / "head", change), models.target)
    assert found.shape.layers == (0, 1, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_before_residual": True}, "norm_before_residual=True, which .* does not compute"),
        ({"rope_parameters": {"rope_theta": 1.0, "rope_type": "llama3"}}, "has rope_scaling"),
        ({"architectures": ["Eagle3DeepseekForCausalLM"]}, "is no LlamaForCausalLMEagle3"),
        ({"hidden_size": 8}, "holds no readable head"),
        ({"vocab_size": 7}, "is for a vocabulary of 7 entries"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}, "layers \\[0, 1, 9\\], but the target"),
    ],
)
def test_other_heads_are_refused(head, models, tmp_path, change, message):
    other = damaged_copy(head, tmp_path / "head", change_config(**change))
    with pytest.raises(UserError, match=message):
        HeadDrafter(other, models.target)


def test_a_head_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="no file"):
        load_head(tmp_path / "none")
