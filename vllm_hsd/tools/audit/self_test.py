"""Whether `verify` finds errors: one sound sampler, which must pass, and mutants, which must not.

Runs on two random models that are made for it, a target and a drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vllm_hsd.tools.audit import sampled, seeded
from vllm_hsd.tools.audit.load import Load, apply
from vllm_hsd.tools.audit.mutants import GRAMMAR, MUTANTS, TEMPERATURE, Mutant, install
from vllm_hsd.tools.audit.sampled import Setting, Texts, under
from vllm_hsd.tools.audit.statistics import Check, rare_event_check
from vllm_hsd.tools.audit.workloads import Found, facts_of
from vllm_hsd.tools.audit.workloads import run as serve
from vllm_hsd.tools.engine import EngineProcess
from vllm_hsd.tools.worker_process import LOGS

SOUND = "sound sampler"
DRAFT_LENGTH = 8
ANSWER_TOKENS = 64
# With more requests in a step nothing is drafted.
BATCH_SIZE = 64
# Of every sampler and setting in the comparison of requests with seeds, its bound in nats, and the
# rate of differences that would be none.
SEEDED_TOKENS, LARGEST_GAP, RARE = 1024, 1e-4, 1e-9
# Of every workload.
WORKLOAD_TOKENS = 2048
# Standard deviation of the target's logits: many tokens are likely, so errors show.
PEAK = 2.0
# Factor on the drafter's temperature: its drafts are often wrong.
TEMPERATURE_SCALE = 0.5


@dataclass(frozen=True)
class Result:
    """All checks of one sampler (SOUND or a key of MUTANTS), and those that it fails."""

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
    """Verify the sound sampler and the mutants of these names.

    Args:
        directory: for the models and the engines' logs.
        num_tokens: tokens of every sampler and setting, times a mutant's weight.
        process_options: see `WorkerProcess`.
    """
    from vllm_hsd.tools.audit.tiny_models import build_family, byte_tokenizer

    progress("making two small models")
    tokenizer = byte_tokenizer()
    family = build_family(directory / "models", len(tokenizer), PEAK)
    for path in (family.target, family.mid):
        tokenizer.save_pretrained(path)
    prompts = [tokenizer.encode(text) for text in ("abc", "a cab", "head", "0123", "be a bee")]

    def engine(name: str, model: str = family.target, **arguments: Any) -> EngineProcess:
        arguments |= {
            "model": model,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_seqs": BATCH_SIZE,
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": 64 << 20,
            "structured_outputs_config": {"backend": "xgrammar"},
            "reasoning_config": {"reasoning_start_str": "^", "reasoning_end_str": "~"},
        }
        log = directory / LOGS / f"{name.replace(' ', '_')}.log"
        return EngineProcess(arguments, f"'{name}'", log=log, **(process_options or {}))

    cascade = {
        "method": "hsd",
        "num_speculative_tokens": DRAFT_LENGTH,
        "levels": [{"model": family.mid, "temperature_scale": TEMPERATURE_SCALE}],
    }
    plain = Setting(TEMPERATURE)
    constrained = Setting(TEMPERATURE, {"structured_outputs": GRAMMAR})
    samplers = {SOUND: Mutant("")} | {name: MUTANTS[name] for name in mutants}
    settings = {
        name: [plain, constrained] if name == SOUND else [constrained if m.constrained else plain]
        for name, m in samplers.items()
    }
    texts: dict[str, Texts] = {}
    exact: dict[str, Texts] = {}
    served: dict[str, list[Found]] = {}
    needed = dict.fromkeys(m.workload for m in samplers.values() if m.workload is not None)
    with engine("speculation", speculative_config=cascade) as speculating:
        speculating.call(apply, Load(fixed_lengths=True))
        for name, mutant in samplers.items():
            speculating.call(install, None if name == SOUND else name)
            planned = partial(sampled.planned, prompts, settings[name])
            generate = partial(
                sampled.generate, speculating, batch_size=BATCH_SIZE, progress=under(name, progress)
            )
            if name == SOUND or mutant.workload is not None:
                facts = speculating.call(facts_of, prompts)
                load = partial(serve, engine=speculating, facts=facts, prompts=prompts)
                served[name] = [
                    load(
                        each,
                        settings=[Setting(1.0)],
                        num_tokens=WORKLOAD_TOKENS,
                        kinds=(True, True),
                        fixed_lengths=True,
                        progress=under(name, progress),
                    )
                    for each in (needed if name == SOUND else [str(mutant.workload)])
                ]
                speculating.call(apply, Load(fixed_lengths=True))
            if mutant.workload is not None:
                continue
            if name == SOUND or mutant.seeded:
                exact[name] = generate(planned(SEEDED_TOKENS, ANSWER_TOKENS, seeded=1))
            if not mutant.seeded:
                # Seeded requests follow another rule, which is verified exactly.
                texts[name] = generate(planned(num_tokens * mutant.weight, ANSWER_TOKENS, seeded=0))
    results = []
    with engine("no speculation") as target, engine("drafter", family.mid) as drafter:
        for seed, name in enumerate(samplers):
            shown, found = under(name, progress), []
            if name in exact:
                found.append(_compared(target, exact[name], "with seeds,"))
            for each in served.pop(name, []):
                ranges = sampled.scored(target, each.drawn, BATCH_SIZE, shown)
                found += sampled.checks(each.drawn, ranges, "float32", seed)
                found.append(_compared(target, each.exact, f"{each.name}:"))
            if own := texts.pop(name, None):
                sampled.add_drafter(drafter, own, "mid", TEMPERATURE_SCALE, BATCH_SIZE, shown)
                ranges = sampled.scored(target, own, BATCH_SIZE, shown)
                found += sampled.checks(own, ranges, "float32", seed)
            results.append(Result(name, found, sampled.failures(found)))
    return results


def _compared(target: EngineProcess, texts: Texts, what: str) -> Check:
    """Check that greedy answers and answers with seeds are those of no speculation."""
    found = seeded.compared(target, texts, LARGEST_GAP)
    hypothesis, bad = f"{what} the text of no speculation", len(found.unexplained)
    return rare_event_check("", hypothesis, bad, found.answers, RARE)
