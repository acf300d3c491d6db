"""What a step spends its time on: the target's pass, logits, drafting, verification, the rest.

    python -m benchmarks.studies.step_shares --prompts DIR     # or `make bench-step-shares`

Table A.4 of "Overcoming Joint Intractability with Lossless Hierarchical Speculative Decoding" on
SmolLM2. Requests come one at a time; their first step, which reads the prompt, is a part of its
own.
"""

import operator
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from benchmarks import sweep
from benchmarks.common import RESULTS, on_worker, write_csv
from benchmarks.models.quantize import int8_copy
from benchmarks.models.smollm2 import smollm2
from benchmarks.shared_engines import SharedEngines
from benchmarks.studies.configs import EAGLE3, NGRAM, SUFFIX, fixed, vllms_own
from vllm_hsd.tools.cli.options import numbers
from vllm_hsd.tools.engine import vllm_params

PREFILL, REST = "prefill", "scheduling and the rest"


def configs() -> dict[str, sweep.Config]:
    """vLLM's own methods, single drafters, a cascade, and several sources in four rows."""
    copy = {"model": os.path.relpath(int8_copy(smollm2()))}
    return {
        **vllms_own(),
        "suffix 4 < int8 copy 12": fixed({**SUFFIX, "num_tokens": 4}, copy, length=12),
        "int8 copy 8": fixed(copy),
        "suffix 8": fixed(SUFFIX),
        "head 3": fixed(EAGLE3, length=3),
        "lookups, 4 rows": fixed({"sources": [NGRAM, SUFFIX], "branches": 4}),
    }


def seconds_by_part(
    llm: Any, prompts: Sequence[Sequence[int]], params: Mapping[str, Any]
) -> dict[str, float]:
    """Answer prompts one after another; runs in the engine's process."""
    runner = on_worker(llm, operator.attrgetter("model_runner"))
    total: Counter[str] = Counter()
    for index, prompt in enumerate(prompts):
        llm.llm_engine.add_request(
            str(index), {"prompt_token_ids": list(prompt)}, vllm_params(llm, params)
        )
        began = time.perf_counter()
        llm.llm_engine.step()
        total[PREFILL] += time.perf_counter() - began
        began = time.perf_counter()
        with _timed(runner) as parts:
            while llm.llm_engine.has_unfinished_requests():
                llm.llm_engine.step()
        total += parts
        total[REST] += time.perf_counter() - began - parts.total()
    return dict(total)


@contextmanager
def _timed(runner: Any) -> Iterator[Counter[str]]:
    """Seconds in parts of the runner, without those of parts that they call."""
    parts = {
        "inputs and KV blocks": [
            (runner, "update_requests"),
            (runner, "prepare_inputs"),
            (runner, "prepare_attn"),
        ],
        "target's pass": [(runner.model, "forward")],
        "target's logits": [(runner.model, "compute_logits")],
        "verification and sampling": [(runner, "sample")],
        "drafting": [(runner.speculator, "propose")] if runner.speculator else [],
    }
    seconds: Counter[str] = Counter()
    inside = [0.0]

    def timed(part: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            inside.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                whole = time.perf_counter() - began
                seconds[part] += whole - inside.pop()
                inside[-1] += whole

        return call

    with ExitStack() as stack:
        for part, functions in parts.items():
            for owner, name in functions:
                stack.enter_context(patch.object(owner, name, timed(part, getattr(owner, name))))
        yield seconds


def main() -> int:
    parser = sweep.options(__doc__, RESULTS / "step_shares", sets=True)
    parser.add_argument("--temperatures", type=numbers, default=[0.0, 1.0])
    options = parser.parse_args()
    prompts, _ = sweep.read_sets(options.prompts, options.num_prompts)
    rows = []
    with sweep.started(
        options,
        configs(),
        prompts,
        temperatures=options.temperatures,
        engines_class=SharedEngines,
        kv_cache_memory_bytes=1 << 28,
    ) as engines:
        for temperature in options.temperatures:
            for index, config in enumerate(engines.names):
                params = {**engines.params, "temperature": temperature}
                ids = engines.setup.prompt_ids
                engine = engines.engines.get(index)
                engine.generate([ids[0]], params)  # the first answer compiles
                found = engine.call(seconds_by_part, ids, params)
                decoding = sum(found.values()) - found[PREFILL]
                row = {"temperature": temperature, "configuration": config, "answers": len(ids)}
                row["ms of decoding per token"] = (
                    1e3 * decoding / len(ids) / (options.max_tokens - 1)
                )
                shares = {part: value / decoding for part, value in found.items()}
                rows.append(row | dict(sorted(shares.items())) | {"dtype": options.dtype})
                print(rows[-1], flush=True)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    write_csv(options.output / "step_shares.csv", [dict.fromkeys(columns, 0.0) | r for r in rows])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
