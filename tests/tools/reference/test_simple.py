"""The plain cascade of `tools.reference.simple` and the real one: equal uniforms, equal tokens."""

import numpy as np
import pytest
import torch
from oracle.exact import Table
from oracle.stand_ins import TableLevel

from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.rules.rng import host_uniforms
from vllm_hsd.tools.reference import ReferenceEngine
from vllm_hsd.tools.reference.simple import SimpleCascade

PROMPT, VOCABULARY, COUNT = [1, 2, 0], 5, 12


class CountedUniforms:
    """Those of a request of the reference engine: one counter for all models."""

    def __init__(self, seed: int, shift: int = 0):
        self.seed, self.drawn = seed, shift

    def __call__(self, model: int, count: int) -> list[float]:
        draws = np.arange(self.drawn, self.drawn + count)
        self.drawn += count
        return host_uniforms(np.array(self.seed), np.array(model), draws).tolist()


def table_model(table: Table):
    def model(text: list[int]) -> torch.Tensor:
        after = [tuple(text[len(PROMPT) : n]) for n in range(1, len(text) + 1)]
        rows = [[float(v) for v in table(start)] for start in after]
        return torch.tensor(rows, dtype=torch.float64)

    return model


def both(
    lengths: tuple[int, ...], seed: int, shift: int = 0, interleaved: frozenset[int] = frozenset()
) -> tuple[list[int], list[int]]:
    """Tokens of the real cascade and of the plain one."""
    tables = [Table(VOCABULARY, 10 + k) for k in range(len(lengths) + 1)]
    *levels, target = [TableLevel(table, len(PROMPT)) for table in tables]
    rules = ["none" if k in interleaved else "block" for k in range(len(lengths))]
    engine = ReferenceEngine(target, levels, list(map(LevelOptions, lengths, rules)))
    real = engine.generate(PROMPT, COUNT, seed=seed).token_ids
    uniforms = CountedUniforms(seed, shift)
    models = [table_model(table) for table in tables]
    plain = SimpleCascade(models, lengths, uniforms, interleaved)
    return real, plain.generate(PROMPT, COUNT)


@pytest.mark.parametrize(
    ("lengths", "interleaved"),
    [
        *(((n,), ()) for n in (1, 4)),
        ((3, 5), ()),
        ((1, 2, 6), ()),
        ((2, 3, 4, 5), ()),
        ((2, 8), (1,)),
        ((1, 3, 6), (1,)),
        ((1, 3, 7), (1, 2)),
        ((2, 3, 4, 9), (1, 3)),
    ],
)
def test_token_for_token(lengths, interleaved):
    for seed in range(30):
        real, plain = both(lengths, seed, interleaved=frozenset(interleaved))
        assert real == plain


def test_other_uniforms_give_other_tokens():
    """The negative control: the comparison sees a shift by one uniform."""
    assert any(real != plain for real, plain in (both((2, 4), seed, shift=1) for seed in range(5)))
