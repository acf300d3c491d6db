"""The reference engine on Hugging Face models: greedy decoding, caches, equal models, errors."""

import copy

import pytest
import torch
from support.tiny_models import tiny_llama
from transformers import T5Config, T5ForConditionalGeneration

from vllm_hsd.cascade.counters import Count
from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.cascade.text_store import collect_texts
from vllm_hsd.tools.planner.bigram_levels import BigramModelLevel
from vllm_hsd.tools.reference import HuggingFaceLevel, ReferenceEngine, TreeOptions

VOCABULARY, PROMPT, LENGTH = 24, [3, 5, 7, 11, 5, 3], 16


def noisy(model, noise: float):
    """A copy with noise on every weight: near enough to be accepted now and then."""
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in other.parameters():
            weight += noise * weight.std(unbiased=False) * torch.randn_like(weight)
    return other


def llama():
    return tiny_llama(VOCABULARY, eos_token_id=None)


def t5():
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
    ends = {"decoder_start_token_id": 0, "eos_token_id": None}
    config = T5Config(vocab_size=VOCABULARY, **sizes, **ends)
    model = T5ForConditionalGeneration(config).eval()
    # With random weights, the tied head repeats the last token for ever.
    model.lm_head = torch.nn.Linear(config.d_model, VOCABULARY, bias=False)
    torch.nn.init.normal_(model.lm_head.weight, std=1.0)
    return model


@pytest.fixture(scope="module", params=[llama, t5])
def models(request):
    """A target and two drafters."""
    target = request.param()
    return target, noisy(target, 0.15), noisy(target, 0.3)


def pair_model() -> BigramModelLevel:
    tokens = torch.randint(0, VOCABULARY, (200,), generator=torch.Generator().manual_seed(0))
    return BigramModelLevel(collect_texts([tokens.numpy()], VOCABULARY))


def engines(models, keeps_cache: bool = True) -> dict[str, ReferenceEngine]:
    target, mid, small = (HuggingFaceLevel(model, keeps_cache) for model in models)
    entropy = [LevelOptions(3, stopping="entropy"), LevelOptions(6, stopping="entropy")]
    return {
        "none": ReferenceEngine(target),
        "chain": ReferenceEngine(target, [mid], [LevelOptions(3)], verifier="standard"),
        "cascade": ReferenceEngine(
            target, [small, mid], [LevelOptions(2), LevelOptions(6)], horizontal_tokens=2
        ),
        "entropy": ReferenceEngine(target, [small, mid], entropy),
        "three levels": ReferenceEngine(
            target,
            [pair_model(), small, mid],
            [LevelOptions(1), LevelOptions(3), LevelOptions(6, max_rounds=2)],
        ),
        "three drafts": ReferenceEngine(target, [mid], draft_tree=TreeOptions((3, 1, 1))),
        "top-k tree": ReferenceEngine(target, [mid], draft_tree=TreeOptions((2, 2), draw="top_k")),
        "tree without replacement": ReferenceEngine(
            target, [mid], draft_tree=TreeOptions((2, 2), draw="without_replacement")
        ),
    }


NAMES = (
    *("none", "chain", "cascade", "entropy", "three levels", "three drafts", "top-k tree"),
    "tree without replacement",
)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_equals_generate_of_transformers(models, name):
    generated = models[0].generate(
        torch.tensor([PROMPT]), max_new_tokens=LENGTH, do_sample=False, use_cache=False
    )
    found = engines(models)[name].generate(PROMPT, LENGTH, temperature=0)
    assert found.token_ids == generated[0, -LENGTH:].tolist()
    assert found.block_efficiency == LENGTH / found.target_calls


@pytest.mark.parametrize("name", NAMES)
def test_with_and_without_cache_the_tokens_are_equal(models, name):
    """After every rejection the caches of all models are valid."""
    cached, recomputed = engines(models)[name], engines(models, keeps_cache=False)[name]
    drafted = accepted = 0
    for seed in range(3):
        one, other = (engine.generate(PROMPT, LENGTH, seed=seed) for engine in (cached, recomputed))
        assert one.token_ids == other.token_ids
        drafted, accepted = drafted + one.drafted, accepted + one.accepted
    assert name == "none" or 0 < accepted < drafted


@pytest.mark.parametrize("sampling", [{}, {"top_k": 5}, {"top_p": 0.8, "temperature": 1.3}])
def test_equal_models_accept_everything(models, sampling):
    target, first, second = (HuggingFaceLevel(models[0]) for _ in range(3))
    engine = ReferenceEngine(
        target, [first, second], [LevelOptions(2), LevelOptions(5)], horizontal_tokens=1
    )
    generation = engine.generate(PROMPT, LENGTH, **sampling)
    assert generation.accepted == generation.drafted > 0
    assert (
        generation.counts.rows[:, Count.accepted] == generation.counts.rows[:, Count.drafted]
    ).all()


def test_generation_ends_with_eos(models):
    engine = engines(models)["cascade"]
    free = engine.generate(PROMPT, LENGTH, temperature=0).token_ids
    eos = free[LENGTH // 2]
    ended = engine.generate(PROMPT, LENGTH, temperature=0, eos_token_id=eos).token_ids
    assert ended == free[: free.index(eos) + 1]
