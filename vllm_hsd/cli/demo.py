"""`vllm-hsd demo`: no speculation, the best single draft and a cascade take turns on one target.

The target is widened (see benchmarks/models/widen.py): the function of a 5 M parameter model at
the cost of one with `TARGET_PARAMS`, since on a CPU the tiny one costs no more than its drafters.
"""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_hsd.cli import demo_report
from vllm_hsd.engine_runs import EngineProcess, Run
from vllm_hsd.errors import UserError

REPOSITORY = Path(__file__).parent.parent
TARGET_PARAMS = 300e6
PROMPTS = 4
TUNING_PROMPTS = 6
MAX_TOKENS = 96
TUNING_TOKENS = 48
ROUNDS = 3
TEMPERATURES = (0.0, 1.0)
# The sweep runs every candidate on a few prompts, and the best of each role on the others too.
FIRST_PROMPTS = 2
ENGINES = ("plain", "speculating")
FINALISTS = 3


class DemoError(UserError):
    """The demo cannot run; the message says why and what to do."""


@dataclass(frozen=True)
class Contender:
    """One way to serve the target.

    Attributes:
        role: "none", "single" or "cascade"; of several with one role, the fastest in the sweep
            takes part.
        levels: which levels of the setting's cascade draft, cheapest first.
        draft_lengths: the sweep, one list of draft_lengths per candidate, cheapest level first.
    """

    name: str
    role: str
    levels: list[int] = field(default_factory=list)
    draft_lengths: list[list[int]] = field(default_factory=lambda: [[]])


@dataclass(frozen=True)
class Setting:
    """What runs; the tuning prompts choose draft_lengths and take no part in the measurement.

    One engine serves without speculation, another one hosts all levels and serves with those of
    the contender whose turn it is.

    Attributes:
        speculative_config: as for `LLM`, with every level and the largest draft_lengths of the sweep.
    """

    target: Path
    speculative_config: dict
    contenders: list[Contender]
    prompts: list[str]
    tuning_prompts: list[str]
    out: Path
    note: str
    max_tokens: int = MAX_TOKENS
    tuning_tokens: int = TUNING_TOKENS
    rounds: int = ROUNDS
    temperatures: tuple[float, ...] = TEMPERATURES

    @property
    def runs(self) -> int:
        """Calls of an engine, for the progress bar."""
        candidates = Counter[str]()
        for contender in self.contenders:
            candidates[contender.role] += len(contender.draft_lengths)
        later = max(len(self.tuning_prompts) - FIRST_PROMPTS, 0)
        first = len(self.tuning_prompts) - later
        tuning = sum(
            count * first + min(count, FINALISTS) * later
            for role, count in candidates.items()
            if role != "none"
        )
        measured = self.rounds * len(self.prompts) * len(candidates)
        return len(ENGINES) + len(self.temperatures) * (tuning + measured)


@dataclass(frozen=True)
class Sample:
    """One measured run: prompt number `prompt` in round `round`."""

    role: str
    temperature: float
    round: int
    prompt: int
    run: Run


@dataclass
class Choice:
    """A candidate of the sweep at one temperature, and what it did on the tuning prompts."""

    contender: Contender
    draft_lengths: list[int]
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def main() -> int:
    """Run the demo; returns 1 if greedy outputs differ between configurations, else 0.

    Raises:
        DemoError: the models or a library of the extra 'bench' are not there.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise DemoError("matplotlib is not installed: pip install 'vllm-hsd[bench]'.")
    console = Console()
    return run(family_setting(REPOSITORY), console)


def family_setting(repository: Path) -> Setting:
    """The demo on the tiny family of a clone of the repository; widens the target if need be."""
    models = repository / "benchmarks" / "models"
    if not (models / "prompts.jsonl").exists():
        raise DemoError(
            f"no models in {models}: the demo runs from a clone of the repository, "
            "`pip install --editable .` or `make demo` there."
        )
    prompts = family_prompts(models)

    most = 16
    levels = [
        {"bigram": str(models / "bigram.npz"), "num_tokens": most},
        {"model": str(models / "small"), "num_tokens": most},
        {"model": str(models / "mid")},
    ]
    bigram, small, mid = range(len(levels))
    single = [[n] for n in range(2, 7)]
    contenders = [
        Contender("no speculation", "none"),
        Contender("small alone", "single", [small], single),
        Contender("mid alone", "single", [mid], single),
        Contender("small, mid", "cascade", [small, mid], [[4, 8], [6, 10], [6, 12], [8, 16]]),
        Contender("bigram, mid", "cascade", [bigram, mid], [[2, 8], [3, 8], [2, 10], [3, 12]]),
        Contender("bigram, small, mid", "cascade", [bigram, small, mid], [[2, 4, 8], [2, 6, 12]]),
    ]
    return Setting(
        target=widened(models, TARGET_PARAMS, repository / "results" / "models"),
        speculative_config={
            "method": "hsd",
            "num_speculative_tokens": most,
            "levels": levels,
        },
        contenders=contenders,
        prompts=prompts[:PROMPTS],
        tuning_prompts=prompts[-TUNING_PROMPTS:],
        out=repository / "results" / "demo",
        note=f"the target is widened: a 5 M parameter model's function at the cost of "
        f"{TARGET_PARAMS / 1e6:.0f} M parameters (zero weights added to its MLPs)",
    )


def family_prompts(models: Path) -> list[str]:
    """The prompts that come with the tiny family."""
    lines = (models / "prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def widened(models: Path, params: float, folder: Path) -> Path:
    """The widened target, made on first use (see benchmarks/models/widen.py)."""
    spec = importlib.util.spec_from_file_location("widen", models / "widen.py")
    widen = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(widen)
    folder.mkdir(parents=True, exist_ok=True)
    size = widen.intermediate_size_for(models / "target", params)
    return widen.widen(models / "target", folder / f"target-{params / 1e6:.0f}M", size)


def run(setting: Setting, console: Console) -> int:
    """Sweep, measure, report; returns the exit status."""
    setting.out.mkdir(parents=True, exist_ok=True)
    progress = Progress(
        TextColumn("{task.description:45}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    samples: list[Sample] = []
    choices: dict[float, dict[str, Choice]] = {}
    with ExitStack() as stack:
        configs = (None, setting.speculative_config)
        engines = {
            name: stack.enter_context(
                EngineProcess(name, setting.target, config, setting.out / "logs" / f"{name}.log")
            )
            for name, config in zip(ENGINES, configs, strict=True)
        }
        stack.enter_context(progress)
        task = progress.add_task("loading", total=setting.runs)
        for name, engine in engines.items():
            progress.update(task, description=f"loading the engine: {name}")
            engine.wait()
            # The first run of an engine is slower than all later ones.
            engine.generate(setting.tuning_prompts[:1], 1.0, setting.tuning_tokens)
            progress.advance(task)
        for temperature in setting.temperatures:
            step = _Step(setting, engines, temperature, progress, task)
            choices[temperature] = step.choose()
            samples += step.measure(choices[temperature])
    return demo_report.report(setting, choices, samples, console)


@dataclass
class _Step:
    """The part of the demo at one temperature."""

    setting: Setting
    engines: dict[str, EngineProcess]
    temperature: float
    progress: Progress
    task: int

    def choose(self) -> dict[str, Choice]:
        """The fastest candidate of every role on the tuning prompts."""
        roles: dict[str, list[Choice]] = {}
        for contender in self.setting.contenders:
            for draft_lengths in contender.draft_lengths:
                roles.setdefault(contender.role, []).append(Choice(contender, draft_lengths))
        prompts = list(enumerate(self.setting.tuning_prompts))
        chosen = {"none": roles.pop("none")[0]}
        for role, candidates in roles.items():
            self._tune(candidates, prompts[:FIRST_PROMPTS])
            candidates.sort(key=lambda choice: choice.tokens_per_second, reverse=True)
            self._tune(candidates[:FINALISTS], prompts[FIRST_PROMPTS:])
            chosen[role] = max(candidates[:FINALISTS], key=lambda choice: choice.tokens_per_second)
        return chosen

    def _tune(self, candidates: list[Choice], prompts: list[tuple[int, str]]) -> None:
        """Let the candidates take turns on the prompts."""
        for seed, prompt in prompts:
            for choice in candidates:
                engine = self._engine(choice)
                self._describe(f"sweep: {choice.contender.name} {choice.draft_lengths}")
                run = engine.generate([prompt], self.temperature, self.setting.tuning_tokens, seed)
                choice.tokens += run.tokens
                choice.seconds += run.seconds

    def measure(self, chosen: dict[str, Choice]) -> list[Sample]:
        """Every prompt in every round by all roles in turn, one prompt at a time."""
        roles = list(chosen)
        samples = []
        for round_ in range(self.setting.rounds):
            for i, prompt in enumerate(self.setting.prompts):
                # Nobody always runs first, or always after the same one.
                for shift in range(len(roles)):
                    role = roles[(round_ + i + shift) % len(roles)]
                    engine = self._engine(chosen[role])
                    self._describe(f"round {round_ + 1}: {chosen[role].contender.name}")
                    run = engine.generate(
                        [prompt], self.temperature, self.setting.max_tokens, seed=1000 * round_ + i
                    )
                    samples.append(Sample(role, self.temperature, round_, i, run))
        return samples

    def _engine(self, choice: Choice) -> EngineProcess:
        """The engine that serves a choice, made ready for it."""
        plain, speculating = (self.engines[name] for name in ENGINES)
        if not choice.contender.levels:
            return plain
        speculating.use(choice.draft_lengths, choice.contender.levels)
        return speculating

    def _describe(self, text: str) -> None:
        description = f"temperature {self.temperature:g}, {text}"
        self.progress.update(self.task, description=description, advance=1)
