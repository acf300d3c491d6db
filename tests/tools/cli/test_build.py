"""The commands that write stores of texts and exit heads."""

import gzip
import json
import re
import shutil
from pathlib import Path

import pytest
from support.command_line import refused, run

from benchmarks.common import MODELS
from vllm_hsd.cascade.text_store import read_store

TARGET = str(MODELS / "target")


@pytest.fixture
def corpus(tmp_path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("def add(a, b):\n    return a + b\n" * 300)
    return path


def test_store_from_texts_and_records(tmp_path, corpus, capsys):
    records = [
        {"answer_token_ids": [3, 1, 4]},
        {"token_ids": [1, 5], "prompt_token_ids": [9]},
        {"choices": [{"message": {"content": "return"}}, {"text": "a + b"}]},
        {"messages": [{"role": "user", "content": "no"}, {"role": "assistant", "content": "def"}]},
        {"text": "def add"},
        {"choices": [{"message": {"content": None, "tool_calls": [{"id": "1"}]}}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
    ]
    served, output = tmp_path / "served.jsonl", tmp_path / "store.safetensors"
    served.write_text("".join(json.dumps(record) + "\n" for record in records))
    with gzip.open(tmp_path / "more.jsonl.gz", "wt") as file:
        file.write(json.dumps({"token_ids": [7, 7, 7]}) + "\n\n")
    files = served, tmp_path / "more.jsonl.gz", corpus
    assert run("build", "store", "--target", TARGET, *files, "-o", output) == 0
    assert "8 texts, over a vocabulary of" in capsys.readouterr().out
    store = read_store(str(output))
    config = json.loads((MODELS / "target" / "config.json").read_text())
    assert store.vocab_size == config["vocab_size"]
    texts = [text.tolist() for text in store]
    assert texts[:2] == [[3, 1, 4], [1, 5]] and texts[6] == [7, 7, 7] and len(texts[7]) > 1000
    # Every text is ended by the token that ends a document.
    assert {text[-1] for text in (*texts[2:6], texts[7])} == {0}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("[1]", "line 1: must be an object"),
        ("{", "line 1 is not JSON"),
        ('{"tokens": [1]}', "line 1: needs one of the keys answer_token_ids, token_ids, choices"),
        ('{"token_ids": [1, "2"]}', "line 1: 'token_ids' must be a list of token ids"),
        ('{"token_ids": [-1]}', "line 1: 'token_ids' must be a list of token ids"),
        ('{"token_ids": [99999999]}', "token 99999999 lies outside the vocabulary"),
        ('{"choices": [{"delta": {}}]}', "line 1: holds an output that is not text"),
        ('{"messages": ["x"]}', "line 1: 'messages' must be a list of turns"),
        ("[" * 100_000, "line 1 is not JSON"),
        ("", "the texts have no token"),
    ],
)
def test_records_that_cannot_be_used(tmp_path, capsys, record, message):
    path = tmp_path / "served.jsonl"
    path.write_text(record)
    output = tmp_path / "store"
    assert message in refused(capsys, "build store", "--target", TARGET, path, "-o", output)
    assert not output.exists()


HEADS = ["exit-heads", "--target", TARGET, "--layers"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["store", "--target", "CORPUS", "CORPUS"], "--target: '.*' has no tokenizer"),
        # Of a later release of tokenizers, for example.
        (["store", "--target", "DAMAGED", "CORPUS"], "--target: '.*' has no tokenizer"),
        (["store", "--target", TARGET, "no-such-file"], "TEXT 'no-such-file' cannot be read"),
        (["store", "--target", TARGET, "BINARY"], "TEXT '.*' is not text in UTF-8"),
        (["store", "--target", TARGET], "no texts: give files, or let the target write chats"),
        (["store", "--target", TARGET, "--chats=-1", "CORPUS"], "--chats is -1: it must be 0 to"),
        (["store", "--target", TARGET, "--chats", "2"], "--chats: the target has no chat templ"),
        (["store", "--target", TARGET, "CORPUS", "-o", "no/such"], "--output: no directory 'no'"),
        (["store", "--target", TARGET, "CORPUS", "-o", "CORPUS"], "would write over a text"),
        (["store", "--target", TARGET, "--chats", "2", "-o", "FOLDER"], "is a directory: name a"),
        ([*HEADS, "2", "CORPUS", "-o", "BINARY"], "binary' is no directory to write to"),
        ([*HEADS, "99", "CORPUS"], "layers: 99 is not between 0 and"),
        ([*HEADS, "2", "EMPTY"], "the texts have 1 tokens, too few"),
        ([*HEADS, "2", "CORPUS", "--steps=0"], "--steps is 0: it must be at least 1"),
    ],
)
def test_errors_are_one_line_on_stderr(tmp_path, corpus, capsys, arguments, message):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfa")
    (tmp_path / "empty").write_text("")
    (tmp_path / "folder").mkdir()
    damaged = shutil.copytree(TARGET, tmp_path / "damaged")
    (damaged / "tokenizer.json").write_text('{"pre_tokenizer": {"type": "later"}}')
    named = {
        "FOLDER": tmp_path / "folder",
        "DAMAGED": damaged,
        "BINARY": tmp_path / "binary",
        "EMPTY": tmp_path / "empty",
        "CORPUS": corpus,
    }
    command, *arguments = [named.get(argument, argument) for argument in arguments]
    if "-o" not in arguments:
        arguments += ["-o", tmp_path / "output"]
    # transformers shows its progress there, too.
    assert re.search(message, refused(capsys, f"build {command}", *arguments))
    assert not (tmp_path / "output").exists()
