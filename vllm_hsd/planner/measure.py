"""Measure a profile: laws with transformers, times through vLLM; resumable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from vllm_hsd.errors import UserError
from vllm_hsd.planner.laws import Effort, batches
from vllm_hsd.planner.laws import measure as measure_laws
from vllm_hsd.planner.models import Family, Sampling
from vllm_hsd.planner.parts import Parts
from vllm_hsd.planner.profile import Candidate, Profile, Prompts, Settings, from_laws, versions
from vllm_hsd.planner.prompts import encode, read_prompts
from vllm_hsd.planner.timing import Machine, measure_costs, settings_in_all


@dataclass(frozen=True)
class Task:
    """What to measure: the arguments of `vllm-hsd profile`."""

    target: str
    candidates: Sequence[str]
    early_exits: Sequence[int]
    prompts: Path | None
    max_prompts: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 16
    batch_sizes: Sequence[int] = (1,)
    engine_args: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    device: str | None = None
    costs: bool = True

    def named_candidates(self) -> list[Candidate]:
        """The candidates in the order of a profile: models, then early exits."""
        short = [Path(path).name for path in self.candidates]
        names = short if len(set(short)) == len(short) else self.candidates
        models = [
            # A server may start in another folder than the one that the paths were typed in.
            Candidate(name=name, model=str(Path(path).resolve()) if Path(path).is_dir() else path)
            for name, path in zip(names, self.candidates, strict=True)
        ]
        exits = [Candidate(name=f"exit {k}", early_exit=k) for k in self.early_exits]
        return [*models, *exits]


def measure_profile(task: Task, output: Path, console: Console) -> Profile:
    """Measure everything that `task` asks for.

    Finished parts are kept in a folder beside `output` until all is done.

    Raises:
        UserError: bad input, or an engine that failed; one sentence.
    """
    prompts = None if task.prompts is None else read_prompts(task.prompts)[: task.max_prompts]
    sampling = Sampling(task.temperature, task.top_p)
    effort = Effort(max_tokens=task.max_tokens, seed=task.seed)
    device = task.device or ("cuda" if torch.cuda.is_available() else "cpu")
    candidates = task.named_candidates()
    family = Family(task.target, task.candidates, task.early_exits, device)
    longest = family.longest - effort.text_tokens - effort.max_tokens
    if longest < 1:
        raise UserError(
            f"--max-draft-tokens is {effort.max_tokens}, but the shortest context of the models is "
            f"{family.longest} tokens, of which {effort.text_tokens} are for text: lower it."
        )
    if prompts is None:
        contexts = [_start(family.tokenizer, task.target)] * task.max_prompts
        console.print(
            "No --prompts: the target writes texts of its own; acceptance on your prompts differs."
        )
    else:
        contexts = [encode(family.tokenizer, prompt, longest) for prompt in prompts]
    settings = asdict(task) | asdict(effort) | versions() | {"prompts": _digest(contexts)}
    parts = Parts(output.with_name(output.name + ".parts"), json.loads(json.dumps(settings)))
    columns = *Progress.get_default_columns()[:3], MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("laws", total=batches(family, len(contexts), effort))
        laws = measure_laws(
            family,
            contexts,
            sampling,
            effort,
            parts,
            lambda what: progress.update(bar, advance=1, description=what),
        )
        costs = None
        if task.costs:
            machine = Machine(
                target=task.target,
                candidates=candidates,
                sizes=[family.size(member) for member in range(len(candidates))],
                engine_args=_defaults(device) | task.engine_args,
                batch_sizes=task.batch_sizes,
                max_tokens=task.max_tokens,
                temperature=task.temperature,
                top_p=task.top_p,
                seed=task.seed,
            )
            del family  # the engine needs the memory
            torch.cuda.empty_cache()
            bar = progress.add_task("times", total=settings_in_all(machine))
            costs = measure_costs(
                machine,
                contexts,
                parts.folder,
                lambda done: progress.update(bar, completed=done),
            )
    profile = from_laws(
        laws,
        target=task.target,
        candidates=candidates,
        settings=Settings(temperature=task.temperature, top_p=task.top_p),
        prompts=Prompts(
            file=task.prompts.name if task.prompts else "",
            prompts=len(contexts),
            contexts=laws.positions,
        ),
        costs=costs,
    )
    parts.delete()
    return profile


def _start(tokenizer: Any, target: str) -> list[int]:
    """The token that a text begins with."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return [token]
    raise UserError(f"the tokenizer of '{target}' marks no beginning of a text: give --prompts.")


def _defaults(device: str) -> dict[str, Any]:
    if device != "cpu":
        return {}
    # bfloat16 dies with an illegal instruction on some virtual machines; two engines share the
    # memory, and vLLM means the CPU's by this name.
    return {"dtype": "float32", "gpu_memory_utilization": 0.3}


def _digest(contexts: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps(contexts).encode()).hexdigest()
