"""Nothing that a user gave as a secret stands in a log, a message or a file."""

import functools
import json

import pytest
from support import neighbours
from support.cascades import stock
from support.engines import ENGINE_DEFAULTS, forked, in_process, prepare, run_jobs
from support.level_files import cascade, every_kind, write_level_files
from support.openai_server import running_server

from vllm_hsd.tools.cli import bench
from vllm_hsd.tools.cli import main as cli
from vllm_hsd.tools.cli.bench_jobs import Comparison, Setup
from vllm_hsd.tools.engine import EngineProcess

TOKEN, PATH = "hf_marked_token", "/marked/secret/path"
SECRETS = (TOKEN, PATH)
MARKED = {"hf_token": TOKEN, "hf_overrides": {"marked_directory": PATH}}
STOCK = stock("ngram", prompt_lookup_max=4)


def tells(text: str) -> bool:
    """Whether a secret stands there."""
    return any(secret in text for secret in SECRETS)


def configurations(family, files) -> dict[str, dict]:
    return {
        "block": {**STOCK, "rejection_sample_method": "block"},
        "hierarchical": STOCK,
        "draft model": stock("draft_model", model=family.mid),
        "unknown key": {"method": "hsd", "num_speculative_tokens": 4, "lvls": []},
        **{
            kind: cascade(level)["speculative_config"]
            for kind, level in every_kind(family, files).items()
        },
    }


def printed(engines: dict[str, dict]) -> dict[str, str]:
    """Name -> all that the configuration or its refusal prints."""
    from vllm.engine.arg_utils import EngineArgs

    found = {}
    for name, arguments in engines.items():
        try:
            config = EngineArgs(**{**ENGINE_DEFAULTS, **arguments}).create_engine_config()
        except Exception as error:
            found[name] = f"{error} {error!r}"
        else:
            own = config.speculative_config
            levels = getattr(own, "level_configs", [])
            found[name] = f"{config} {own!r} {levels!r}"
    return found


def test_configurations_print_no_secret(family, tmp_path):
    files = write_level_files(family.target, tmp_path, vocab_size=64)
    engines = {
        name: {"model": family.target, "speculative_config": config, **MARKED}
        for name, config in configurations(family, files).items()
    }
    found = in_process(printed, {"engines": engines})
    assert found.keys() == engines.keys()
    assert {name: text for name, text in found.items() if tells(text)} == {}


@pytest.mark.parametrize("name", ["hierarchical", "model"])
def test_an_engine_writes_no_secret(name, family, tmp_path):
    """Its log at the finest level, and every file that it leaves."""
    files = write_level_files(family.target, tmp_path, vocab_size=64)
    engine = {"model": family.target, **ENGINE_DEFAULTS, **MARKED}
    engine["speculative_config"] = configurations(family, files)[name]
    log, cache = tmp_path / "log", tmp_path / "cache"
    environment = {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_CACHE_ROOT": str(cache)}
    options = {**forked(environment), "prepare": functools.partial(prepare, None)}
    with EngineProcess(engine, log=log, **options) as process:
        job = {"prompts": [[2, 3, 4]], "params": {"max_tokens": 8}}
        process.call(run_jobs, {"one": job})
    lines = log.read_text().splitlines()
    assert any("SpeculativeConfig(" in line for line in lines)
    assert [line for line in lines if not is_vllms(line) and tells(line)] == []
    assert not any(TOKEN in line for line in lines)
    files = [path for path in cache.rglob("*") if path.is_file()]
    assert [path for path in files if tells(path.read_text(errors="replace"))] == []


def is_vllms(line: str) -> bool:
    """Whether vLLM repeats its arguments there, as without a plugin."""
    return "non-default args" in line or "Overriding HF config" in line


def test_doctor_prints_no_secret(family, capsys):
    given = ["--model", family.target, "--speculative-config", json.dumps(STOCK)]
    marked = ["--hf-token", TOKEN, "--hf-overrides", json.dumps(MARKED["hf_overrides"])]
    assert cli.main(["doctor", *given, "--", *marked]) == 0
    printed = capsys.readouterr()
    assert "SpeculativeConfig(" in printed.out
    assert not tells(printed.out + printed.err)


def test_results_hold_no_secret(tmp_path):
    """What `bench` and `verify` write of a run, next to what they have measured."""
    given = {"dtype": "float32", **MARKED}
    comparison = Comparison("m", [None], ["p"], [1], [0.0], 8, 1, 1, given, tmp_path)
    found = bench.describe(comparison, Setup([None], device="cpu"))
    assert found["engine_args"] == {"dtype": "float32"} and not tells(str(found))


@pytest.mark.slow
def test_a_server_writes_no_secret(tmp_path):
    """But for the line in which vLLM repeats its arguments."""
    key = "marked-api-key"
    arguments = {"hf-token": TOKEN, "api-key": key, "skip-tokenizer-init": False}
    with running_server(neighbours.ENGINE["model"], tmp_path, STOCK, arguments) as server:
        pass
    lines = [line for line in server.log.read_text().splitlines() if not is_vllms(line)]
    assert [line for line in lines if key in line or TOKEN in line] == []
