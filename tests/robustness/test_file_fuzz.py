"""Damaged files: each is read as a valid one or refused in one sentence, in little memory."""

import hashlib
import json
import pickle
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from robustness.test_full_disk import write_tables_of_a_profile
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import save_file
from support.damaged_bytes import COUNT, damaged, objection, objections, sentence_objection

from vllm_hsd.cascade import text_store
from vllm_hsd.cascade.exit_head import FILE_NAME, ExitHead, read_exit_head, write_exit_head
from vllm_hsd.cascade.text_store import TextStore, read_store
from vllm_hsd.checked_files import check_safetensors, read_json
from vllm_hsd.config.cascade_config import CascadeConfig
from vllm_hsd.errors import UserError
from vllm_hsd.tools.planner.profile import Profile, load_profile, tables_file

VOCABULARY = 40


def assert_refused(read: Callable, path: Path, said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        read(str(path))
    assert sentence_objection(str(error.value), path.name, 400) is None


def assert_refused_in_little_memory(read: Callable, path: Path, said: str) -> None:
    tracemalloc.start()
    try:
        assert_refused(read, path, said)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


def is_store(store: TextStore) -> bool:
    texts = [text for text in store if len(text)]
    return sum(map(len, texts)) == len(store.tokens) and store.tokens.max() < store.vocab_size


def test_damaged_suffix_stores(tmp_path):
    texts, path = np.random.default_rng(0).integers(0, VOCABULARY, (6, 20)), tmp_path / "whole"
    text_store.write_store(text_store.collect_texts(texts, VOCABULARY), str(path))
    assert objections(read_store, is_store, path.read_bytes(), tmp_path) == []


STORE_FAULTS: dict[str, tuple[dict[str, np.ndarray], dict[str, str] | None, str]] = {
    "no metadata": ({}, None, "vocab_size is not a number"),
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
    assert_refused(read_store, path, said)


def test_a_store_that_declares_too_many_tokens_takes_no_memory(tmp_path):
    path, count = tmp_path / "store", text_store.MAX_STORE_TOKENS + 1
    ends = 16 + 4 * count
    header = {
        "__metadata__": {"vocab_size": "40"},
        "starts": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]},
        "tokens": {"dtype": "I32", "shape": [count], "data_offsets": [16, ends]},
    }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + ends)  # a hole: it takes no space on the disk
    assert_refused_in_little_memory(read_store, path, "declares 16777217 tokens")


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_is_unpickled(tmp_path):
    sprung, path = tmp_path / "sprung", tmp_path / FILE_NAME
    for write in (pickle.dump, torch.save, lambda trap, file: np.save(file, np.array([trap]))):
        with path.open("wb") as file:
            write(Trap(sprung), file)
        for read, place in ((read_store, path), (read_exit_head, tmp_path)):
            with pytest.raises(UserError, match=r"is not a store of texts|holds no readable"):
                read(str(place))
    assert not sprung.exists()


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "\ud800", "/dev/zero", "/", ""])
def test_paths_that_are_not_files(path):
    for read in (read_store, read_exit_head, lambda path: read_json(path, "cascade", "w")):
        with pytest.raises(UserError) as error:
            read(path)
        assert sentence_objection(str(error.value), "") is None


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
    "no schema": b'{"levels": []}',
    "another schema": b'{"schema": 2, "levels": []}',
    "schema true": json.dumps(cascade(schema=True)).encode(),
    "schema 1.0": json.dumps(cascade(schema=1.0)).encode(),
    "a list": b"[1]",
    "too long": json.dumps(cascade(planned_for="x" * (2 << 20))).encode(),
    "an unknown key": json.dumps(cascade(adaptve=False)).encode(),
    "lone surrogate": json.dumps(cascade(verifier="\ud800")).encode(),
}


@pytest.mark.parametrize("text", TEXTS)
def test_texts_that_are_not_cascades(tmp_path, text):
    path = tmp_path / "cascade.json"
    path.write_bytes(TEXTS[text])
    of_a_key = text in ("an unknown key", "lone surrogate")
    assert_refused(read_cascade, path, "^cascade '" if of_a_key else "^cascade: ")


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
    "a negative layer": ({}, {"layer": "-1"}, "its layer"),
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
    assert_refused(read_exit_head, path, said)


def test_a_safetensors_header_that_declares_much_takes_no_memory(tmp_path):
    path = tmp_path / "model.safetensors"
    entry = {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}
    for header in (json.dumps({"a": entry}).encode(), b"{}"):
        for length in (len(header), 10**15):
            path.write_bytes(struct.pack("<Q", length) + header + bytes(64))
            said = "is not a complete safetensors file"
            assert_refused_in_little_memory(check_safetensors, path, said)


def is_profile(found: Profile) -> bool:
    """Whether the planner meets probabilities and positive times only."""
    rates = found.rate_matrix()
    known = rates[~np.isnan(rates)]
    acceptances = [found.acceptance(verifier) for verifier in ("block", "standard")]
    tables = [table for a in acceptances for table in (a.survival, *a.lookups.values())]
    forwards = found.latencies.forward if found.latencies else []
    times = np.array([ms for table in forwards for row in table.ms for ms in row])
    return (
        len(rates) == len(found.names)
        and bool(((known >= 0) & (known <= 1)).all())
        and all(((table >= 0) & (table <= 1.001)).all() for table in tables)
        and bool((np.isfinite(times) & (times > 0)).all())
    )


def test_profiles_with_damaged_bytes(tmp_path):
    path = tmp_path / "profile.json"
    write_tables_of_a_profile(path)
    content, change = path.read_bytes(), random.Random(0)
    for _ in range(COUNT):
        path.write_bytes(damaged(change, content))
        assert objection(load_profile, is_profile, path) is None


def test_damaged_tables_whose_digest_fits(tmp_path):
    """A NaN in them is what `test_profile_files` sees refused."""
    path = tmp_path / "profile.json"
    write_tables_of_a_profile(path)
    tables, content = tables_file(path), json.loads(path.read_text())
    whole, change = tables.read_bytes(), random.Random(0)
    for _ in range(COUNT):
        tables.write_bytes(damaged(change, whole))
        digest = hashlib.sha256(tables.read_bytes()).hexdigest()
        path.write_text(json.dumps({**content, "tables": digest}))
        assert objection(load_profile, is_profile, path) is None
