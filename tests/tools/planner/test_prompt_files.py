"""Prompt files in their formats, and files without prompts."""

import json

import pytest

from vllm_hsd.errors import UserError
from vllm_hsd.tools.planner import prompts
from vllm_hsd.tools.planner.prompts import encode, read_prompts, read_requests


def test_json_lines(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"turns": ["first", "second"], "category": "x"}, {"prompt": "raw text"}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read_prompts(path) == [[{"role": "user", "content": "first"}], "raw text"]


def test_lines_with_what_the_prompt_asks_for(tmp_path):
    path = tmp_path / "prompts.jsonl"
    own = {"extra_args": {"hsd_prediction": "x"}, "structured_outputs": {"regex": "y"}}
    lines = [{"prompt": "a", **own, "category": "x"}, {"turns": ["b"]}]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert read_requests(path) == [("a", own), ([{"role": "user", "content": "b"}], {})]
    assert read_prompts(path) == [prompt for prompt, _ in read_requests(path)]


def test_plain_text(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one prompt\nof two lines\n\n\nanother\n")
    assert read_prompts(path) == ["one prompt\nof two lines", "another"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", "", "holds no prompt"),
        ("p.txt", " \n\n ", "holds no prompt"),
        ("p.jsonl", '{"prompt": "x"}\n{"prompt": ', "line 2 of .* is not JSON"),
        ("p.jsonl", '{"question": "x"}', "line 1 of .* has neither a 'prompt'"),
        ("p.jsonl", '{"turns": []}', "has neither"),
        ("p.jsonl", '{"prompt": "  "}', "has neither"),
        ("p.jsonl", "[1]", "has neither"),
        ("p.jsonl", '{"prompt": "x", "extra_args": [1]}', "line 1 of .*: 'extra_args' is no JSON"),
    ],
)
def test_files_that_hold_no_prompts(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_prompts(path)


def test_a_public_set_is_fetched_once(tmp_path, monkeypatch):
    kept = tmp_path / "kept"
    kept.mkdir()
    monkeypatch.setattr("huggingface_hub.cached_assets_path", lambda *names: kept)
    monkeypatch.setattr(prompts, "PUBLIC_URL", f"{tmp_path.as_uri()}/{{}}.jsonl")
    with pytest.raises(UserError, match=r"'mt_bench' cannot be fetched .*: give a file"):
        read_prompts("mt_bench")
    source = tmp_path / "mt_bench.jsonl"
    source.write_text("<html>")
    with pytest.raises(UserError, match="'mt_bench' cannot be fetched"):
        read_prompts("mt_bench")
    source.write_text('{"turns": ["first"]}\n')
    assert read_prompts("mt_bench") == [[{"role": "user", "content": "first"}]]
    source.unlink()
    assert read_prompts("mt_bench") == [[{"role": "user", "content": "first"}]]
    with pytest.raises(UserError, match="no prompts file 'mtbench'; public sets are alpaca"):
        read_prompts("mtbench")


class Tokenizer:
    """One token per character; the template adds its marks."""

    def __init__(self, template):
        self.chat_template = template

    def encode(self, text, add_special_tokens=True):
        return [0] * add_special_tokens + [ord(c) for c in text]

    def apply_chat_template(self, chat, tokenize, add_generation_prompt):
        return f"<{chat[0]['content']}>"


def test_chats_use_the_template_where_there_is_one():
    chat = [{"role": "user", "content": "hi"}]
    assert encode(Tokenizer("t"), chat, 10) == [ord(c) for c in "<hi>"]
    assert encode(Tokenizer(None), chat, 10) == [0, ord("h"), ord("i")]
    assert encode(Tokenizer("t"), "hi", 2) == [ord("h"), ord("i")]
