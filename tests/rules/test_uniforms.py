"""Philox4x32-10 against known answers, and the uniforms made from it."""

import numpy as np
import pytest

from vllm_hsd.rules.rng import host_uniforms, philox


def words(text: str) -> np.ndarray:
    return np.array([[int(word, 16)] for word in text.split()], dtype=np.uint32)


PI, KEY = "243f6a88 85a308d3 13198a2e", "a4093822 299f31d0"


# Random123, kat_vectors: philox4x32 10.
@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (f"{PI} 03707344", KEY, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers(counter, key, answer):
    assert (philox(words(key), words(counter)) == words(answer)).all()


def test_a_uniform_is_the_top_53_bits_of_its_block():
    seed, stream, draw = 0x299F31D0A4093822, 0x13198A2E, 0x85A308D3243F6A88 - 2**64
    uniform = host_uniforms(*map(np.int64, (seed, stream, draw)))
    first, second, *_ = philox(words(KEY), words(f"{PI} 0"))[:, 0].tolist()
    assert uniform.dtype == np.float64 and uniform.shape == ()
    assert float(uniform) == ((first >> 5) * 2**26 + (second >> 6)) / 2**53
    assert int(float(uniform) * 2**24) == first >> 8
