"""A bigram level: true rows from counted pairs of tokens, backed off to single tokens.

row(prev) = (count(prev, .) + c * unigram) / (count(prev) + c), with c the number of distinct
followers of prev (Witten-Bell), so a token never seen before a break falls back to the unigram
row, which itself is smoothed by one over every token.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from zipfile import BadZipFile

import numpy as np
import scipy.sparse
import torch


@dataclass
class BigramTable:
    """Counts of a corpus.

    Attributes:
        pairs: [V, V] sparse int64 counts of (previous, next).
        unigram: [V] float64, sums to 1, positive everywhere.
    """

    pairs: scipy.sparse.csr_array
    unigram: np.ndarray

    @property
    def vocab_size(self) -> int:
        return len(self.unigram)

    def rows(self, previous: np.ndarray) -> np.ndarray:
        """[n, V] float64 laws of the token after each of [n] previous tokens."""
        starts, ends = self.pairs.indptr[previous], self.pairs.indptr[previous + 1]
        distinct = (ends - starts).astype(np.float64)
        weight = np.maximum(distinct, 1)
        totals = np.array([self.pairs.data[a:b].sum() for a, b in zip(starts, ends, strict=True)])
        rows = np.multiply.outer(weight / (totals + weight), self.unigram)
        for i, (a, b) in enumerate(zip(starts, ends, strict=True)):
            rows[i, self.pairs.indices[a:b]] += self.pairs.data[a:b] / (totals[i] + weight[i])
        return rows


def count_bigrams(documents: Iterable[np.ndarray], vocab_size: int) -> BigramTable:
    """Count the pairs of tokenised documents ([n] int arrays each).

    Raises:
        ValueError: a token outside the vocabulary, or no pair of tokens at all.
    """
    previous, following, single = [], [], np.ones(vocab_size)
    for document in documents:
        if len(document) and (document.min() < 0 or document.max() >= vocab_size):
            raise ValueError(
                f"documents: token {document.max()} lies outside the vocabulary of {vocab_size}."
            )
        previous.append(document[:-1])
        following.append(document[1:])
        single += np.bincount(document, minlength=vocab_size)
    if not sum(map(len, previous)):
        raise ValueError("documents: the corpus has no pair of tokens; give more text.")
    previous, following = np.concatenate(previous), np.concatenate(following)
    ones = np.ones(len(previous), dtype=np.int64)
    pairs = scipy.sparse.coo_array((ones, (previous, following)), shape=(vocab_size, vocab_size))
    return BigramTable(pairs.tocsr(), single / single.sum())


def write_bigram(table: BigramTable, path: str) -> None:
    """Store a table as a compressed .npz file."""
    pairs = table.pairs
    with open(path, "wb") as file:
        np.savez_compressed(
            file,
            data=pairs.data,
            indices=pairs.indices,
            indptr=pairs.indptr,
            unigram=table.unigram,
        )


@lru_cache(maxsize=4)
def read_bigram(path: str) -> BigramTable:
    """Read what `write_bigram` stored.

    Raises:
        ValueError: the file cannot be read or is not such a table.
    """
    try:
        with np.load(path) as stored:
            size = len(stored["unigram"])
            pairs = scipy.sparse.csr_array(
                (stored["data"], stored["indices"], stored["indptr"]), shape=(size, size)
            )
            return BigramTable(pairs, stored["unigram"])
    except OSError as error:
        raise ValueError(f"bigram: cannot read '{path}' ({error.strerror or error}).") from error
    except (KeyError, ValueError, TypeError, EOFError, BadZipFile, zlib.error) as error:
        raise ValueError(
            f"bigram: '{path}' is no bigram table; write one with `vllm-hsd bigram`."
        ) from error


class BigramLevel:
    """A level whose logits are the logarithms of a bigram table's rows."""

    keeps_cache = False

    def __init__(self, table: BigramTable) -> None:
        self.table = table

    def forward(
        self,
        tokens: np.ndarray,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        num_logits: np.ndarray,
    ) -> torch.Tensor | None:
        """See `cascade.Level.forward`."""
        owners = np.repeat(np.arange(len(rows)), num_logits)
        if not len(owners):
            return None
        back = np.arange(len(owners)) - np.repeat(np.cumsum(num_logits), num_logits)
        positions = (starts + counts)[owners] + back
        laws = self.table.rows(tokens[rows[owners], positions])
        return torch.from_numpy(laws).log().float()
