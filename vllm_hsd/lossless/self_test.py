"""Whether `verify` finds errors: one sound sampler, which must pass, and mutants, which must not.

Runs on two random models that are made for it, a target and a drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_hsd.engine import EngineProcess
from vllm_hsd.lossless import sampled, seeded
from vllm_hsd.lossless.mutants import GRAMMAR, LETTERS, MUTANTS, TEMPERATURE, install
from vllm_hsd.lossless.sampled import Setting, Texts
from vllm_hsd.lossless.statistics import Check, rare_event_check

SOUND = "sound sampler"
DRAFT_LENGTH = 8
ANSWER_TOKENS = 64
BATCH_SIZE = 256
# Of every sampler and setting in the comparison of requests with seeds, its bound in nats, and the
# rate of differences that would be none.
SEEDED_TOKENS, LARGEST_GAP, RARE = 1024, 1e-4, 1e-9
# Standard deviation of the target's logits: many tokens are likely, so errors show.
PEAK = 2.0
# Factor on the drafter's temperature: its drafts are often wrong.
TEMPERATURE_SCALE = 0.5


@dataclass(frozen=True)
class Result:
    """The verdict on one sampler.

    Attributes:
        name: SOUND or a key of MUTANTS.
        checks: all of them.
        failed: those that a lossless sampler fulfils.
    """

    name: str
    checks: list[Check]
    failed: list[Check]

    @property
    def as_expected(self) -> bool:
        return bool(self.failed) == (self.name != SOUND)


def run(
    directory: Path,
    num_tokens: int,
    progress: Callable[[str], object],
    process_options: Mapping[str, Any] | None = None,
    mutants: Sequence[str] = tuple(MUTANTS),
) -> list[Result]:
    """Verify the sound sampler and the mutants.

    Args:
        directory: for the models and the engines' logs.
        num_tokens: tokens of every sampler and setting, times a mutant's weight.
        process_options: see `WorkerProcess`.
        mutants: names of them.

    Raises:
        UserError: an engine failed.
    """
    from vllm_hsd.lossless.tiny_models import build_family, byte_tokenizer

    progress("making two small models")
    tokenizer = byte_tokenizer()
    family = build_family(directory / "models", len(tokenizer), PEAK)
    for path in (family.target, family.mid):
        tokenizer.save_pretrained(path)
    prompts = [tokenizer.encode(text) for text in ("abc", "a cab", "head", "0123", "be a bee")]
    arguments = {
        "model": family.target,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": BATCH_SIZE,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 64 << 20,
        "structured_outputs_config": {"backend": "xgrammar"},
    }
    cascade = {
        "method": "hsd",
        "num_speculative_tokens": DRAFT_LENGTH,
        "levels": [{"model": family.mid, "temperature_scale": TEMPERATURE_SCALE}],
        "adaptive": False,
    }
    letters = tokenizer.convert_tokens_to_ids(list(LETTERS))
    plain = Setting(TEMPERATURE)
    constrained = Setting(
        TEMPERATURE, {"structured_outputs": GRAMMAR, "allowed_token_ids": letters}
    )
    settings = {SOUND: [plain, constrained]}
    settings |= {name: [constrained if MUTANTS[name].constrained else plain] for name in mutants}
    texts: dict[str, Texts] = {}
    exact: dict[str, Texts] = {}
    with _engine(directory, arguments, cascade, process_options) as engine:
        for name, own in settings.items():
            engine.call(install, None if name == SOUND else name)
            if name == SOUND or MUTANTS[name].seeded:
                plan = sampled.planned(prompts, own, SEEDED_TOKENS, ANSWER_TOKENS, seeded=1)
                exact[name] = sampled.generate(engine, plan, BATCH_SIZE, _named(progress, name))
            if name != SOUND and MUTANTS[name].seeded:
                continue
            count = num_tokens * (1 if name == SOUND else MUTANTS[name].weight)
            # Seeded requests follow another rule, which is verified exactly.
            plan = sampled.planned(prompts, own, count, ANSWER_TOKENS, seeded=0)
            texts[name] = sampled.generate(engine, plan, BATCH_SIZE, _named(progress, name))
    results = []
    drafter = arguments | {"model": family.mid}
    with (
        _engine(directory, arguments, None, process_options) as engine,
        _engine(directory, drafter, None, process_options, "drafter") as second,
    ):
        for seed, (name, own) in enumerate(settings.items()):
            found = []
            if name in exact:
                partings = seeded.compared(engine, exact[name], LARGEST_GAP)
                hypothesis = "with seeds, the text of no speculation"
                bad, answers = len(partings.unexplained), partings.answers
                found.append(rare_event_check("", hypothesis, bad, answers, RARE))
            if name not in texts:
                results.append(Result(name, found, sampled.failures(found)))
                continue
            sampled.add_drafter(
                second, texts[name], "mid", TEMPERATURE_SCALE, BATCH_SIZE, _named(progress, name)
            )
            ranges = sampled.scored(engine, texts[name], BATCH_SIZE, _named(progress, name))
            found += sampled.checks(own, texts[name], ranges, "float32", seed)
            results.append(Result(name, found, sampled.failures(found)))
            texts[name].rows.clear()
    return results


def _engine(
    directory: Path,
    arguments: dict[str, Any],
    cascade: dict[str, Any] | None,
    process_options: Mapping[str, Any] | None,
    name: str = "",
) -> EngineProcess:
    name = name or ("speculation" if cascade else "no speculation")
    if cascade:
        arguments = arguments | {"speculative_config": cascade}
    options = dict(process_options or {})
    environment = {**options.pop("environment", {}), "VLLM_USE_V2_MODEL_RUNNER": "0"}
    log = directory / "logs" / f"{name.replace(' ', '_')}.log"
    return EngineProcess(arguments, f"'{name}'", log=log, environment=environment, **options)


def _named(progress: Callable[[str], object], name: str) -> Callable[[str], object]:
    return lambda text: progress(f"{name}: {text}")
