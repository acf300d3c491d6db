"""An engine in a process of its own that times every forward of its levels and every step.

Run as a module: JSON lines on stdin, first a job (the arguments of `vllm.LLM`, the prompts, how
to sample), then lists of settings to run; JSON lines on stdout, each {"progress": ...},
{"result": ...} or {"error": ...}. One engine loads every candidate as a level; each setting then
runs a cascade of some of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_hsd.engine_process import serve_parent


@dataclass
class Turn:
    """A forward of a level: `ms` of the forward, `turn_ms` until the next begins."""

    level: int
    role: str
    batch: int
    tokens: int
    ms: float
    turn_ms: float


@dataclass
class Step:
    """A step of the engine that only decodes, after `drafting_ms` of drafting for it.

    `ms` is its period without any drafting. The drafting for a request's first step includes the
    drafters' prefill.
    """

    batch: int
    tokens: int
    ms: float
    drafting_ms: float


@dataclass
class Recording:
    """What one setting showed; its steps, drafting included, emitted `emitted` tokens."""

    turns: list[Turn] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    emitted: int = 0


class Recorder:
    """Times the turns and steps of one worker's runner by wrapping its methods."""

    def __init__(self, runner: Any, clock: str):
        self.runner = runner
        self.seconds = time.thread_time if clock == "cpu" else time.perf_counter
        self.recording = Recording()
        # Since when a step that only decodes is under way, on what, after how much drafting.
        self.started: tuple[float, Any, float] | None = None
        self.proposed = 0.0
        self.drafting = 0.0
        self.emitted = 0
        self.open: list[tuple[int, int, int, float, float]] = []
        runner.execute_model = self._execute(runner.execute_model)
        self.levels: list[Any] = []
        if hasattr(getattr(runner, "drafter", None), "cascade"):
            self.levels = list(runner.drafter.hosted)
            for index, level in enumerate(self.levels):
                level.forward = self._forward(index, level.forward)
            runner.propose_draft_token_ids = self._propose(runner.propose_draft_token_ids)

    def clock(self) -> float:
        """Milliseconds; work that the device still owes is waited for."""
        if self.runner.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.runner.device)
        return self.seconds() * 1e3

    def take(self) -> Recording:
        """What was recorded since the last call."""
        if self.levels:
            # No further step marks the end of the last one; it ends with its sampling.
            self._end_step(self.proposed)
        taken, self.recording, self.started = self.recording, Recording(), None
        return taken

    def use(self, levels: list[int], draft_lengths: list[int]) -> None:
        """Serve the next requests with the cascade of these levels.

        Raises:
            RuntimeError: the runner hosts no cascade that this recorder knows.
        """
        if not self.levels:
            raise RuntimeError(
                "only cascades on vLLM's V1 runner can be timed: set VLLM_USE_V2_MODEL_RUNNER=0"
            )
        self.runner.drafter.select_levels(levels, draft_lengths)

    def _execute(self, execute):
        def timed(scheduler_output, *args, **kwargs):
            now = self.clock()
            self._end_step(now)
            cached = scheduler_output.scheduled_cached_reqs
            decoding = cached.req_ids and not (
                scheduler_output.scheduled_new_reqs
                or any(map(self._prefilling, cached.req_ids, cached.num_computed_tokens))
            )
            self.started = (now, scheduler_output, self.drafting) if decoding else None
            self.drafting = 0.0
            return execute(scheduler_output, *args, **kwargs)

        return timed

    def _prefilling(self, request: str, computed: int) -> bool:
        return computed < self.runner.requests[request].num_prompt_tokens

    def _end_step(self, now: float) -> None:
        if self.started is None:
            return
        began, scheduled, drafted = self.started
        ms = now - began - self.drafting
        tokens = scheduled.num_scheduled_tokens
        self.recording.steps.append(Step(len(tokens), sum(tokens.values()), ms, drafted))
        self.recording.emitted += self.emitted

    def _propose(self, propose):
        def timed(*args):
            self.open = []
            drafts = propose(*args)
            self.proposed = self.clock()
            if self.started is not None:
                self._close(self.proposed)
            # What comes before the first forward belongs to the step, like the sampling.
            self.drafting = self.proposed - (self.open[0][3] if self.open else self.proposed)
            self.emitted = sum(len(ids) for ids in args[1])
            return drafts

        return timed

    def _close(self, ended: float) -> None:
        starts = [*(began for *_, began, _ in self.open), ended]
        in_use = self.runner.drafter.cascade.levels
        for (index, batch, tokens, began, ms), then in zip(self.open, starts[1:], strict=True):
            role = "draft" if self.levels[index] is in_use[0] else "verify"
            self.recording.turns.append(Turn(index, role, batch, tokens, ms, then - began))

    def _forward(self, index, forward):
        def timed(tokens, rows, starts, counts, num_logits):
            began = self.clock()
            logits = forward(tokens, rows, starts, counts, num_logits)
            self.open.append((index, len(rows), int(counts.sum()), began, self.clock() - began))
            return logits

        return timed


def load(job: dict[str, Any]) -> Any:
    """The engine of a job: "engine" holds the arguments of LLM, "clock" is "wall" or "cpu"."""
    from vllm import LLM

    llm = LLM(**job["engine"])
    llm.collective_rpc(_install, args=(job["clock"],))
    return llm


def run(llm: Any, job: dict[str, Any], settings: list[dict], report) -> list[dict[str, Any]]:
    """Run every setting; returns one recording per setting.

    Args:
        llm: what `load` returned for `job`.
        job: "prompts" (what LLM.generate takes), "temperature", "top_p", "seed".
        settings: {"levels", "draft_lengths", "batch", "tokens", "first_prompt"} each, levels empty
            without speculation; a batch continues the prompts from the first one on.
        report: called with the number of settings that are done.
    """
    from vllm import SamplingParams

    recordings = []
    for done, setting in enumerate(settings, 1):
        if setting["levels"]:
            llm.collective_rpc(_use, args=(setting["levels"], setting["draft_lengths"]))
        prompts = job["prompts"]
        first = setting["first_prompt"]
        prompts = [prompts[(first + i) % len(prompts)] for i in range(setting["batch"])]
        params = SamplingParams(
            temperature=job["temperature"],
            top_p=job["top_p"],
            max_tokens=setting["tokens"],
            ignore_eos=True,
            seed=job["seed"] + first,
        )
        llm.generate(prompts, params, use_tqdm=False)
        recordings.append(llm.collective_rpc(_take)[0])
        report(done)
    return recordings


def _install(worker, clock: str) -> None:
    worker.hsd_recorder = Recorder(worker.model_runner, clock)


def _use(worker, levels: list[int], draft_lengths: list[int]) -> None:
    worker.hsd_recorder.use(levels, draft_lengths)


def _take(worker) -> dict[str, Any]:
    return asdict(worker.hsd_recorder.take())


def _serve(messages: Iterator[Any], answer: Callable[[dict], None]) -> None:
    """Load the engine that the first message describes, run the settings of every further one."""
    job = next(messages)
    llm = load(job)
    for settings in messages:
        recordings = run(llm, job, settings, lambda done: answer({"progress": done}))
        answer({"result": recordings})


if __name__ == "__main__":
    serve_parent(_serve)
