"""Engine processes: calls, output, errors, deaths, and what an engine measures."""

import operator
import os
import subprocess
import sys
import time
from unittest import mock

import pytest
from support.engines import ENGINE_DEFAULTS, forked, started
from support.level_files import cascade
from support.marks import slow
from vllm import envs
from vllm.platforms import current_platform

from vllm_hsd.errors import UserError
from vllm_hsd.tools import engine as engine_process
from vllm_hsd.tools.engine import EngineProcess, processor_seconds
from vllm_hsd.tools.worker_process import WorkerProcess, engine_environment

GREEDY = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}


@pytest.fixture
def worker(tmp_path):
    with WorkerProcess("the worker", log=tmp_path / "logs" / "log") as process:
        yield process


def test_calls_are_answered_in_turn_and_output_goes_to_the_log(worker):
    assert worker.call(operator.truediv, 6, 3) == 2
    worker.call(print, "a library prints to stdout", flush=True)
    assert worker.call(os.getpid) != os.getpid()
    assert "a library prints to stdout" in worker.log.read_text()


def test_ranks_of_an_engine_count_with_it():
    busy = "import sys\nfor i in range(10**7): pass\nprint(); sys.stdout.flush(); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", busy], **pipes) as rank:
        rank.stdout.readline()
        assert processor_seconds()[rank.pid] > 0.05
        rank.kill()
        os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
        # It has ended, and its exit status has not been read.
        assert rank.pid not in processor_seconds()


def test_an_exception_is_reported_and_the_process_goes_on(worker):
    said = r"^the worker failed: division by zero \(log: .*log\)\.\n"
    with pytest.raises(UserError, match=said) as caught:
        worker.call(operator.truediv, 1, 0)
    assert "ZeroDivisionError" in caught.value.__notes__[0]
    assert "Traceback" in worker.log.read_text()
    assert worker.call(operator.add, 1, 2) == 3


def test_a_dead_process_is_reported_and_closed(worker):
    for _ in range(3):
        with pytest.raises(UserError, match="the worker ended early with status 3"):
            worker.call(os._exit, 3)


@pytest.mark.parametrize("number, said", [(4, 'SIGILL; try dtype "float32"'), (9, "SIGKILL")])
def test_a_killed_process_names_its_signal(worker, number, said):
    with pytest.raises(UserError, match=f"signal {said}"):
        worker.call(os.kill, worker.call(os.getpid), number)
    assert worker.ended_by(number) and not worker.ended_by(13 - number)


def test_an_error_of_the_caller_ends_a_busy_process_at_once():
    began = time.monotonic()
    with pytest.raises(KeyError), WorkerProcess() as process:
        process._send(time.sleep, (600,), {})
        raise KeyError
    assert not process._process.is_alive() and time.monotonic() - began < 300


def compiles_ahead(llm) -> bool:
    return envs.VLLM_USE_AOT_COMPILE


def test_one_engine_measures_generations_and_selects_levels(family):
    levels = [{"model": family.small, "num_tokens": 4}, {"model": family.mid}]
    config = cascade({"suffix": {}, "num_tokens": 3}, *levels, num_speculative_tokens=6)
    prompts, alone = [[3, 4, 5], [7, 8, 9, 10]], []
    with started({"model": family.target, **config}) as engine:
        for _ in range(2):
            engine.select_levels([0], [3])
            alone.append(engine.generate(prompts[:1], {**GREEDY, "max_tokens": 24}))
            engine.select_levels([0, 2], [3, 6])
            engine.generate(prompts[:1], {**GREEDY, "max_tokens": 24})
        engine.select_levels([1, 2], [3, 6])
        both = engine.generate(prompts, GREEDY)
        engine.select_levels([2], [4])
        one = engine.generate(prompts, [GREEDY, {**GREEDY, "max_tokens": 5}])
        engine.select_levels([1], [2])
        lowest = engine.generate(prompts, GREEDY)
        engine.select_levels([1, 2], [3, 4])
        again = engine.generate(prompts, GREEDY)
        in_turn = engine.generate(prompts, GREEDY, max_concurrency=1)
        with pytest.raises(UserError, match=r"engine failed: levels \[3\]"):
            engine.select_levels([3], [4])
        if current_platform.is_cpu():
            # Every start would compile again.
            assert not engine.call(compiles_ahead)
    # A lookup forgets what it answered in an earlier selection: a request in the same slot would
    # be served the text of the last one as drafts.
    first, later = ((run.drafted, run.accepted, run.token_ids) for run in alone)
    assert first == later and first[1] < 12
    assert [len(ids) for ids in both.token_ids] == [16, 16] and both.num_tokens == 32
    assert one.token_ids == [both.token_ids[0], both.token_ids[1][:5]]
    assert lowest.token_ids == again.token_ids == both.token_ids
    assert in_turn.token_ids == both.token_ids
    # Each request's times begin with it.
    assert sum(in_turn.last_token_seconds) <= in_turn.seconds
    for run in (both, one, lowest, again):
        for began, ended in zip(run.first_token_seconds, run.last_token_seconds, strict=True):
            assert 0 < began <= ended <= run.seconds
        assert 2 <= run.num_target_steps <= run.num_tokens
        assert 0 < run.accepted <= run.drafted
        top = run.levels[1 if run is lowest else 2]
        assert (top["drafted"], top["accepted"]) == (run.drafted, run.accepted)
    runs = both, one, lowest, again
    drafting = [[i for i, level in enumerate(run.levels) if level["drafted"]] for run in runs]
    assert drafting == [[1, 2], [2], [1], [1, 2]]
    assert one.levels[1]["forwards"] == lowest.levels[2]["forwards"] == 0
    assert both.levels[2]["forwards"] > 0 < again.levels[1]["forwards"]


@pytest.mark.parametrize("start", [forked, *slow(dict)], ids=["forked", "spawned"])
def test_text_arrives_while_it_is_generated(text_family, tmp_path, start):
    arguments = {**ENGINE_DEFAULTS, "model": text_family.target, "skip_tokenizer_init": False}
    pieces: list[tuple[int, str]] = []
    with EngineProcess(arguments, log=tmp_path / "log", **start()) as engine:
        found = engine.generate(["ab", "cd"], GREEDY, lambda i, text: pieces.append((i, text)))
        # The pipe holds nothing else afterwards.
        assert engine.generate(["ab"], GREEDY).token_ids == found.token_ids[:1]
    assert len(pieces) > 4
    for i, text in enumerate(found.texts):
        assert "".join(piece for index, piece in pieces if index == i) == text


def test_engines_that_cannot_start_say_why(family, tmp_path):
    speculative = {"method": "hsd", "adaptive": False, "num_speculative_tokens": 2}
    wrong = {**ENGINE_DEFAULTS, "model": family.target, "speculative_config": speculative}
    log = tmp_path / "log"
    with (
        EngineProcess(wrong, "engine 'wrong'", log=log, **forked()) as engine,
        pytest.raises(UserError, match=r"^engine 'wrong' cannot start: .*levels.*log"),
    ):
        engine.generate([[1, 2]], {})
    assert "Traceback" in log.read_text()


def test_the_size_of_a_cache_is_the_one_that_is_given(monkeypatch):
    """An environment variable, which vLLM prefers, is for engines without one."""
    monkeypatch.setattr("vllm.LLM", mock.Mock())
    monkeypatch.setattr(engine_process, "_engine", None)
    monkeypatch.setattr(engine_process, "at_end", mock.Mock())
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "0")
    for arguments, expected in (({}, "40"), ({"kv_cache_memory_bytes": 1 << 26}, None)):
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
        engine_process._load(arguments)
        assert os.environ.get("VLLM_CPU_KVCACHE_SPACE") == expected


def test_nothing_is_preloaded_whose_path_the_loader_would_split(tmp_path, monkeypatch):
    for name, preloads in (("whole", True), ("in parts", False)):
        library = tmp_path / name / "lib" / "libiomp5.so"
        library.parent.mkdir(parents=True)
        library.touch()
        monkeypatch.setattr(sys, "prefix", str(tmp_path / name))
        assert ("LD_PRELOAD" in engine_environment()) == preloads
