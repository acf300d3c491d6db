"""The command `vllm-hsd verify`: on tiny models, its engines forked from a server, or on URLs."""

import functools
import json
from collections.abc import Callable

import pytest
from support import command_line
from support.engines import ENGINE_DEFAULTS, forked, prepare

from vllm_hsd.tools.cli import bench, verify_runs
from vllm_hsd.tools.engine import EngineProcess
from vllm_hsd.tools.worker_process import WorkerProcess

KEPT = ("enforce_eager", "kv_cache_memory_bytes")
ENGINE_ARGS = json.dumps({key: ENGINE_DEFAULTS[key] for key in KEPT})


@pytest.fixture
def judged(tmp_path) -> Callable[..., tuple[int, dict]]:
    """(exit status, verify.json if it is written) of the command with arguments."""
    always = "verify", "--dtype", "float32", "--workload", "steady", "--output", tmp_path

    def run(*arguments) -> tuple[int, dict]:
        status, written = command_line.run(*always, *arguments), tmp_path / "verify.json"
        return status, json.loads(written.read_text()) if written.exists() else {}

    return run


@pytest.fixture
def verify(monkeypatch, judged) -> Callable[..., tuple[int, dict]]:
    """The same for (model, speculative configuration, *options).

    Its processes have vLLM imported; a user's are spawned. `patch` is called in each of them.
    """
    monkeypatch.setattr(bench, "WorkerProcess", functools.partial(WorkerProcess, **forked()))

    def run(model, config, *options, temperatures="1", tokens=2048, patch=None) -> tuple[int, dict]:
        def engine_process(*args, environment=None, **options):
            options["prepare"] = functools.partial(prepare, patch)
            return EngineProcess(*args, **options, **forked(dict(environment or {})))

        monkeypatch.setattr(verify_runs, "EngineProcess", engine_process)
        arguments = ["--model", model, "--speculative-config", json.dumps(config)]
        arguments += ["--engine-args", ENGINE_ARGS]
        return judged(*arguments, "--temperatures", temperatures, "--tokens", tokens, *options)

    return run


@pytest.fixture
def error(tmp_path, capsys) -> Callable[..., str]:
    """What the command says at last of arguments that it refuses."""

    def said(*arguments: str) -> str:
        assert command_line.run("verify", "--output", tmp_path, *arguments) == 2
        return capsys.readouterr().err.splitlines()[-1]

    return said
