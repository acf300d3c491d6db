"""vLLM engines in child processes.

vLLM supports one engine per process, so comparing engines takes several processes. The engine runs
inside its child (vLLM starts no further processes of its own), where a caller's functions can time
and inspect it.
"""

from __future__ import annotations

import itertools
import os
import pkgutil
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from vllm_hsd.config.platform import read_on_host
from vllm_hsd.errors import UserError
from vllm_hsd.tools.worker_process import (
    WorkerProcess,
    at_end,
    of_processes,
    reason_of,
    send_to_parent,
)

# Arguments of `vllm.LLM` that every engine gets unless the caller says otherwise: the counts of
# accepted tokens exist only with statistics on.
ENGINE_DEFAULTS = {"disable_log_stats": False, "seed": 0}
# Bytes of an engine's KV cache on a CPU, at most: vLLM's default leaves no room for a second one.
MAX_CPU_CACHE = 4 << 30

Prompt = str | Sequence[int]
# Token ids of several texts, and arguments of `vllm.SamplingParams` for each.
Ids = Sequence[Sequence[int]]
Params = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Generation:
    """Output and measurements of one `EngineProcess.generate`; lists are by prompt, in order.

    Attributes:
        seconds: wall time from the first request's arrival to the last token.
        cpu_seconds: CPU time of the process meanwhile, all threads together.
        first_token_seconds, last_token_seconds: time to it since the request's arrival.
        target_steps: steps of the target that emitted tokens.
        drafts, drafted, accepted: drafts that the target verified, their tokens, and how many of
            these it accepted.
        levels: counts of every level of a cascade, cheapest first (see `metrics.COUNTERS`); empty
            for other methods.
        sources: counts by name of the lowest level's sources, forced tokens among them (see
            `metrics.SOURCE_COUNTERS`); empty where it has one source and nothing was forced.
        step_lengths: tokens of every step of the target.
        finishes: vLLM's reason for every end.
    """

    token_ids: list[list[int]]
    texts: list[str]
    seconds: float
    cpu_seconds: float
    first_token_seconds: list[float]
    last_token_seconds: list[float]
    target_steps: list[int]
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    levels: list[dict[str, float]] = field(default_factory=list)
    sources: dict[str, dict[str, float]] = field(default_factory=dict)
    step_lengths: list[list[int]] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def num_target_steps(self) -> int:
        return sum(self.target_steps)


class EngineProcess(WorkerProcess):
    """A vLLM engine in a child process; use it as a context manager.

    The engine loads in the background: `wait`, or the first request, waits for it.

    Args:
        engine_args: arguments of `vllm.LLM` in addition to `ENGINE_DEFAULTS`.
        options: see `WorkerProcess`.
    """

    def __init__(
        self, engine_args: Mapping[str, Any], name: str = "engine", **options: Any
    ) -> None:
        super().__init__(name, **options)
        self.engine_args = {**ENGINE_DEFAULTS, **engine_args}
        self._ready = False

    def __enter__(self) -> Self:
        super().__enter__()
        self._send(_load, (self.engine_args,), {})
        return self

    def memory_bytes(self) -> int:
        """Host memory that its processes, a rank each, share with no other."""
        own = of_processes(lambda each: each.memory_full_info().uss, self._process.pid)
        return sum(own.values())

    def wait(self) -> None:
        """Wait until the engine has loaded; raises UserError if it cannot."""
        if not self._ready:
            self._receive("cannot start")
            self._ready = True

    def call(self, function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """As `WorkerProcess.call`: `function(llm, *args, **kwargs)` with the process's `vllm.LLM`.

        Args:
            function: or "module:name" of one whose module this process need not import.
        """
        self.wait()
        return super().call(_with_engine, function, *args, **kwargs)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Mapping[str, Any] | Params,
        on_text: Callable[[int, str], object] | None = None,
        *,
        max_concurrency: int | None = None,
    ) -> Generation:
        """Generate for all prompts.

        Args:
            prompts: texts or token ids.
            sampling_params: arguments of `vllm.SamplingParams`, one mapping for all prompts or
                one each; ADAPTER names a request's LoRA adapter.
            on_text: called with the index of a prompt and new text, as it is generated.
            max_concurrency: requests under way at a time, the next one arrives as one ends
                (default: all arrive at once).
        """
        shared = isinstance(sampling_params, Mapping)
        each = [sampling_params] * len(prompts) if shared else list(sampling_params)
        self.wait()
        arguments = list(prompts), each, on_text is not None, max_concurrency
        self._send(_with_engine, (generate, *arguments), {})
        return self._receive("failed", on_text and (lambda new: on_text(*new)))

    def select_levels(
        self,
        levels: Sequence[int],
        draft_lengths: Sequence[int],
        sources: Sequence[int] | None = None,
    ) -> None:
        """Draft with some of a cascade's levels from now on; one engine can so compare cascades.

        Args:
            levels: indices into the configuration's levels, cheapest first.
            draft_lengths: tokens that each of them passes on.
            sources: numbers of those of a `sources` level that draft, ascending; None: all.

        Raises:
            UserError: the engine does not serve method "hsd", or was not started for these.
        """
        chosen = None if sources is None else list(sources)
        self.call(_select_levels, list(levels), list(draft_lengths), chosen)


# What follows runs in the child process.

_engine: Any = None


def _load(engine_args: dict[str, Any]) -> None:
    global _engine
    if read_on_host():
        # There vLLM cannot load what a start has compiled ahead, see `known_faults`.
        os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")
    if "kv_cache_memory_bytes" in engine_args:
        # vLLM would take it in the place of the size that is given.
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    from vllm import LLM

    _engine = LLM(**_with_configs(engine_args))
    at_end.callback(_engine.llm_engine.engine_core.shutdown)


def _with_engine(function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
    called = pkgutil.resolve_name(function) if isinstance(function, str) else function
    return called(_engine, *args, **kwargs)


def _with_configs(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM reads some configurations from JSON on a command line only."""
    found = dict(engine_args)
    if isinstance(reasoning := found.get("reasoning_config"), Mapping):
        from vllm.config import ReasoningConfig

        found["reasoning_config"] = ReasoningConfig(**reasoning)
    return found


def configuration_error(engine_args: Mapping[str, Any]) -> str | None:
    """vLLM's objection to arguments of `vllm.LLM`, None where it accepts them.

    Imports vLLM into this process and loads no weights.
    """
    from vllm.engine.arg_utils import EngineArgs

    try:
        EngineArgs(**_with_configs({**ENGINE_DEFAULTS, **engine_args})).create_engine_config()
    except Exception as error:
        traceback.print_exc()
        return reason_of(error)
    return None


def generate(
    llm: Any,
    prompts: list[Prompt],
    sampling_params: list[Mapping[str, Any]],
    stream: bool = False,
    max_concurrency: int | None = None,
) -> Generation:
    """`EngineProcess.generate` there; with `stream`, new text is sent to the parent at once."""
    from vllm.sampling_params import RequestOutputKind

    from vllm_hsd.tools.level_metrics import (
        counted_since,
        level_counts,
        source_counts,
        sources_since,
    )

    params = [
        vllm_params(llm, {**given, "output_kind": RequestOutputKind.DELTA})
        for given in sampling_params
    ]
    count = len(prompts)
    token_ids: list[list[int]] = [[] for _ in prompts]
    texts = [""] * count
    arrived, first, last = [0.0] * count, [0.0] * count, [0.0] * count
    steps: list[list[int]] = [[] for _ in prompts]
    finishes = [""] * count
    before, levels_before, sources_before = _counts(llm), level_counts(), source_counts()
    cpu_began, began = processor_seconds(), time.perf_counter()
    engine = llm.llm_engine
    waiting = iter(range(count))

    def start(most: int | None) -> None:
        for i in itertools.islice(waiting, most):
            prompt, adapter = prompts[i], lora_request(sampling_params[i])
            request = prompt if isinstance(prompt, str) else {"prompt_token_ids": list(prompt)}
            arrived[i] = time.perf_counter()
            engine.add_request(str(i), request, params[i], lora_request=adapter)

    start(max_concurrency)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            i, sequence = int(output.request_id), output.outputs[0]
            if sequence.token_ids:
                last[i] = now - arrived[i]
                first[i] = first[i] or last[i]
                steps[i].append(len(sequence.token_ids))
            token_ids[i] += sequence.token_ids
            texts[i] += sequence.text
            finishes[i] = sequence.finish_reason or ""
            if stream and sequence.text:
                send_to_parent((i, sequence.text))
            if output.finished:
                start(1)
    seconds, cpu_ended = time.perf_counter() - began, processor_seconds()
    # One that has ended meanwhile is left out.
    cpu_seconds = sum(own - cpu_began.get(pid, 0.0) for pid, own in cpu_ended.items())
    drafts, drafted, accepted = (_counts(llm) - before).tolist()
    return Generation(
        token_ids,
        texts,
        seconds,
        cpu_seconds,
        first,
        last,
        [len(own) for own in steps],
        int(drafts),
        int(drafted),
        int(accepted),
        counted_since(levels_before),
        sources_since(sources_before),
        steps,
        finishes,
    )


def processor_seconds() -> dict[int, float]:
    """Processor time of this process and of those that it started, an engine's ranks: by pid."""

    def both(process: Any) -> float:
        times = process.cpu_times()
        return times.user + times.system

    return of_processes(both) | {os.getpid(): time.process_time()}


# Key of a request's LoRA adapter, a directory, among arguments of `vllm.SamplingParams`.
ADAPTER = "adapter"
_adapters: dict[str, int] = {}


def lora_request(given: Mapping[str, Any]) -> Any:
    """vLLM's request for the adapter `given[ADAPTER]`; None without one."""
    if not (path := given.get(ADAPTER)):
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(path, _adapters.setdefault(path, len(_adapters) + 1), path)


def vllm_params(llm: Any, given: Mapping[str, Any]) -> Any:
    """`vllm.SamplingParams`; structured outputs may be given as a mapping, ADAPTER is left out."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    arguments = {key: value for key, value in given.items() if key != ADAPTER}
    if llm.model_config.skip_tokenizer_init:
        arguments.setdefault("detokenize", False)
    if isinstance(grammar := arguments.get("structured_outputs"), Mapping):
        arguments["structured_outputs"] = StructuredOutputsParams(**grammar)
    return SamplingParams(**arguments)


def _counts(llm: Any) -> np.ndarray:
    """[3] drafts for the target so far, their tokens, and those that it accepted."""
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    counted = ("drafts", "draft_tokens", "accepted_tokens")
    names = (f"vllm:spec_decode_num_{name}" for name in counted)
    return np.array([values.get(name, 0) for name in names])


def _select_levels(llm: Any, *selected: list[int] | None) -> None:
    llm.collective_rpc(_select_in_worker, args=selected)


def _select_in_worker(worker: Any, *selected: list[int] | None) -> None:
    speculator: Any = getattr(worker.model_runner, "speculator", None)
    if not hasattr(speculator, "select_levels"):
        raise UserError('levels can be selected only with method "hsd", on a CPU')
    speculator.select_levels(*selected)
