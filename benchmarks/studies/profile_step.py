"""Where one engine step spends its time: forward passes against everything around them.

    python -m benchmarks.studies.profile_step      # minutes; writes results/profile_step/

A cascade and no speculation, on the zero-padded target (see benchmarks/models/zero_pad.py), at
temperature 1 and batch sizes 1, 4 and 16. Methods of the runner are timed from outside. Every part
is given in wall time and in CPU time of the engine's thread: where the two differ, the cores were
busy with other work.
"""

import argparse
import time
from collections import defaultdict
from typing import Any

import numpy as np

from benchmarks.common import (
    ENGINE_ARGS,
    MODELS,
    RESULTS,
    padded_target,
    prompts,
    write_csv,
)
from benchmarks.studies.configs import fixed
from vllm_hsd.engine import EngineProcess

OUTPUT = RESULTS / "profile_step"
BATCHES = (1, 4, 16)
MAX_TOKENS = 48
OUTSIDE = "all outside forward passes"
CONFIGURATIONS = {
    "no speculation": None,
    "small, mid": fixed(
        {"model": str(MODELS / "small"), "num_tokens": 4}, {"model": str(MODELS / "mid")}
    ),
}


class Clock:
    """Wall and CPU seconds per part and step; a part inside another is not taken out of it."""

    def __init__(self) -> None:
        self.steps: list[dict[str, np.ndarray]] = []
        self.calls: list[dict[str, int]] = []
        self.recording = False

    def start_step(self) -> None:
        self.steps.append(defaultdict(lambda: np.zeros(2)))
        self.calls.append(defaultdict(int))

    def wrap(self, owner, method: str, part: str) -> None:
        """Time every call of `owner.method` as `part`."""
        inner = getattr(owner, method)

        def timed(*args, **kwargs):
            if not self.recording:
                return inner(*args, **kwargs)
            before = np.array([time.perf_counter(), time.thread_time()])
            try:
                return inner(*args, **kwargs)
            finally:
                after = np.array([time.perf_counter(), time.thread_time()])
                self.steps[-1][part] += after - before
                self.calls[-1][part] += 1

        setattr(owner, method, timed)


def profile(llm: Any, name: str) -> list[dict]:
    """Rows of the table for one configuration; runs in the engine's process."""
    clock = Clock()
    levels = llm.collective_rpc(instrument, args=(clock,))[0]
    return [
        row
        for batch in BATCHES
        for row in profile_batch(llm.llm_engine, clock, name, levels, prompts(batch))
    ]


def instrument(worker, clock: Clock) -> int:
    """Time the parts of a worker's step; returns the number of levels."""
    runner = worker.model_runner
    clock.wrap(runner, "_model_forward", "target forward")
    clock.wrap(runner.model, "compute_logits", "target forward")
    clock.wrap(runner, "_sample", "target sampler")
    clock.wrap(worker, "execute_model", "worker")
    clock.wrap(worker, "sample_tokens", "worker")
    proposer = getattr(runner, "drafter", None)
    if proposer is None:
        return 0
    clock.wrap(runner, "propose_draft_token_ids", "proposing")
    for i, level in enumerate(hosted.level for hosted in proposer.hosted):
        clock.wrap(level, "forward", f"level {i} forward")
        clock.wrap(level, "run", f"level {i} model")
        clock.wrap(level, "logits", f"level {i} model")
    return len(proposer.hosted)


def profile_batch(engine, clock, name: str, levels: int, texts: list[str]) -> list[dict]:
    """Rows of one batch size."""
    from vllm import SamplingParams

    for i, text in enumerate(texts):
        params = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        engine.add_request(f"{len(texts)}-{i}", text, params)
    clock.steps, clock.calls = [], []
    inner_step = engine.step
    while engine.has_unfinished_requests():
        clock.recording = True
        clock.start_step()
        before = np.array([time.perf_counter(), time.thread_time()])
        inner_step()
        clock.steps[-1]["step"] += np.array([time.perf_counter(), time.thread_time()]) - before
        clock.recording = False
    # The first step is the prefill; in the last ones requests end and the batch shrinks.
    full = slice(1, max(2, len(clock.steps) * 3 // 4))
    return table_rows(name, len(texts), levels, clock.steps[full], clock.calls[full])


def table_rows(name, batch, levels, steps, calls) -> list[dict]:
    """Parts that do not overlap and sum to the step, and how often the levels ran."""
    parts: dict[str, list[np.ndarray]] = defaultdict(list)
    for step in steps:
        forwards = sum(step[f"level {i} forward"] for i in range(levels)) + np.zeros(2)
        parts["whole step"].append(step["step"])
        parts["target forward"].append(step["target forward"])
        for i in range(levels):
            forward, model = step[f"level {i} forward"], step[f"level {i} model"]
            parts[f"level {i} model"].append(model)
            parts[f"level {i} attention metadata"].append(forward - model)
        if levels:
            parts["level sampling and verification"].append(step["proposing"] - forwards)
        parts["target sampler"].append(step["target sampler"])
        known = step["target forward"] + step["target sampler"] + step["proposing"]
        parts["rest of the runner"].append(step["worker"] - known)
        parts["scheduler and output"].append(step["step"] - step["worker"])
    parts[OUTSIDE] = np.array(parts["whole step"]) - sum(
        np.array(values) for part, values in parts.items() if part.endswith((" forward", " model"))
    )
    rows = []
    for part, values in parts.items():
        milliseconds = 1e3 * np.array(values)
        row = {"configuration": name, "batch": batch, "part": part, "steps": len(steps)}
        forward = part.removesuffix(" model") + " forward"
        counts = [step_calls.get(forward, 0) for step_calls in calls]
        share = np.array(values)[:, 0] / np.array(parts["whole step"])[:, 0]
        row["calls"] = f"{np.mean(counts):.1f}" if any(counts) else ""
        row["share_of_step"] = f"{np.median(share):.3f}"
        for column, which in (("wall_ms", 0), ("cpu_ms", 1)):
            low, median, high = np.percentile(milliseconds[:, which], (25, 50, 75))
            row |= {
                column: f"{median:.2f}",
                f"{column}_quarter1": f"{low:.2f}",
                f"{column}_quarter3": f"{high:.2f}",
            }
        rows.append(row)
    return rows


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    model = {"model": str(padded_target())}
    rows = []
    for name, config in CONFIGURATIONS.items():
        engine_args = {**ENGINE_ARGS, **model, "speculative_config": config}
        with EngineProcess(engine_args, name, log=OUTPUT / "engine.log") as engine:
            rows += engine.call(profile, name)
    write_csv(OUTPUT / "profile_step.csv", rows)
    for row in rows:
        print(
            f"{row['configuration']:15} batch {row['batch']:2} {row['part']:32} "
            f"{row['calls']:>5} calls {row['share_of_step']:>6} {row['wall_ms']:>8} ms wall "
            f"({row['wall_ms_quarter1']}-{row['wall_ms_quarter3']})  {row['cpu_ms']:>7} ms CPU"
        )


if __name__ == "__main__":
    main()
