"""The command `vllm-hsd verify`: on tiny models, its engines forked from a server, or on URLs."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.engines import ENGINE_DEFAULTS, forked, prepare

from vllm_hsd.tools.cli import bench, verify_runs
from vllm_hsd.tools.cli import main as cli
from vllm_hsd.tools.engine import EngineProcess
from vllm_hsd.tools.worker_process import WorkerProcess

KEPT = ("enforce_eager", "kv_cache_memory_bytes")
ENGINE_ARGS = json.dumps({key: ENGINE_DEFAULTS[key] for key in KEPT})


@pytest.fixture
def verify(monkeypatch, tmp_path) -> Callable[..., tuple[int, dict]]:
    """(exit status, verify.json) of the command for (model, speculative configuration, *options).

    Its processes have vLLM imported; a user's are spawned. `patch` is called in each of them.
    """
    patches: list[str | None] = [None]

    def engine_process(*args, environment=None, **options):
        prepared = functools.partial(prepare, patches[-1])
        return EngineProcess(*args, **options, prepare=prepared, **forked(dict(environment or {})))

    monkeypatch.setattr(verify_runs, "EngineProcess", engine_process)
    monkeypatch.setattr(bench, "WorkerProcess", functools.partial(WorkerProcess, **forked()))

    def run(model, config, *options, temperatures="1", tokens=2048, patch=None) -> tuple[int, dict]:
        patches.append(patch)
        arguments = ["verify", "--model", model, "--speculative-config", json.dumps(config)]
        arguments += ["--dtype", "float32", "--engine-args", ENGINE_ARGS]
        arguments += ["--temperatures", temperatures, "--tokens", str(tokens)]
        arguments += ["--workload", "steady", "--output", str(tmp_path)]
        status = cli.main([*arguments, *options])
        return status, json.loads(Path(tmp_path, "verify.json").read_text())

    return run


@pytest.fixture
def judged(tmp_path) -> Callable[..., tuple[int, dict]]:
    """(exit status, verify.json) of the command for (URL, URL without speculation, *options)."""

    def run(url: str, plain_url: str, *options: str) -> tuple[int, dict]:
        arguments = ["verify", "--url", url, "--plain-url", plain_url, "--dtype", "float32"]
        arguments += ["--workload", "steady", "--output", str(tmp_path)]
        status, written = cli.main([*arguments, *options]), tmp_path / "verify.json"
        return status, json.loads(written.read_text()) if written.exists() else {}

    return run


@pytest.fixture
def error(tmp_path, capsys) -> Callable[..., str]:
    """What the command says at last of arguments that it refuses."""

    def said(*arguments: str) -> str:
        assert cli.main(["verify", *arguments, "--output", str(tmp_path)]) == 2
        return capsys.readouterr().err.splitlines()[-1]

    return said
