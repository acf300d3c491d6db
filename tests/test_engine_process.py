"""Processes that speak JSON lines: answers, prints, errors, deaths."""

import pytest

from vllm_hsd.engine_process import JsonLinesProcess, engine_environment

CHILD = """
import os
from vllm_hsd.engine_process import serve_parent

def serve(messages, answer):
    print("a library prints to stdout")
    answer({"started with": next(messages)})
    for message in messages:
        if message == "die":
            os._exit(3)
        answer(10 / message)

if __name__ == "__main__":
    serve_parent(serve)
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    (tmp_path / "echo_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = JsonLinesProcess("echo_child", tmp_path / "logs" / "log")
    process.send({"a": 1})
    yield process
    process.close()


def test_messages_are_answered_in_turn_and_prints_go_to_the_log(child, tmp_path):
    assert child.receive() == {"started with": {"a": 1}}
    for message in (2, 5):
        child.send(message)
        assert child.receive() == 10 / message
    child.close()
    assert child.status() == 0
    assert "a library prints" in (tmp_path / "logs" / "log").read_text()


def test_what_it_raises_is_answered_and_ends_it(child, tmp_path):
    child.receive()
    child.send(0)
    assert child.receive() == {"error": "division by zero"}
    assert child.receive() is None and child.status() == 1
    assert "Traceback" in (tmp_path / "logs" / "log").read_text()


def test_a_dead_process_can_be_sent_to_and_closed(child):
    child.receive()
    child.send("die")
    assert child.receive() is None and child.status() == 3
    for _ in range(3):
        child.send(1)
    assert child.receive() is None


def test_engines_share_the_parents_environment(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    environment = engine_environment()
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["VLLM_LOGGING_LEVEL"] == "DEBUG"
