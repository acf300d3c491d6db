"""Prompt files in their formats, and files without prompts."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from tokenizers.processors import TemplateProcessing

from vllm_hsd.errors import UserError
from vllm_hsd.tools.audit.tiny_models import byte_tokenizer
from vllm_hsd.tools.planner import public_sets
from vllm_hsd.tools.planner.prompts import encode, fit, read_prompts, read_requests


def test_json_lines(tmp_path):
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "third"}]
    # A separator that str.splitlines knows and JSON does not.
    raw = "raw\u2028text"
    system = {"role": "system", "content": "Be brief."}
    lines = [{"turns": ["first", "second"]}, {"prompt": raw}, {"messages": [system, *messages]}]
    path.write_text("\n".join(json.dumps(each, ensure_ascii=False) for each in lines) + "\n\n")
    assert read_prompts(path) == [[{"role": "user", "content": "first"}], raw, messages]


def test_lines_with_what_the_prompt_asks_for(tmp_path):
    path = tmp_path / "prompts.jsonl"
    own = {"extra_args": {"hsd_prediction": "x"}, "structured_outputs": {"regex": "y"}}
    lines = [{"prompt": "a", **own, "category": "x"}, {"turns": ["b"]}]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert read_requests(path) == [("a", own), ([{"role": "user", "content": "b"}], {})]
    with pytest.raises(UserError, match="only `vllm-hsd bench` reads 'extra_args' of a line"):
        read_prompts(path)


def test_plain_text(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one prompt\nof two lines\n\n\nanother\n")
    assert read_prompts(path) == ["one prompt\nof two lines", "another"]


def test_prompts_that_are_cut_are_counted():
    told = "1 of 2 prompts lose their beginning: the context has room for 2 tokens of a prompt."
    assert fit([[1, 2, 3], [4, 5]], 2) == ([[2, 3], [4, 5]], told)
    assert fit([[1]], 1) == ([[1]], "")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", "", "holds no prompt"),
        ("p.txt", " \n\n ", "holds no prompt"),
        ("p.jsonl", '{"prompt": "x"}\n{"prompt": ', "line 2 of .* is not JSON"),
        ("p.jsonl", "[" * 10**5, "line 1 of .* is not JSON"),
        ("p.jsonl", "9" * 5000, "line 1 of .* is not JSON"),
        ("p.jsonl", '{"prompt": "\\ud800"}', "line 1 of .* is not JSON"),
        ("p.jsonl", '{"question": "x"}', "line 1 of .* has neither a 'prompt'"),
        ("p.jsonl", '{"turns": []}', "has neither"),
        ("p.jsonl", '{"prompt": "  "}', "has neither"),
        ("p.jsonl", '{"messages": [1]}', "has neither"),
        ("p.jsonl", "[1]", "has neither"),
        ("p.jsonl", '{"prompt": "x", "extra_args": [1]}', "line 1 of .*: 'extra_args' is no JSON"),
    ],
)
def test_files_that_hold_no_prompts(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_prompts(path)


@pytest.fixture
def network(tmp_path, monkeypatch):
    """A directory in place of the servers; what is fetched is kept in another."""
    (tmp_path / "kept").mkdir()
    monkeypatch.setattr("huggingface_hub.cached_assets_path", lambda *names: tmp_path / "kept")
    monkeypatch.setattr(public_sets, "EAGLE_URL", f"{tmp_path.as_uri()}/{{}}.jsonl")
    monkeypatch.setattr(public_sets, "SPEC_BENCH_URL", f"{tmp_path.as_uri()}/spec.jsonl")
    return tmp_path


def chats(*texts):
    return [[{"role": "user", "content": text}] for text in texts]


def test_a_public_set_is_fetched_once(network):
    with pytest.raises(UserError, match=r"'mt_bench' cannot be fetched .*: give a file"):
        read_prompts("mt_bench")
    source = network / "mt_bench.jsonl"
    for page in ("<html>", "[1]"):
        source.write_text(page)
        with pytest.raises(UserError, match="'mt_bench' cannot be fetched"):
            read_prompts("mt_bench")
    source.write_text('{"turns": ["first"]}\n')
    assert read_prompts("mt_bench") == chats("first")
    source.unlink()
    assert read_prompts("mt_bench") == chats("first")


def test_a_cache_that_cannot_be_written_is_named(network, monkeypatch):
    (network / "mt_bench.jsonl").write_text('{"turns": ["first"]}\n')
    for fault in (PermissionError("read-only"), None):
        found = mock.Mock(side_effect=fault, return_value=Path("/proc/none"))
        monkeypatch.setattr("huggingface_hub.cached_assets_path", found)
        with pytest.raises(UserError, match=r"'mt_bench' cannot be fetched .*: give a file"):
            read_prompts("mt_bench")


@pytest.mark.parametrize("name", ["mtbench", "mt_bench:a:b", "speed_bench:qualitative:a:b"])
def test_names_that_are_no_set(name):
    with pytest.raises(UserError, match=r"no prompts file '.*'; public sets are alpaca"):
        read_prompts(name)


def test_spec_bench_by_category(network):
    lines = [{"category": "qa", "turns": ["q"]}, {"category": "rag", "turns": ["r", "s"]}]
    (network / "spec.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert read_prompts("spec_bench") == chats("q", "r")
    assert read_prompts("spec_bench:rag") == chats("r")
    with pytest.raises(UserError, match="no category 'law': give one of qa, rag"):
        read_prompts("spec_bench:law")


def test_speed_bench_by_subset_and_category(network, monkeypatch, capsys):
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "datasets", None)
        with pytest.raises(UserError, match="needs the package datasets: pip install datasets"):
            read_prompts("speed_bench")
    rows = [
        {"category": "coding", "turns": ["c", "d"], "source": "x"},
        {"category": "math", "turns": ["m"], "source": "x"},
        {"category": "math", "turns": [f"{public_sets._ELSEWHERE} {{question}}"], "source": "y"},
    ]
    load_dataset = mock.Mock(side_effect=[ConnectionError("no route"), rows, rows])
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(UserError, match=r"'speed_bench' cannot be fetched \(no route\)"):
        read_prompts("speed_bench")
    assert read_prompts("speed_bench") == chats("c", "m")
    assert "1 of 3 prompts are left out" in capsys.readouterr().err
    assert read_prompts("speed_bench:qualitative:coding") == chats("c")
    assert not capsys.readouterr().err
    assert read_prompts("speed_bench:throughput_2k:coding") == chats("c")
    subsets = ["qualitative", "qualitative", "throughput_2k"]
    asked = [mock.call("nvidia/SPEED-Bench", subset, split="test") for subset in subsets]
    assert load_dataset.mock_calls == asked
    with pytest.raises(UserError, match="no subset 'coding': give qualitative, throughput_1k"):
        read_prompts("speed_bench:coding")


def test_chats_use_the_template_where_there_is_one():
    tokenizer, chat = byte_tokenizer(), [{"role": "user", "content": "hi"}]
    begins = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.backend_tokenizer.post_processor = begins
    plain = encode(tokenizer, "hi")
    assert tokenizer.decode(plain) == "<s>hi" and encode(tokenizer, chat) == plain
    tokenizer.chat_template = "{{ messages[0].content }}{% if add_generation_prompt %}:{% endif %}"
    assert tokenizer.decode(encode(tokenizer, chat)) == "hi:" and encode(tokenizer, "hi") == plain
    tokenizer.chat_template = "{{ raise_exception('no system message') }}"
    with pytest.raises(UserError, match=r"the chat template .* 'hi'.* [(]no system message[)]"):
        encode(tokenizer, chat)


def test_a_chat_for_a_tokenizer_whose_chats_are_no_text():
    """As vLLM's of Mistral's own format."""
    chat = [{"role": "user", "content": "hello"}]
    tokenizer = mock.Mock(spec=["apply_chat_template"])
    tokenizer.apply_chat_template.return_value = [5, 6, 7]
    assert encode(tokenizer, chat) == [5, 6, 7]
    tokenizer.apply_chat_template.assert_called_once_with(chat, add_generation_prompt=True)
