"""Texts that suffix and bigram levels draft from, stored on disk as token ids.

A `.safetensors` file: `tokens` [N] int32, the texts one after another; `starts` [D + 1] int64, text
d is tokens[starts[d] : starts[d + 1]]; and the vocabulary's size as metadata. Orders and counts are
built when the file is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from vllm_hsd.checked_files import TensorHeader, read_tensors, written_whole
from vllm_hsd.errors import UserError, quoted

# 8 bytes a token while serving: 134 MB.
MAX_STORE_TOKENS = 1 << 24
MAX_VOCABULARY = 1 << 24
_NAMES = ("tokens", "starts")


@dataclass(frozen=True)
class TextStore:
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


def collect_texts(documents: Iterable[np.ndarray], vocab_size: int) -> TextStore:
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
    return TextStore(np.concatenate(texts), starts, vocab_size)


def write_store(store: TextStore, path: str) -> None:
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
    return _read(path, key, with_values=False)[0]


@lru_cache(maxsize=2)
def read_store(path: str, key: str = "store") -> TextStore:
    """Read what `write_store` stored; `key` is the user's name for it.

    Types, shapes and sizes are checked before memory is taken, every value after.

    Raises:
        UserError: the file cannot be read or is not such a store.
    """
    vocab_size, tensors = _read(path, key)
    store = TextStore(tensors["tokens"], tensors["starts"], vocab_size)
    starts = store.starts
    if starts[0] != 0 or starts[-1] != len(store.tokens) or (np.diff(starts) < 1).any():
        raise UserError(_blame(path, key, "'starts' does not split the tokens into texts"))
    if store.tokens.min() < 0 or store.tokens.max() >= vocab_size:
        raise UserError(_blame(path, key, "a token lies outside the vocabulary"))
    return store


def _read(path: str, key: str, with_values: bool = True) -> tuple[int, dict[str, Any]]:
    if not os.path.isfile(path):
        raise UserError(f"{key}: no file {quoted(path)}; `vllm-hsd build store` writes one.")
    blame = partial(_blame, path, key)
    return read_tensors(path, _NAMES, _check_header, blame, with_values=with_values)


def _blame(path: str, key: str, reason: str) -> str:
    return (
        f"{key}: {quoted(path)} is not a store of texts ({reason}); write one with "
        "`vllm-hsd build store`."
    )


def _check_header(header: TensorHeader) -> int:
    """The vocabulary's size."""
    vocab_size = header.number("vocab_size", 1, MAX_VOCABULARY)
    if header.types != {"tokens": "I32", "starts": "I64"}:
        raise ValueError("its tensors have other types")
    if any(len(shape) != 1 for shape in header.shapes.values()):
        raise ValueError("its tensors have other shapes")
    (tokens,), (starts,) = (header.shapes[name] for name in _NAMES)
    if not 1 <= tokens <= MAX_STORE_TOKENS:
        raise ValueError(f"it declares {tokens} tokens")
    if not 2 <= starts <= tokens + 1:
        raise ValueError(f"it declares {starts - 1} texts of {tokens} tokens")
    return vocab_size
