"""Measurement of a profile: acceptance with transformers, latencies through vLLM; resumable."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID, TimeRemainingColumn
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from vllm_hsd.checked_files import written_whole
from vllm_hsd.errors import UserError, brief, quoted
from vllm_hsd.tools import system
from vllm_hsd.tools.dtype import cpu_defaults
from vllm_hsd.tools.planner.acceptance import Acceptances, measure_acceptance, num_batches
from vllm_hsd.tools.planner.latencies import Latencies
from vllm_hsd.tools.planner.models import ModelSet
from vllm_hsd.tools.planner.profile import Profile, Prompts, check_table_size, partial_directory
from vllm_hsd.tools.planner.prompts import encode, fit, read_prompts
from vllm_hsd.tools.planner.task import Task
from vllm_hsd.tools.planner.timing import Timing


class Stages:
    """A directory with the finished stages of a measurement, so that it can be resumed.

    It holds acceptance.safetensors, times by dtype and the engine's log.

    Args:
        fingerprint: of the measurement; see `Task.fingerprint`.

    Raises:
        UserError: the directory belongs to another measurement.
    """

    def __init__(self, directory: Path, fingerprint: str):
        self.directory = directory
        note = directory / "fingerprint"
        if not note.exists():
            with written_whole(note) as unfinished:
                directory.mkdir(parents=True, exist_ok=True)
                unfinished.write_text(fingerprint)
        elif note.read_text(errors="replace") != fingerprint:
            raise UserError(
                f"'{directory}' holds an unfinished measurement with other settings: finish "
                f"it with those, or delete the directory."
            )
        self.acceptance = directory / "acceptance.safetensors"

    def load_acceptance(self) -> Acceptances | None:
        """The measured acceptance, if this stage is finished; raises UserError if damaged."""
        if not self.acceptance.exists():
            return None
        try:
            tables = load_file(self.acceptance)
            return Acceptances(tables.pop("rates"), tables, int(tables.pop("positions")))
        except (OSError, SafetensorError, KeyError, ValueError):
            raise UserError(
                f"{quoted(str(self.acceptance))} is damaged: delete its directory and measure "
                "again."
            ) from None

    def save_acceptance(self, found: Acceptances) -> None:
        arrays = {"rates": found.rates, "positions": np.array(found.positions), **found.tables}
        with written_whole(self.acceptance) as unfinished:
            save_file(arrays, unfinished)


def measure_profile(
    task: Task,
    output: Path,
    console: Console,
    *,
    prompts_file: Path | None = None,
    max_prompts: int = 64,
    device: str | None = None,
    with_latencies: bool = True,
) -> Profile:
    """Measure everything that `task` asks for, and write the profile.

    Finished stages are kept in a directory next to `output` until all is done.

    Args:
        prompts_file: see `prompts.read_prompts`; None: the target writes texts of its own.
        device: torch device of the acceptance measurement; None: a GPU if there is one.

    Raises:
        UserError: bad input, an engine that failed, or a file that cannot be written.
    """
    if with_latencies and torch.cuda.is_available():
        raise UserError(
            "profile times the levels of an engine one by one, which works on CPUs alone: measure "
            "acceptance with --skip-timing, and compare cascades by `vllm-hsd bench`."
        )
    prompts = None if prompts_file is None else read_prompts(prompts_file)[:max_prompts]
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        message = f"--device {quoted(device)} cannot be used here ({brief(error)})."
        raise UserError(message) from error
    lookups = sum(candidate.is_lookup for candidate in task.candidates)
    check_table_size(len(task.candidates) + 1, lookups, task.max_draft_tokens)
    models = ModelSet(task.target, task.candidates, device)
    longest = models.longest - task.text_tokens - task.max_draft_tokens
    if longest < 1:
        raise UserError(
            f"--max-draft-tokens is {task.max_draft_tokens}, but the shortest context of the "
            f"models is {models.longest} tokens, of which {task.text_tokens} are for text: lower "
            f"it."
        )
    if prompts is None:
        contexts = [_start(models.tokenizer, task.target)] * max_prompts
        console.print(
            "No --prompts: the target writes texts of its own; acceptance on your prompts differs."
        )
    else:
        contexts, cut = fit([encode(models.tokenizer, prompt) for prompt in prompts], longest)
        if cut:
            console.print(cut)
    here = _machine() | {"device": device}
    stages = Stages(
        partial_directory(output),
        task.fingerprint(contexts, system.versions(), here),
    )
    columns = *Progress.get_default_columns()[:3], MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:

        def advance(bar: TaskID, what: str) -> None:
            """One step further; a line where there is no terminal to draw a bar on."""
            progress.update(bar, advance=1, description=what)
            if not console.is_terminal:
                state = progress.tasks[bar]
                console.print(f"{what}: {state.completed:.0f} of {state.total:.0f}")

        found = stages.load_acceptance()
        if found is None:
            total = num_batches(models, len(contexts), task)
            bar = progress.add_task("acceptance", total=total)
            found = measure_acceptance(models, contexts, task, lambda what: advance(bar, what))
            stages.save_acceptance(found)
        latencies = None
        if with_latencies:
            timed = replace(task, engine_args=cpu_defaults(task.target, task.engine_args))
            dtype = timed.engine_args["dtype"]
            console.print(f"dtype of the timed engine: {dtype}")
            timing = Timing(timed, contexts, models.vocabulary, stages.directory)
            del models  # the engine needs the memory
            timing_bar = progress.add_task("latencies", total=timing.num_settings)
            # A probe that is made again may find another dtype: no pass of one is the other's.
            store = stages.directory / f"timing-{dtype}.json"
            latencies = timing.measure(store, lambda: advance(timing_bar, "latencies"))
    file = prompts_file.name if prompts_file else ""
    described = Prompts(file=file, prompts=len(contexts), contexts=found.positions)
    profile = make_profile(task, found, described, latencies)
    profile.save(output)
    shutil.rmtree(stages.directory)
    return profile


def make_profile(
    task: Task, found: Acceptances, prompts: Prompts, latencies: Latencies | None
) -> Profile:
    # Sums of float32 probabilities may exceed 1.
    rates = np.minimum(found.rates, 1.0).round(6)
    profile = Profile(
        schema=3,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=system.versions(),
        machine=_machine(),
        target=task.target,
        candidates=list(task.candidates),
        sampling=task.sampling,
        prompts=prompts,
        max_draft_tokens=task.max_draft_tokens,
        rates=[[None if np.isnan(r) else r for r in row] for row in rates.tolist()],
        tables="",  # known when it is saved
        latencies=latencies,
    )
    profile.set_tables(found.tables)
    return profile


def _machine() -> dict[str, str | int]:
    here = system.machine() | {"threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        here["gpu"] = torch.cuda.get_device_name()
    return here


def _start(tokenizer: Any, target: str) -> list[int]:
    """The token that a text begins with."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return [token]
    raise UserError(f"the tokenizer of '{target}' marks no beginning of a text: give --prompts.")
