"""The reference engine on Hugging Face models: greedy decoding, caches, equal models, errors."""

import copy

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from vllm_hsd.cascade.counters import Count
from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.cascade.text_store import collect_texts
from vllm_hsd.tools.audit.tiny_models import tiny_llama
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


TARGET, MID, SMALL, PAIRS = range(4)
# Levels below the target, and what else an engine is made with.
ENGINES = {
    "none": ([], {}),
    "chain": ([MID], {"options": [LevelOptions(3)], "verifier": "standard"}),
    "cascade": (
        [SMALL, MID],
        {"options": [LevelOptions(2), LevelOptions(6)], "horizontal_tokens": 2},
    ),
    "entropy": ([SMALL, MID], {"options": [LevelOptions(n, stopping="entropy") for n in (3, 6)]}),
    "three levels": (
        [PAIRS, SMALL, MID],
        {"options": [LevelOptions(1), LevelOptions(3), LevelOptions(6, max_rounds=2)]},
    ),
    "three drafts": ([MID], {"draft_tree": TreeOptions((3, 1, 1))}),
    "top-k tree": ([MID], {"draft_tree": TreeOptions((2, 2), "top_k")}),
    "tree without replacement": ([MID], {"draft_tree": TreeOptions((2, 2), "without_replacement")}),
}


def engine_of(models, name: str, keeps_cache: bool = True) -> ReferenceEngine:
    text = torch.randint(0, VOCABULARY, (200,), generator=torch.Generator().manual_seed(0))
    pairs = BigramModelLevel(collect_texts([text.numpy()], VOCABULARY))
    levels = [*(HuggingFaceLevel(model, keeps_cache) for model in models), pairs]
    below, options = ENGINES[name]
    return ReferenceEngine(levels[TARGET], [levels[i] for i in below], **options)


@pytest.mark.parametrize("name", ENGINES)
def test_greedy_equals_generate_of_transformers(models, name):
    generated = models[0].generate(
        torch.tensor([PROMPT]), max_new_tokens=LENGTH, do_sample=False, use_cache=False
    )
    found = engine_of(models, name).generate(PROMPT, LENGTH, temperature=0)
    assert found.token_ids == generated[0, -LENGTH:].tolist()
    assert found.block_efficiency == LENGTH / found.target_calls


@pytest.mark.parametrize("name", ENGINES)
def test_with_and_without_cache_the_tokens_are_equal(models, name):
    """After every rejection the caches of all models are valid."""
    cached, recomputed = engine_of(models, name), engine_of(models, name, keeps_cache=False)
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
    counts = generation.counts.rows
    assert (counts[:, Count.accepted] == counts[:, Count.drafted]).all()
