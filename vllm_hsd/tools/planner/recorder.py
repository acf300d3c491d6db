"""Times of every call of a level and of every step, taken inside an engine's process."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from vllm_hsd.tools.engine import generate
from vllm_hsd.tools.machine_load import CpuTimes


class Recorder:
    """Times the calls and steps of one worker's runner by wrapping its methods.

    Attributes:
        calls: a mapping for each call of a level: `level`, `role`, `batch`, `tokens`, `ms` of its
            forward or lookup, `call_ms` until the next begins.
        steps: one for each step that only decodes: `batch`, `tokens`, `ms` without any drafting,
            after `drafting_ms` for it. The drafting for a request's first step includes the
            drafters' prefill.
        emitted: tokens of these steps.
    """

    def __init__(self, runner: Any, clock: str):
        self.runner = runner
        self.seconds = time.thread_time if clock == "cpu" else time.perf_counter
        self.calls: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.emitted = 0
        # Start of the current step if it only decodes, its schedule, and the drafting before it.
        self.started: tuple[float, Any, float] | None = None
        self.proposed = 0.0
        self.drafting = 0.0
        self.emitting = 0
        # Level, role, requests, tokens, start and time of each call of a proposal.
        self.open: list[tuple[int, str, int, int, float, float]] = []
        runner.execute_model = self._execute(runner.execute_model)
        self.speculator: Any = getattr(runner, "speculator", None)
        self.drafts = hasattr(self.speculator, "select_levels")
        if self.drafts:
            self._wrap()

    def _wrap(self) -> None:
        program = self.speculator.program
        for index, level in enumerate(program.levels):
            if hasattr(level.runs, "forward"):
                level.runs.forward = self._forward(index, level.runs.forward)
                if (unread := getattr(level.runs, "unread", None)) is not None:
                    level.runs.read = self._read(index, level.runs.read, unread)
            else:
                program.levels[index] = replace(level, runs=self._lookup(level.runs))
        if program.sources is not None:
            offer = self._lookup(program.sources.offer)
            program.sources = program.sources._replace(offer=offer)
        self.speculator.propose = self._propose(self.speculator.propose)

    def clock(self) -> float:
        """Milliseconds."""
        return self.seconds() * 1e3

    def take(self) -> dict[str, Any]:
        """`calls`, `steps` and `emitted` since the last call."""
        if self.drafts:
            # No further step marks the end of the last one; it ends with its sampling.
            self._end_step(self.proposed)
        taken = {"calls": self.calls, "steps": self.steps, "emitted": self.emitted}
        self.calls, self.steps, self.emitted, self.started = [], [], 0, None
        return taken

    def _execute(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        states = self.runner.req_states

        def prefills(request: str, computed: int) -> bool:
            return bool(computed < states.prefill_len.np[states.req_id_to_index[request]])

        def timed(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            now = self.clock()
            self._end_step(now)
            cached = scheduler_output.scheduled_cached_reqs
            decoding = cached.req_ids and not (
                scheduler_output.scheduled_new_reqs
                or any(map(prefills, cached.req_ids, cached.num_computed_tokens))
            )
            self.started = (now, scheduler_output, self.drafting) if decoding else None
            self.drafting = 0.0
            return execute(scheduler_output, *args, **kwargs)

        return timed

    def _end_step(self, now: float) -> None:
        if self.started is None:
            return
        began, scheduled, drafted = self.started
        ms = now - began - self.drafting
        tokens = scheduled.num_scheduled_tokens
        step = {"batch": len(tokens), "tokens": sum(tokens.values()), "ms": ms}
        self.steps.append({**step, "drafting_ms": drafted})
        self.emitted += self.emitting

    def _propose(self, propose: Callable[..., Any]) -> Callable[..., Any]:
        sampled = list(inspect.signature(propose).parameters).index("num_sampled")

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.open = []
            drafts = propose(*args, **kwargs)
            self.proposed = self.clock()
            if self.started is not None:
                self._close(self.proposed)
            # What comes before the first call belongs to the step, like the sampling.
            self.drafting = self.proposed - (self.open[0][4] if self.open else self.proposed)
            self.emitting = int(args[sampled].sum())
            return drafts

        return timed

    def _close(self, ended: float) -> None:
        starts = [*(began for *_, began, _ in self.open), ended]
        for (level, role, batch, tokens, began, ms), then in zip(
            self.open, starts[1:], strict=True
        ):
            call = {"level": level, "role": role, "batch": batch, "tokens": tokens}
            self.calls.append({**call, "ms": ms, "call_ms": then - began})

    def _forward(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def timed(state: Any, op: Any, *rest: Any) -> Any:
            began = self.clock()
            logits = forward(state, op, *rest)
            tokens, ms = state.batch * op.query_length, self.clock() - began
            if op.draw == 0 and self.open and self.open[-1][0] == index:
                # Of what a head has read, which its first pass does not read again.
                *_, tokens, began, reading = self.open.pop()
                ms += reading
            self.open.append((index, self._role(index), state.batch, tokens, began, ms))
            return logits

        return timed

    def _read(self, index: int, read: Callable[..., Any], unread: Any) -> Callable[..., Any]:
        """Of a head that reads late, before its first pass of a proposal."""

        def timed(slots: Any, rows: Any) -> None:
            began, tokens = self.clock(), int(unread.count[slots].sum())
            read(slots, rows)
            if tokens:
                ms = self.clock() - began
                self.open.append((index, self._role(index), len(slots), tokens, began, ms))

        return timed

    def _role(self, index: int) -> str:
        return "verify" if index != self.speculator.program.selection.levels[0] else "draft"

    def _lookup(self, find: Callable[..., Any]) -> Callable[..., Any]:
        """Of a lookup, or of several and the choice between them."""

        def timed(state: Any, *args: Any, **kwargs: Any) -> Any:
            began = self.clock()
            found = find(state, *args, **kwargs)
            count = int((state.requested[0] > 0).sum())
            if count and getattr(self.speculator.lookup, "lookups_selected", True):
                self.open.append((0, "lookup", count, count, began, self.clock() - began))
            return found

        return timed


def install(llm: Any, clock: str) -> None:
    """Record from now on what a `vllm.LLM` does, unless that is so already; `clock`: see `Task`."""
    llm.collective_rpc(_install, args=(clock,))


def record(llm: Any, prompts: Sequence[list[int]], params: dict[str, Any]) -> dict[str, Any]:
    """Continue prompts of token ids, the end of those that are too long; the recording of it.

    Its `other_cores` and `steal` say what else the machine did (`machine_load.MachineLoad`).
    """
    room = llm.llm_engine.vllm_config.model_config.max_model_len - params["max_tokens"]
    before = CpuTimes.now()
    done = generate(llm, [ids[-max(room, 1) :] for ids in prompts], [params] * len(prompts))
    others, stolen = before.load_until_now(done.seconds, done.cpu_seconds)
    return llm.collective_rpc(_take)[0] | {"other_cores": others, "steal": stolen}


def _install(worker: Any, clock: str) -> None:
    if not hasattr(worker, "hsd_recorder"):
        worker.hsd_recorder = Recorder(worker.model_runner, clock)


def _take(worker: Any) -> dict[str, Any]:
    return worker.hsd_recorder.take()
