"""Engines on vLLM's V2 runner under Triton's interpreter; see `support.engines` for the jobs."""

import importlib
import tempfile
from functools import partial
from pathlib import Path

from support import engines, triton_cpu

from vllm_hsd.engine import EngineProcess
from vllm_hsd.errors import UserError

ENVIRONMENT = {**engines.ENVIRONMENT, "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
# Interpreted kernels cost milliseconds per row: few requests, small batches.
ENGINE_DEFAULTS = {"max_num_seqs": 8, "max_num_batched_tokens": 128}


def run_engine(engine: dict, jobs: dict[str, dict], *, patch: str | None = None) -> dict:
    """As `engines.run_engine`, on the V2 runner and in a process that is spawned for it."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "log")
        try:
            with EngineProcess(
                {**engines.ENGINE_DEFAULTS, **ENGINE_DEFAULTS, **engine},
                log=log,
                environment=ENVIRONMENT,
                prepare=partial(_prepare, patch),
            ) as process:
                return process.call(engines.run_jobs, jobs)
        except UserError as error:
            tail = log.read_text(errors="replace")[-engines.LOG_CHARACTERS :]
            raise RuntimeError(f"{error}\n{tail}") from error


def _prepare(patch: str | None) -> None:
    triton_cpu.prepare_vllm()
    if patch:
        module, function = patch.split(":")
        getattr(importlib.import_module(module), function)()
