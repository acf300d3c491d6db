"""Bigram tables: their rows are distributions, back-off, the file, the level, errors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hsd.core.bigram import (
    BigramLevel,
    bigram_vocab_size,
    count_bigrams,
    read_bigram,
    write_bigram,
)
from vllm_hsd.errors import UserError

VOCABULARY = 7
CORPUS = [np.array([1, 2, 1, 2, 3]), np.array([2, 2]), np.array([4])]


@given(
    st.lists(
        st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=20), min_size=1, max_size=4
    )
)
def test_rows_are_distributions_with_every_token_possible(documents):
    rows = count_bigrams([np.array(d) for d in documents], VOCABULARY).rows(np.arange(VOCABULARY))
    assert rows.shape == (VOCABULARY, VOCABULARY)
    np.testing.assert_allclose(rows.sum(1), 1, atol=1e-12)
    assert (rows > 0).all()


def test_counts_stop_at_the_end_of_a_document():
    table = count_bigrams(CORPUS, VOCABULARY)
    pairs = np.zeros((VOCABULARY, VOCABULARY))
    first = np.repeat(np.arange(VOCABULARY), np.diff(table.starts))
    pairs[first, table.following] = table.counts
    assert pairs[1, 2] == 2 and pairs[2, 1] == 1 and pairs[2, 3] == 1 and pairs[2, 2] == 1
    assert pairs.sum() == 5


def test_row_of_a_seen_token():
    table = count_bigrams(CORPUS, VOCABULARY)
    # After 2: three followers (1, 3, 2) once each, so half of the mass backs off.
    expected = 0.5 * table.unigram + 0.5 / 3 * np.isin(np.arange(VOCABULARY), [1, 2, 3])
    np.testing.assert_allclose(table.rows(np.array([2]))[0], expected)


def test_unseen_token_backs_off_to_single_tokens():
    table = count_bigrams(CORPUS, VOCABULARY)
    singles = np.array([0, 2, 4, 1, 1, 0, 0]) + 1
    np.testing.assert_allclose(table.rows(np.array([6]))[0], singles / singles.sum())


def test_file_round_trip(tmp_path):
    table = count_bigrams(CORPUS, VOCABULARY)
    path = str(tmp_path / "table.bigram")
    write_bigram(table, path)
    again = read_bigram(path)
    assert bigram_vocab_size(path) == again.vocab_size == VOCABULARY
    previous = np.array([0, 2, 1, 2])
    np.testing.assert_array_equal(again.rows(previous), table.rows(previous))


def test_level_reads_the_token_before_every_row():
    table = count_bigrams(CORPUS, VOCABULARY)
    tokens = np.array([[1, 2, 3, 4, 0, 0], [5, 6, 1, 2, 0, 0], [3, 3, 0, 0, 0, 0]])
    logits = BigramLevel(table).forward(
        tokens,
        rows=np.array([1, 0, 2]),
        starts=np.array([0, 1, 0]),
        counts=np.array([4, 3, 2]),
        num_logits=np.array([1, 3, 0]),
    )
    previous = [2, 2, 3, 4]
    np.testing.assert_allclose(logits.exp().numpy(), table.rows(np.array(previous)), rtol=1e-5)
    nothing = np.zeros(1, dtype=np.int64)
    assert BigramLevel(table).forward(tokens, nothing, nothing, nothing + 2, nothing) is None


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([np.array([1, VOCABULARY])], "token 7 lies outside the vocabulary of 7"),
        ([np.array([1]), np.array([2])], "no pair of tokens"),
        ([], "no pair of tokens"),
    ],
)
def test_invalid_corpora(documents, message):
    with pytest.raises(UserError, match=message):
        count_bigrams(documents, VOCABULARY)


@pytest.mark.parametrize("content", [b"", b"not a table", b"PK\x03\x04 cut off"])
def test_other_files(tmp_path, content):
    path = tmp_path / "table.bigram"
    path.write_bytes(content)
    with pytest.raises(
        UserError, match=r"is not a bigram table .* write one with `vllm-hsd build bigram`"
    ):
        read_bigram(str(path))


def test_missing_file(tmp_path):
    with pytest.raises(
        UserError, match=r"bigram: no file '.*table'; `vllm-hsd build bigram` writes one"
    ):
        read_bigram(str(tmp_path / "table"))


def test_damaged_file(tmp_path):
    path = tmp_path / "table.bigram"
    write_bigram(count_bigrams(CORPUS, VOCABULARY), str(path))
    stored = bytearray(path.read_bytes())
    stored[60:90] = bytes(30)
    path.write_bytes(stored)
    with pytest.raises(UserError, match="is not a bigram table"):
        read_bigram(str(path))


def test_an_array_is_not_a_table(tmp_path):
    np.save(tmp_path / "counts.npy", np.zeros(3))
    with pytest.raises(UserError, match="is not a bigram table"):
        read_bigram(str(tmp_path / "counts.npy"))


def test_successors_are_the_likeliest_tokens():
    """Also where a single token outweighs every pair: many different followers, each seen once."""
    rng = np.random.default_rng(3)
    documents = [rng.zipf(1.4, size=200) % 30 for _ in range(4)]
    documents.append(np.array([31, 32, 31, 33, 31, 34, 31, 35, 31, 36]))
    table = count_bigrams([*documents, np.full(400, 37)], 40)
    rows = table.rows(np.arange(40))
    found = table.successors()
    seen = np.diff(table.starts) > 0
    assert (found[~seen] == -1).all() and (~seen).any()
    assert (rows[seen, found[seen]] == rows[seen].max(1)).all()
    assert found[31] == 37
