"""A bigram level: probabilities from counted pairs of tokens, backed off to single tokens.

P(next | prev) = (count(prev, next) + c * unigram(next)) / (count(prev) + c), with c the number of
distinct followers of prev (Witten and Bell, "The zero-frequency problem", 1991, method C). A token
never seen as `prev` falls back to the unigram distribution, itself smoothed by one per token.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import IO

import numpy as np
import torch

from vllm_hsd.checked_files import written_whole
from vllm_hsd.core.drafts import last_positions, ragged_arange
from vllm_hsd.core.levels import UNLIMITED
from vllm_hsd.errors import UserError, brief, quoted

MAX_VOCABULARY = 1 << 24
MAX_PAIRS = 1 << 27
# Tables compress by a factor of 5 to 20; only a file made to fill memory exceeds this one.
MAX_EXPANSION = 100
# Counts are summed in int64 and divided in float64: both are exact up to here.
MAX_COUNT = 1 << 53


@dataclass
class BigramTable:
    """Counts of a corpus, the pairs as a sparse matrix by rows (CSR).

    Attributes:
        starts: [V + 1] int; the pairs that begin with token v are starts[v] to starts[v + 1] - 1.
        following: [P] int, the second token of every pair, increasing for each first token.
        counts: [P] int64, how often each pair occurs, at least 1.
        unigram: [V] float64, sums to 1, positive everywhere.
    """

    starts: np.ndarray
    following: np.ndarray
    counts: np.ndarray
    unigram: np.ndarray

    @property
    def vocab_size(self) -> int:
        """V."""
        return len(self.unigram)

    @cached_property
    def totals(self) -> np.ndarray:
        """[V] int64, how many pairs begin with each token."""
        return np.diff(np.append(0, np.cumsum(self.counts))[self.starts])

    def rows(self, previous: np.ndarray) -> np.ndarray:
        """[n, V] float64 distributions of the token after each of [n] previous tokens."""
        starts = self.starts[previous]
        distinct = self.starts[previous + 1] - starts
        weight = np.maximum(distinct, 1).astype(np.float64)
        norm = self.totals[previous] + weight
        rows = np.multiply.outer(weight / norm, self.unigram)
        owners, offsets = ragged_arange(distinct)
        pairs = starts[owners] + offsets
        rows[owners, self.following[pairs]] += self.counts[pairs] / norm[owners]
        return rows

    def successors(self) -> np.ndarray:
        """[V] int32, the likeliest token after each token, -1 after one without a pair."""
        sizes = np.diff(self.starts)
        pairs = np.repeat(np.arange(self.vocab_size), sizes)
        # `rows` without the common divisor; a token without a pair is the likeliest one at most
        # where many different ones were seen.
        value = self.counts + sizes[pairs] * self.unigram[self.following]
        order = np.lexsort((-self.following, value, pairs))
        last = np.cumsum(sizes)[sizes > 0] - 1
        best = order[last]
        common = int(self.unigram.argmax())
        found = np.full(self.vocab_size, -1, np.int32)
        outweighed = sizes[pairs[best]] * self.unigram[common] > value[best]
        found[pairs[best]] = np.where(outweighed, common, self.following[best])
        return found


def count_bigrams(documents: Iterable[np.ndarray], vocab_size: int) -> BigramTable:
    """Count the pairs of tokenized documents ([n] int arrays each).

    Raises:
        UserError: a token outside the vocabulary, or no pair of tokens at all.
    """
    pairs, single = [], np.ones(vocab_size)
    for document in documents:
        if len(document) and (document.min() < 0 or document.max() >= vocab_size):
            raise UserError(
                f"token {document.max()} lies outside the vocabulary of {vocab_size}: use the "
                "target's tokenizer."
            )
        pairs.append(document[:-1].astype(np.int64) * vocab_size + document[1:])
        single += np.bincount(document, minlength=vocab_size)
    if not sum(map(len, pairs)):
        raise UserError("the texts have no pair of tokens: give more text.")
    distinct, counts = np.unique(np.concatenate(pairs), return_counts=True)
    previous, following = np.divmod(distinct, vocab_size)
    starts = np.searchsorted(previous, np.arange(vocab_size + 1))
    return BigramTable(starts, following, counts, single / single.sum())


def write_bigram(table: BigramTable, path: str) -> None:
    """Store a table as a compressed .npz file, whole or not at all.

    Raises:
        UserError: the file cannot be written.
    """
    with written_whole(path) as unfinished, unfinished.open("wb") as file:
        np.savez_compressed(
            file,
            data=table.counts,
            indices=table.following,
            indptr=table.starts,
            unigram=table.unigram,
        )


def bigram_vocab_size(path: str) -> int:
    """V of a stored table, from the headers alone.

    Raises:
        UserError: the file cannot be read or is not such a table.
    """
    with _opened(path) as archive:
        return _check_headers(archive)


@lru_cache(maxsize=4)
def read_bigram(path: str) -> BigramTable:
    """Read what `write_bigram` stored.

    Types, shapes and sizes are checked before memory is taken, every value after.

    Raises:
        UserError: the file cannot be read or is not such a table.
    """
    with _opened(path) as archive:
        _check_headers(archive)
        table = BigramTable(
            starts=_read_array(archive, "indptr"),
            following=_read_array(archive, "indices"),
            counts=_read_array(archive, "data"),
            unigram=_read_array(archive, "unigram"),
        )
        _check_values(table)
    return table


class _NotATableError(ValueError):
    """What is wrong with a file, in a few words."""


def _require(condition: bool | np.bool_, reason: str) -> None:
    if not condition:
        raise _NotATableError(reason)


@contextmanager
def _opened(path: str) -> Iterator[zipfile.ZipFile]:
    """The archive at `path`; whatever goes wrong while it is open is a fault of the file."""
    if not os.path.isfile(path):
        raise UserError(f"bigram: no file {quoted(path)}; `vllm-hsd build bigram` writes one.")
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except OSError as error:
        raise UserError(
            f"bigram: cannot read {quoted(path)} ({error.strerror or error})."
        ) from error
    except Exception as error:  # zipfile, zlib and numpy raise many kinds on damaged bytes
        known = isinstance(error, _NotATableError)
        reason = str(error) if known else "damaged or of another format"
        raise UserError(
            f"bigram: {quoted(path)} is not a bigram table ({reason}); write one with "
            "`vllm-hsd build bigram`."
        ) from error


_DTYPES = {
    "data": (np.dtype(np.int64),),
    "indices": (np.dtype(np.int32), np.dtype(np.int64)),
    "indptr": (np.dtype(np.int32), np.dtype(np.int64)),
    "unigram": (np.dtype(np.float64),),
}


def _check_headers(archive: zipfile.ZipFile) -> int:
    """Check types, shapes and sizes without reading any array; returns V."""
    names = sorted(archive.namelist())
    _require(names == [f"{name}.npy" for name in _DTYPES], "it holds other arrays")
    length, expanded = {}, 0
    for name, dtypes in _DTYPES.items():
        member = archive.getinfo(f"{name}.npy")
        # Other methods expand without a bound that zipfile could set.
        _require(member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED), "compression")
        with archive.open(member) as file:
            shape, dtype = _read_header(file)
            header = file.tell()
        _require(dtype in dtypes, f"'{name}' has the type {brief(dtype, 40)}")
        _require(len(shape) == 1, f"'{name}' has {len(shape)} dimensions")
        length[name] = shape[0]
        longest = MAX_PAIRS if name in ("data", "indices") else MAX_VOCABULARY + 1
        _require(1 <= length[name] <= longest, f"'{name}' declares {quoted(length[name])} entries")
        declared = header + length[name] * dtype.itemsize
        _require(member.file_size == declared, f"'{name}' has another size than it declares")
        expanded += declared
    limit = MAX_EXPANSION * os.path.getsize(str(archive.filename)) + (64 << 20)
    _require(expanded <= limit, f"it expands to {expanded} bytes")
    _require(length["data"] == length["indices"], "'data' and 'indices' differ in length")
    _require(length["indptr"] == length["unigram"] + 1, "'indptr' and 'unigram' do not fit")
    return length["unigram"]


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(file)
    _require(version == (1, 0), "arrays of another version")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    return shape, dtype


def _read_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(f"{name}.npy") as file:
        (length,), dtype = _read_header(file)
        # No more than declared is ever decompressed, and nothing is unpickled.
        return np.frombuffer(file.read(length * dtype.itemsize), dtype)


def _check_values(table: BigramTable) -> None:
    size, pairs = table.vocab_size, len(table.counts)
    ends = table.starts
    _require(ends[0] == 0 and ends[-1] == pairs, "'indptr' does not span the pairs")
    _require((np.diff(ends) >= 0).all(), "'indptr' decreases")
    following = table.following
    _require(following.min() >= 0 and following.max() < size, "'indices' leave the vocabulary")
    increases = np.diff(following) > 0
    boundary = ends[(ends > 0) & (ends < pairs)]
    increases[boundary - 1] = True
    _require(increases.all(), "'indices' repeat or decrease within a row")
    counts = table.counts
    _require(counts.min() >= 1, "'data' holds a count below 1")
    _require(counts.sum(dtype=np.float64) < MAX_COUNT, "'data' holds too large counts")
    unigram = table.unigram
    _require(np.isfinite(unigram).all(), "'unigram' holds a value that is not finite")
    _require(unigram.min() > 0, "'unigram' holds a value that is not positive")
    _require(abs(unigram.sum() - 1) < 1e-6, "'unigram' does not sum to 1")


class BigramLevel:
    """A level whose logits are the logarithms of a bigram table's probabilities.

    Args:
        table: the counts.
        device: where the logits are wanted.
    """

    keeps_cache = False
    context_length = UNLIMITED

    def __init__(self, table: BigramTable, device: torch.device | str = "cpu") -> None:
        self.table, self.device = table, device

    def forward(
        self,
        tokens: np.ndarray,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        num_logits: np.ndarray,
    ) -> torch.Tensor | None:
        """See `cascade.Level.forward`."""
        owners, positions = last_positions(starts + counts, num_logits)
        if not len(owners):
            return None
        probs = self.table.rows(tokens[rows[owners], positions])
        return torch.from_numpy(probs).log().float().to(self.device)
