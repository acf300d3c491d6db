"""vLLM engines in processes of their own, driven one at a time.

Comparing configurations fairly needs several engines alive at once, so that their runs can take
turns. Run as a module, this file is such a process: it answers every request with one line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from vllm_hsd.engine_process import JsonLinesProcess, serve_parent
from vllm_hsd.errors import UserError

MAX_MODEL_LEN = 512
MAX_NUM_SEQS = 16


class EngineError(UserError):
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
        log.unlink(missing_ok=True)  # of an earlier engine
        self.process = JsonLinesProcess("vllm_hsd.engine_runs", log)
        self.process.send({"model": str(model), "speculative_config": speculative_config})

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exception) -> None:
        self.process.close()

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

    def use(self, draft_lengths: list[int], levels: list[int] | None = None) -> None:
        """Serve the next runs with some levels (default all) and these draft_lengths.

        See `CascadeProposer.use`; so one engine serves a sweep.
        """
        self._ask({"do": "use", "draft_lengths": draft_lengths, "levels": levels})

    def _ask(self, request: dict) -> dict:
        self.wait()
        self.process.send(request)
        return self._receive()

    def _receive(self) -> dict:
        answer = self.process.receive()
        if answer is None:
            raise EngineError(
                f"engine '{self.name}' ended with status {self.process.status()} before it "
                f"answered; read its log {self.log}."
            )
        if "error" in answer:
            raise EngineError(f"engine '{self.name}': {answer['error']} (log: {self.log})")
        return answer


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

    def use(self, draft_lengths: list[int], levels: list[int] | None) -> dict:
        self.llm.collective_rpc(_use, args=(draft_lengths, levels))
        return {}

    def _counts(self) -> tuple[int, list[dict[str, float]]]:
        from vllm_hsd.runner_v1.metrics import level_counts

        accepted = sum(
            int(metric.value)
            for metric in self.llm.get_metrics()
            if metric.name == "vllm:spec_decode_num_accepted_tokens"
        )
        return accepted, level_counts()


def _use(worker, draft_lengths: list[int], levels: list[int] | None) -> None:
    worker.model_runner.drafter.use(levels or list(range(len(draft_lengths))), draft_lengths)


def _serve(messages: Iterator[dict], answer: Callable[[dict], None]) -> None:
    """Load the engine that the first message describes, then answer the requests."""
    engine = _Engine(**next(messages))
    answer({"ready": True})
    for request in messages:
        answer(getattr(engine, request.pop("do"))(**request))


if __name__ == "__main__":
    serve_parent(_serve)
