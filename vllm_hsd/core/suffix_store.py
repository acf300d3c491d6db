"""Texts that a suffix level looks in, stored on disk as token ids.

A `.safetensors` file: `tokens` [N] int32, the texts one after another; `starts` [D + 1] int64, text
d is tokens[starts[d] : starts[d + 1]]; and the vocabulary's size as metadata. The trees are built
when the file is loaded, about a million tokens a second.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from vllm_hsd.checked_files import written_whole
from vllm_hsd.errors import UserError, brief, quoted

# A tree takes about 320 bytes a token: 5 GiB.
MAX_STORE_TOKENS = 1 << 24
MAX_VOCABULARY = 1 << 24


@dataclass(frozen=True)
class SuffixStore:
    """Token ids of texts.

    Attributes:
        tokens: [N] int32.
        starts: [D + 1] int64.
        vocab_size: all tokens are below it.
    """

    tokens: np.ndarray
    starts: np.ndarray
    vocab_size: int

    def __iter__(self) -> Iterator[np.ndarray]:
        """The texts, [n] int32 each."""
        for begin, end in zip(self.starts[:-1], self.starts[1:], strict=True):
            yield self.tokens[begin:end]


def collect_texts(documents: Iterable[np.ndarray], vocab_size: int) -> SuffixStore:
    """A store of tokenized documents ([n] int arrays each); empty ones are left out.

    Raises:
        UserError: a token outside the vocabulary, no token at all, or too many.
    """
    texts, total = [], 0
    for document in documents:
        if not len(document):
            continue
        low, high = int(document.min()), int(document.max())
        if low < 0 or high >= vocab_size:
            raise UserError(
                f"token {low if low < 0 else high} lies outside the vocabulary of {vocab_size}: "
                "use the target's tokenizer."
            )
        total += len(document)
        if total > MAX_STORE_TOKENS:
            raise UserError(
                f"the texts have more than {MAX_STORE_TOKENS} tokens, the most that a store holds: "
                "give fewer."
            )
        texts.append(document.astype(np.int32))
    if not texts:
        raise UserError("the texts have no token: give more text.")
    starts = np.append(0, np.cumsum([len(text) for text in texts])).astype(np.int64)
    return SuffixStore(np.concatenate(texts), starts, vocab_size)


def write_store(store: SuffixStore, path: str) -> None:
    """Store token ids as a .safetensors file, whole or not at all.

    Raises:
        UserError: the file cannot be written.
    """
    with written_whole(path) as unfinished:
        save_file(
            {"tokens": store.tokens, "starts": store.starts},
            unfinished,
            metadata={"vocab_size": str(store.vocab_size)},
        )


def store_vocab_size(path: str, key: str = "store") -> int:
    """Size of a store's vocabulary, from the header alone; `key` is the user's name for it.

    Raises:
        UserError: the file cannot be read or is not such a store.
    """
    with _opened(path, key) as stored:
        return _check_header(stored)


@lru_cache(maxsize=2)
def read_store(path: str, key: str = "store") -> SuffixStore:
    """Read what `write_store` stored; `key` is the user's name for it.

    Types, shapes and sizes are checked before memory is taken, every value after.

    Raises:
        UserError: the file cannot be read or is not such a store.
    """
    with _opened(path, key) as stored:
        vocab_size = _check_header(stored)
        store = SuffixStore(stored.get_tensor("tokens"), stored.get_tensor("starts"), vocab_size)
        starts = store.starts
        if starts[0] != 0 or starts[-1] != len(store.tokens) or (np.diff(starts) < 1).any():
            raise ValueError("'starts' does not split the tokens into texts")
        if store.tokens.min() < 0 or store.tokens.max() >= vocab_size:
            raise ValueError("a token lies outside the vocabulary")
        return store


@contextmanager
def _opened(path: str, key: str) -> Iterator[Any]:
    """The open store; whatever goes wrong while it is open is a fault of the file."""
    if not os.path.isfile(path):
        raise UserError(f"{key}: no file {quoted(path)}; `vllm-hsd build suffix` writes one.")
    try:
        with safe_open(path, framework="np") as stored:
            yield stored
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{key}: {quoted(path)} is not a store of texts ({brief(error)}); write one with "
            "`vllm-hsd build suffix`."
        ) from error


def _check_header(stored: Any) -> int:
    """Check everything about an open file except its values; returns the vocabulary's size."""
    facts = stored.metadata() or {}
    if "vocab_size" not in facts or set(stored.keys()) != {"tokens", "starts"}:
        raise ValueError("it holds other tensors or no metadata")
    digits = facts["vocab_size"]
    if not (digits.isascii() and digits.isdigit() and len(digits) < 10):
        raise ValueError("its vocab_size is not a number")
    vocab_size = int(digits)
    if not 1 <= vocab_size <= MAX_VOCABULARY:
        raise ValueError(f"its vocab_size is not between 1 and {MAX_VOCABULARY}")
    tokens, starts = stored.get_slice("tokens"), stored.get_slice("starts")
    if tokens.get_dtype() != "I32" or starts.get_dtype() != "I64":
        raise ValueError("its tensors have other types")
    lengths = [tuple(tensor.get_shape()) for tensor in (tokens, starts)]
    if any(len(shape) != 1 for shape in lengths):
        raise ValueError("its tensors have other shapes")
    if not 1 <= lengths[0][0] <= MAX_STORE_TOKENS:
        raise ValueError(f"it declares {lengths[0][0]} tokens")
    if not 2 <= lengths[1][0] <= lengths[0][0] + 1:
        raise ValueError(f"it declares {lengths[1][0] - 1} texts of {lengths[0][0]} tokens")
    return vocab_size
