"""Damaged files: each is read as a valid one or refused in one sentence, in little memory."""

import bz2
import json
import random
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import save_file
from support.damaged_bytes import (
    COUNT,
    damaged,
    npy,
    npy_header,
    objection,
    objections,
    sentence_objection,
    write_members,
)

from vllm_hsd.checked_files import check_safetensors, read_json
from vllm_hsd.config import CascadeConfig
from vllm_hsd.core import bigram
from vllm_hsd.core.bigram import (
    BigramTable,
    bigram_vocab_size,
    count_bigrams,
    read_bigram,
    write_bigram,
)
from vllm_hsd.core.exit_head import FILE_NAME, ExitHead, read_exit_head, write_exit_head
from vllm_hsd.core.suffix_store import (
    MAX_STORE_TOKENS,
    SuffixStore,
    collect_texts,
    read_store,
    write_store,
)
from vllm_hsd.errors import UserError

VOCABULARY = 40
MOST_MEMORY = 8 << 20


def is_distribution(table: BigramTable) -> bool:
    """Whether every token is followed by a distribution that can draw any token."""
    size = table.vocab_size
    rows = table.rows(np.arange(size))
    return rows.shape == (size, size) and bool(
        np.isfinite(rows).all() and (rows > 0).all() and np.allclose(rows.sum(1), 1, atol=1e-6)
    )


@pytest.fixture(scope="module")
def table() -> BigramTable:
    text = np.random.default_rng(0).integers(0, VOCABULARY, 400)
    return count_bigrams([text], VOCABULARY)


@pytest.fixture
def members(table, tmp_path) -> dict[str, bytes]:
    """The arrays of a stored table, as stored in its archive."""
    write_bigram(table, str(tmp_path / "whole"))
    with zipfile.ZipFile(tmp_path / "whole") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_damaged_bigram_tables(table, tmp_path):
    write_bigram(table, str(tmp_path / "whole"))
    content = (tmp_path / "whole").read_bytes()
    assert objections(read_bigram, is_distribution, content, tmp_path) == []


def test_damaged_bigram_tables_whose_archive_is_whole(members, tmp_path):
    """Checksums hide most damage from a reader; here the arrays are damaged before."""
    rng = random.Random(0)
    for i in range(COUNT):
        path = tmp_path / f"table-{i}"
        name = rng.choice(sorted(members))
        write_members(path, {**members, name: damaged(rng, members[name])})
        assert objection(read_bigram, is_distribution, path) is None


def changed(array: np.ndarray, at: int, value: object) -> np.ndarray:
    array = array.copy()
    array[at] = value
    return array


# name -> (array of the file, its replacement, what the message must say)
BIGRAM_FAULTS: dict[str, tuple[str, Callable[[BigramTable], np.ndarray], str]] = {
    "unigram with NaN": ("unigram", lambda t: changed(t.unigram, 3, np.nan), "'unigram'.*finite"),
    "unigram with inf": ("unigram", lambda t: changed(t.unigram, 3, np.inf), "'unigram'.*finite"),
    "unigram with zero": ("unigram", lambda t: changed(t.unigram, 3, 0), "'unigram'.*positive"),
    "unigram negative": ("unigram", lambda t: changed(t.unigram, 3, -0.1), "'unigram'.*positive"),
    "unigram too large": ("unigram", lambda t: 2 * t.unigram, "'unigram' does not sum to 1"),
    "unigram of text": ("unigram", lambda t: t.unigram.astype(str), "'unigram' has the type"),
    "unigram complex": ("unigram", lambda t: t.unigram.astype(complex), "'unigram' has the type"),
    "unigram in two dimensions": ("unigram", lambda t: t.unigram[None], "has 2 dimensions"),
    "unigram without dimension": ("unigram", lambda t: t.unigram.sum(), "has 0 dimensions"),
    "unigram too short": ("unigram", lambda t: t.unigram[:-1], "do not fit"),
    "unigram empty": ("unigram", lambda t: t.unigram[:0], "'unigram' declares 0 entries"),
    "data of floats": ("data", lambda t: t.counts / 1.0, "'data' has the type float64"),
    "data of text": ("data", lambda t: t.counts.astype(str), "'data' has the type"),
    "data negative": ("data", lambda t: changed(t.counts, 0, -1), "'data' holds a count below 1"),
    "data zero": ("data", lambda t: changed(t.counts, 0, 0), "'data' holds a count below 1"),
    "data that overflows": ("data", lambda t: changed(t.counts, 0, 2**62), "too large counts"),
    "data too short": ("data", lambda t: t.counts[:-1], "differ in length"),
    "indices too large": ("indices", lambda t: changed(t.following, 0, VOCABULARY), "leave the v"),
    "indices negative": ("indices", lambda t: changed(t.following, 0, -1), "leave the vocabulary"),
    "indices unsorted": ("indices", lambda t: t.following[::-1], "repeat or decrease"),
    "indices repeated": ("indices", lambda t: changed(t.following, 1, t.following[0]), "repeat"),
    "indptr that decreases": ("indptr", lambda t: changed(t.starts, 2, 10**6), "decreases"),
    "indptr negative": ("indptr", lambda t: changed(t.starts, 2, -5), "decreases"),
    "indptr beyond the pairs": ("indptr", lambda t: changed(t.starts, -1, 10**6), "span"),
    "indptr from one": ("indptr", lambda t: changed(t.starts, 0, 1), "does not span"),
    "indptr too short": ("indptr", lambda t: t.starts[:-1], "do not fit"),
}


@pytest.mark.parametrize("fault", BIGRAM_FAULTS)
def test_faults_in_a_bigram_table(table, members, tmp_path, fault):
    name, change, said = BIGRAM_FAULTS[fault]
    path = tmp_path / "table.npz"
    write_members(path, {**members, f"{name}.npy": npy(np.array(change(table), order="C"))})
    with pytest.raises(UserError, match=said) as error:
        read_bigram(str(path))
    assert sentence_objection(str(error.value), path.name) is None


@pytest.mark.parametrize("shape", [(10**12,), (-1,), (10**30,), (2**63,), (1 << 27,)])
def test_declared_sizes_take_no_memory(members, tmp_path, shape):
    path = tmp_path / "table.npz"
    huge = {name: npy_header(shape) + bytes(64) for name in ("data.npy", "indices.npy")}
    write_members(path, {**members, **huge}, zipfile.ZIP_DEFLATED)
    assert_refused_in_little_memory(path)


def test_a_zip_bomb_takes_no_memory(members, tmp_path):
    path = tmp_path / "table.npz"
    size, pairs = 1 << 16, 1 << 24
    starts = np.full(size + 1, pairs)
    starts[0] = 0
    zeros = npy_header((pairs,)) + bytes(8 * pairs)
    arrays = {"indptr.npy": npy(starts), "unigram.npy": npy(np.full(size, 1 / size))}
    bomb = {**members, **arrays, "data.npy": zeros, "indices.npy": zeros}
    write_members(path, bomb, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 20
    assert_refused_in_little_memory(path)


def test_a_method_of_compression_without_bounds_is_refused(members, tmp_path):
    path = tmp_path / "table.npz"
    assert len(bz2.compress(bytes(1 << 24))) < 100, "16 MB fit into 100 bytes"
    write_members(path, members, zipfile.ZIP_BZIP2)
    assert_refused_in_little_memory(path)


def assert_refused_in_little_memory(path: Path) -> None:
    for read in (bigram_vocab_size, read_bigram):
        tracemalloc.start()
        try:
            with pytest.raises(UserError, match="is not a bigram table") as error:
                read(str(path))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < MOST_MEMORY
        assert sentence_objection(str(error.value), path.name) is None


def is_store(store: SuffixStore) -> bool:
    texts = [text for text in store if len(text)]
    return sum(map(len, texts)) == len(store.tokens) and store.tokens.max() < store.vocab_size


def write_whole_store(path: Path) -> bytes:
    texts = np.random.default_rng(0).integers(0, VOCABULARY, (6, 20))
    write_store(collect_texts(texts, VOCABULARY), str(path))
    return path.read_bytes()


def test_damaged_suffix_stores(tmp_path):
    content = write_whole_store(tmp_path / "whole")
    assert objections(read_store, is_store, content, tmp_path) == []


STORE_FAULTS: dict[str, tuple[dict[str, np.ndarray], dict[str, str] | None, str]] = {
    "no metadata": ({}, None, "no metadata"),
    "a vocabulary of text": ({}, {"vocab_size": "x"}, "vocab_size is not a number"),
    "a vocabulary of 0": ({}, {"vocab_size": "0"}, "vocab_size is not between"),
    "a huge vocabulary": ({}, {"vocab_size": "9" * 9}, "vocab_size is not between"),
    "a small vocabulary": ({}, {"vocab_size": "3"}, "a token lies outside the vocabulary"),
    "another tensor": ({"more": np.zeros(2)}, {}, "other tensors"),
    "long tokens": ({"tokens": np.zeros(9, np.int64)}, {}, "other types"),
    "two dimensions": ({"tokens": np.zeros((3, 3), np.int32)}, {}, "other shapes"),
    "no tokens": ({"tokens": np.zeros(0, np.int32)}, {}, "declares 0 tokens"),
    "negative tokens": ({"tokens": np.full(9, -1, np.int32)}, {}, "outside the vocabulary"),
    "more texts than tokens": ({"starts": np.arange(11)}, {}, "10 texts of 9 tokens"),
    "texts beyond the tokens": ({"starts": np.array([0, 99])}, {}, "does not split"),
    "empty texts": ({"starts": np.array([0, 4, 4, 9])}, {}, "does not split"),
    "texts that go back": ({"starts": np.array([0, 6, 4, 9])}, {}, "does not split"),
}


@pytest.mark.parametrize("fault", STORE_FAULTS)
def test_faults_in_a_suffix_store(tmp_path, fault):
    changes, facts, said = STORE_FAULTS[fault]
    path = tmp_path / "store"
    tensors = {"tokens": np.arange(9, dtype=np.int32), "starts": np.array([0, 4, 9]), **changes}
    metadata = None if facts is None else {"vocab_size": str(VOCABULARY), **facts}
    save_numpy(tensors, path, metadata)
    with pytest.raises(UserError, match=said) as error:
        read_store(str(path))
    assert sentence_objection(str(error.value), path.name) is None


def test_a_store_that_declares_too_many_tokens_takes_no_memory(tmp_path):
    path = tmp_path / "store"
    size = 4 * (MAX_STORE_TOKENS + 1)
    header = {
        "__metadata__": {"vocab_size": "40"},
        "starts": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]},
        "tokens": {
            "dtype": "I32",
            "shape": [MAX_STORE_TOKENS + 1],
            "data_offsets": [16, 16 + size],
        },
    }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + 16 + size)  # a hole: it takes no space on the disk
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="declares 16777217 tokens"):
            read_store(str(path))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST_MEMORY


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_is_unpickled(members, tmp_path):
    sprung = tmp_path / "sprung"
    objects = npy(np.array([Trap(sprung)] * (VOCABULARY + 1), dtype=object))
    for name in members:
        path = tmp_path / f"table-{name}"
        write_members(path, {**members, name: objects})
        with pytest.raises(UserError, match="is not a bigram table"):
            read_bigram(str(path))
    write_members(tmp_path / "table", {**members, "more.npy": objects})
    with pytest.raises(UserError, match="it holds other arrays"):
        read_bigram(str(tmp_path / "table"))
    assert not sprung.exists()


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "\ud800", "/dev/zero", "/", ""])
def test_paths_that_are_not_files(path):
    for read in (read_bigram, read_exit_head, lambda path: read_json(path, "cascade", "w")):
        with pytest.raises(UserError) as error:
            read(path)
        assert sentence_objection(str(error.value), "") is None


def test_the_harness_catches_a_reader_without_checks(members, table, tmp_path, monkeypatch):
    """Readers with a known fault: no check of values, no check of headers, raw exceptions."""
    write_members(
        tmp_path / "nan", {**members, "unigram.npy": npy(changed(table.unigram, 3, np.nan))}
    )
    with monkeypatch.context() as broken:
        broken.setattr(bigram, "_check_values", lambda table: None)
        said = objection(read_bigram, is_distribution, tmp_path / "nan")
        assert said == "accepts what is not valid"
    read_bigram.cache_clear()
    content = (tmp_path / "whole").read_bytes()
    assert any(
        said.startswith("raises ")
        for said in objections(np.load, lambda found: True, content, tmp_path)
    )


def cascade(**keys) -> dict:
    levels = [{"ngram": {"max": 3}, "num_tokens": 2}, {"model": "m", "temperature_scale": 2.5}]
    return {"schema": 1, "num_speculative_tokens": 6, "levels": levels, **keys}


def read_cascade(path: str) -> CascadeConfig:
    return CascadeConfig.parse({"cascade": path})


def test_damaged_cascade_files(tmp_path):
    content = json.dumps(cascade(verifier="block", planned_for={"target": "t"})).encode()
    said = objections(read_cascade, lambda found: found.draft_lengths[-1] <= 128, content, tmp_path)
    assert said == []


TEXTS = {
    "binary": bytes(range(256)),
    "UTF-16": json.dumps(cascade()).encode("utf-16"),
    "empty": b"",
    "deep nesting": b"[" * 200_000 + b"]" * 200_000,
    "deep nesting of objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "an integer of 6000 digits": json.dumps(cascade()).replace("6", "6" * 6000).encode(),
    "NaN": json.dumps(cascade(horizontal_tokens=float("nan"))).encode(),
    "a key twice": b'{"schema": 1, "schema": 1}',
    "schema true": json.dumps(cascade(schema=True)).encode(),
    "schema 1.0": json.dumps(cascade(schema=1.0)).encode(),
    "a list": b"[1]",
    "too long": json.dumps(cascade(planned_for="x" * (2 << 20))).encode(),
    "lone surrogate": json.dumps(cascade(verifier="\ud800")).encode(),
}


@pytest.mark.parametrize("text", TEXTS)
def test_texts_that_are_not_cascades(tmp_path, text):
    path = tmp_path / "cascade.json"
    path.write_bytes(TEXTS[text])
    with pytest.raises(UserError, match=r"^cascade") as error:
        read_cascade(str(path))
    assert sentence_objection(str(error.value), path.name) is None


def is_head(head: ExitHead) -> bool:
    states = torch.randn(3, head.norm.numel(), dtype=head.weight.dtype)
    return (
        1 <= head.layer <= 10_000
        and 0 < head.eps < 1
        and bool(head.weight.isfinite().all() and head.norm.isfinite().all())
        and head.logits(states).shape == (3, len(head.weight))
    )


def test_damaged_exit_heads(tmp_path):
    """A changed weight that is still a number cannot be told from a trained one."""
    write_exit_head(ExitHead(2, torch.ones(8), torch.ones(5, 8), 1e-6), tmp_path)
    content = (tmp_path / FILE_NAME).read_bytes()
    rng = random.Random(0)
    for i in range(COUNT):
        path = tmp_path / f"layer-{i}"
        path.mkdir()
        (path / FILE_NAME).write_bytes(damaged(rng, content))
        assert objection(read_exit_head, is_head, path) is None


GOOD_HEAD = {"norm": torch.ones(8), "weight": torch.ones(5, 8)}
HEAD_FAULTS = {
    "NaN": ({"weight": torch.full((5, 8), float("nan"))}, {}, "'weight' holds a value that is not"),
    "infinite norm": ({"norm": torch.full((8,), float("inf"))}, {}, "'norm' holds a value"),
    "integers": ({"weight": torch.ones(5, 8, dtype=torch.int64)}, {}, "not floating-point"),
    "three dimensions": ({"weight": torch.ones(5, 8, 1)}, {}, "do not fit"),
    "no rows": ({"weight": torch.ones(0, 8)}, {}, "do not fit"),
    "another tensor": ({"more": torch.ones(1)}, {}, "other tensors"),
    "layer zero": ({}, {"layer": "0"}, "its layer"),
    "layer of 6000 digits": ({}, {"layer": "9" * 6000}, "no readable"),
    "eps zero": ({}, {"eps": "0"}, "its eps"),
    "eps not a number": ({}, {"eps": "nan"}, "its eps"),
}


@pytest.mark.parametrize("fault", HEAD_FAULTS)
def test_faults_in_an_exit_head(tmp_path, fault):
    tensors, metadata, said = HEAD_FAULTS[fault]
    path = tmp_path / "layer-2"
    path.mkdir()
    facts = {"layer": "2", "eps": "1e-6", **metadata}
    save_file({**GOOD_HEAD, **tensors}, path / FILE_NAME, metadata=facts)
    with pytest.raises(UserError, match=said) as error:
        read_exit_head(str(path))
    assert sentence_objection(str(error.value), path.name) is None


def test_a_safetensors_header_that_declares_much_takes_no_memory(tmp_path):
    path = tmp_path / "model.safetensors"
    entry = {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}
    for header in (json.dumps({"a": entry}).encode(), b"{}"):
        for length in (len(header), 10**15):
            path.write_bytes(struct.pack("<Q", length) + header + bytes(64))
            tracemalloc.start()
            try:
                with pytest.raises(UserError, match="is not a complete safetensors file") as error:
                    check_safetensors(path)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert peak < MOST_MEMORY
            assert sentence_objection(str(error.value), path.name) is None
