"""What `vllm-hsd verify` is to verify, what it found, and its report: a page and verify.json."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from vllm_hsd.checked_files import write_json
from vllm_hsd.tools.audit import lean, sampled
from vllm_hsd.tools.audit.mutants import MUTANTS
from vllm_hsd.tools.audit.sampled import AFTER_DRAFT, DRAFTED, Setting, Texts
from vllm_hsd.tools.audit.seeded import Seeded
from vllm_hsd.tools.audit.self_test import Result
from vllm_hsd.tools.audit.statistics import (
    ERROR_PROBABILITY,
    FOLLOWS,
    ORDERS,
    POWER,
    Check,
    adjusted,
)
from vllm_hsd.tools.audit.workloads import STEADY, Found
from vllm_hsd.tools.cli import greedy, verify_workloads
from vllm_hsd.tools.cli.bench_jobs import Comparison, config_name
from vllm_hsd.tools.cli.bench_report import environment
from vllm_hsd.tools.cli.options import columns, rendered
from vllm_hsd.tools.cli.verify_workloads import p_text

ANSWER_TOKENS = 64
# Exit status where nothing was found and too little was drafted to say more.
NOT_ENOUGH = 3
# Share of the draft that a drafter equal to the target may lose to rounding.
LARGEST_LOSS = {"float32": 1e-3}
LARGEST_LOSS_16_BIT = 0.05
# Largest gap of two logits that rounding may exchange, in nats.
LARGEST_GAP = {**greedy.LARGEST_GAP, "float32": 1e-4}


@dataclass(frozen=True)
class Verification:
    """What to verify.

    Attributes:
        comparison: the model with no speculation and with the configuration to verify.
        settings: sampling parameters of the sampled text; may be none.
        num_tokens: tokens of every setting.
        greedy, equal_drafter: whether greedy text is compared, and the model is its own drafter.
        workloads: names, see `verify_workloads.NAMES`.
        as_served: whether the sampled text is drafted and batched as the configuration serves,
            and not as drafts show best.
        servers: URLs of running servers with and without speculation, instead of engines.
        drafter: the model that a server drafts with, if it was named.
        adapters: directories of LoRA adapters of the model.
    """

    comparison: Comparison
    settings: list[Setting]
    num_tokens: int
    greedy: bool
    equal_drafter: bool
    workloads: tuple[str, ...] = (STEADY,)
    as_served: bool = False
    servers: tuple[str, str] | None = None
    drafter: str | None = None
    adapters: tuple[str, ...] = ()


@dataclass
class Outcome:
    """What was found.

    Attributes:
        metadata: model, dtype, machine, versions, what was asked for.
        texts: the sampled text.
        seconds: wall time by part.
        untested: sentences on what could not be tested.
        equal_drafter: (drafted, accepted) with the model as its own drafter, None if not asked for.
        greedy_texts, greedy: greedy answers, and their comparison; None if not asked for.
        seeded: comparison of requests with seeds, None where the configuration promises nothing.
        served: the workloads beside the steady one; their checks are among `checks`.
    """

    verification: Verification
    metadata: dict[str, Any]
    texts: Texts
    checks: list[Check]
    seconds: dict[str, float]
    untested: list[str]
    equal_drafter: tuple[int, int] | None = None
    greedy_texts: Texts | None = None
    greedy: Seeded | None = None
    seeded: Seeded | None = None
    served: list[Found] = field(default_factory=list)

    @property
    def failed_checks(self) -> list[Check]:
        return sampled.failures(self.checks)

    @property
    def compared(self) -> dict[str, Seeded]:
        """Comparisons with the text of no speculation, by what was compared."""
        found = {"greedy text": self.greedy, "seeded text": self.seeded}
        found |= {f"text of {each.name}": each.compared for each in self.served}
        return {name: each for name, each in found.items() if each is not None}

    @property
    def differing(self) -> list[str]:
        """Texts that differ from those of no speculation otherwise than by rounding."""
        return [name for name, each in self.compared.items() if each.unexplained]

    @property
    def largest_gap(self) -> float:
        """Largest gap of two logits that rounding may exchange, in nats."""
        return LARGEST_GAP[self.metadata["dtype"]]

    @property
    def equal_drafter_failed(self) -> bool:
        if self.equal_drafter is None:
            return False
        drafted, accepted = self.equal_drafter
        bound = LARGEST_LOSS.get(self.metadata["dtype"], LARGEST_LOSS_16_BIT)
        return not drafted or 1 - accepted / drafted > bound

    @property
    def lossless(self) -> bool:
        """Whether nothing speaks against it."""
        return not (self.failed_checks or self.equal_drafter_failed or self.differing)

    @property
    def too_little_drafted(self) -> str | None:
        """Why the text cannot show what a run promises; None where it can."""
        if not (self.checks or self.seeded):
            answers = [each.exact for each in self.served]
            answers += [self.greedy_texts] if self.greedy_texts is not None else []
            # Servers count no drafts; a step of several tokens had one.
            steps = (n for found in answers for own in found.step_lengths for n in own)
            if not sum(found.drafted for found in answers) and max(steps, default=0) < 2:
                return "no greedy text has drafts in it" if self.compared else "nothing was tested"
        empty = [each.name for each in self.served if not each.drawn.num_offered]
        if empty and self.verification.settings:
            return f"no draft reached a place of {', '.join(empty)}"
        if not self.texts.num_tokens:
            return None
        reached = f"drafts reached {self.texts.num_offered} of {self.texts.num_tokens} places"
        if not self.texts.num_offered:
            return reached
        significance = ERROR_PROBABILITY / len(self.checks)
        for number, name in enumerate(self.texts.names):
            if self.texts.offered is not None:
                places, fewest = self.texts.offered_in(number), sampled.FEWEST_DRAFTED
                if places < fewest:
                    return f"{reached}; {name}: {places} of them, {fewest} are needed"
            own = [each for each in self.checks if each.leans and each.setting == name]
            # To what is nearly the target nothing can lean; others have to be judged.
            own = [each for each in own if each.parameter >= lean.PROMISED] or own
            if own and not any(lean.enough(each, significance) for each in own):
                least = min(each.detectable(significance) for each in own)
                finds = f"only from {least:.1%} on" if math.isfinite(least) else "not at any size"
                return (
                    f"{reached}; {name}: leaning to the drafts by {lean.PROMISED:.0%} of total "
                    f"variation for each of them is to be found, and is {finds}"
                )
        return None

    @property
    def status(self) -> int:
        if not self.lossless:
            return 1
        return NOT_ENOUGH if self.too_little_drafted else 0


def page(outcome: Outcome) -> str:
    """What was verified, a table per setting, and the verdict."""
    servers, texts = outcome.verification.servers, outcome.texts
    what = config_name(outcome.verification.comparison.configs[1])
    if servers:
        what = f"served at {servers[0]}; without speculation at {servers[1]}"
    parts: list[RenderableType] = [*environment(outcome.metadata), f"Configuration: {what}"]
    steady = [check for check in outcome.checks if check.setting in texts.names]
    if steady:
        drafts = ""
        if texts.drafted:
            rate = texts.accepted / texts.drafted
            drafts = f", {rate:.1%} of {texts.drafted} draft tokens accepted"
        if texts.num_offered:
            drafts += f", {texts.num_offered} at places that drafts reached"
        sentence = (
            f"Sampled text: {texts.num_tokens} tokens{drafts}. Each token's place in the "
            "target's own distribution, without speculation, must be uniform at every place of "
            "a step, whatever came before."
        )
        parts += ["", sentence, *tables(outcome.checks, texts.names)]
    if outcome.served:
        parts += ["", *verify_workloads.table(outcome.served, outcome.checks)]
    sentences = [*lean_sentences(outcome.checks, texts.names), *outcome.untested]
    sentences += verify_workloads.unmet(outcome.served)
    bound = f"bound for {outcome.metadata['dtype']} {outcome.largest_gap:g} nats"
    for name, found in outcome.compared.items():
        # Equal ones of a workload are in its line of the table.
        if found.partings or found in (outcome.greedy, outcome.seeded):
            sentences.append(_compared_sentence(name, found, bound))
    if outcome.equal_drafter is not None:
        drafted, accepted = outcome.equal_drafter
        share = accepted / drafted if drafted else 0.0
        result = "FAILS" if outcome.equal_drafter_failed else "as it must be but for rounding"
        sentences.append(
            f"The model as its own drafter: {share:.2%} of {drafted} tokens accepted, {result}."
        )
    for sentence in [*sentences, verdict(outcome)]:
        parts += ["", sentence]
    return rendered(parts).export_text()


def tables(checks: Sequence[Check], names: Sequence[str]) -> list[RenderableType]:
    """A line per named setting and place; of several checks the one with the lowest p-value."""
    p_values = adjusted([check.p_value for check in checks])
    significance = ERROR_PROBABILITY / len(checks)
    groups: dict[str, dict[str, list[tuple[float, Check]]]] = {}
    for p, check in zip(p_values, checks, strict=True):
        if check.setting not in names:
            continue
        name = check.hypothesis
        if check.leans:
            name = f"leans to {check.order}"
        elif check.method == "score" or name == FOLLOWS:
            name = _place(check)
        groups.setdefault(check.setting, {}).setdefault(name, []).append((p, check))
    parts: list[RenderableType] = []
    for setting, own in groups.items():
        rows = []
        for name, chosen in own.items():
            p, check = min(chosen, key=lambda pair: (pair[0], pair[1].p_value))
            least = check.detectable(significance)
            found = f"{least:.2%}" if math.isfinite(least) else "none"
            verdict = "" if p >= ERROR_PROBABILITY else "FAILS"
            figures = str(check.num_tokens), f"{check.shift:.2%}", found, p_text(p), verdict
            rows.append((f"  {name}", *figures))
        parts += ["", columns((setting, "tokens", "deviation", "would find", "p", ""), rows)]
    notes = (
        "deviation: probability on the wrong side of a quantile, at least (chance gives a little); "
        "of leaning, total variation towards what was drafted, or away from it. "
        f"would find: smallest deviation that is found with probability {POWER:g}. p: how often a "
        "lossless engine deviates as much, corrected for all "
        f"{len(checks)} checks; below {ERROR_PROBABILITY:g} fails. Place 0 is an answer's first "
        "token, place 1 the first of a step."
    )
    return [*parts, "", notes]


def lean_sentences(checks: Sequence[Check], names: Sequence[str]) -> list[str]:
    """For every drafter, how much leaning towards it would be found, in its worst named setting."""
    significance = ERROR_PROBABILITY / max(len(checks), 1)
    found = []
    overall = [check for check in checks if check.leans and check.setting in names]
    for name in dict.fromkeys(check.order for check in overall):
        own = [check for check in overall if check.order == name]
        worst = max(own, key=lambda check: check.detectable(significance))
        least = worst.detectable(significance)
        if not worst.faults or math.isinf(least):
            found.append(
                f"{name}: no power to find tokens that lean to it ({worst.setting}), since the "
                "target's own distribution hardly differs from its, or there are too few drafts."
            )
            continue
        variation = worst.faults[0][1]
        above, below = lean.factors(worst, significance)
        ratios = [f"{above:.3g} times too large"] * math.isfinite(above)
        ratios += [f"{below:.3g} of what it is to be"] * math.isfinite(below)
        ends = f"; an acceptance ratio that is {' or '.join(ratios)}" if ratios else ""
        found.append(
            f"Leaning to {name} (its distribution differs from the target's by {variation:.1%}) "
            f"would be found from {least:.2%} of total variation for each drafted position: a "
            f"token drawn from it in place of the target with probability "
            f"{least / variation:.2%}{ends} ({worst.setting})."
        )
    return found


def _compared_sentence(name: str, found: Seeded, bound: str) -> str:
    """How many answers differ from those without speculation, and by how little."""
    begins = f"{name.capitalize()}: {found.answers} answers, {found.tokens} tokens"
    if not found.partings:
        return f"{begins}, equal to no speculation."
    begins += f"; {len(found.partings)} answers differ from no speculation"
    gaps = [each.gap for each in found.partings if each.gap is not None]
    known = f"largest gap {max(gaps):.2g}, {bound}" if gaps else bound
    if not (bad := len(found.unexplained)):
        return f"{begins}, each first where two tokens nearly tie for the target itself ({known})."
    return f"{begins}, {bad} of them first where nothing ties ({known}): FAILS."


def verdict(outcome: Outcome) -> str:
    """One sentence: what failed, or what would have been found."""
    failed = sorted(outcome.failed_checks, key=lambda check: check.p_value)
    reasons = []
    for check in failed[:3]:
        claim = f"leans to {check.order}" if check.method == "score" else check.hypothesis
        reasons.append(f"{check.setting}: {claim} ({_place(check)}), {check.shift:.1%} off")
    reasons += [f"{text} differs from no speculation" for text in outcome.differing]
    if outcome.equal_drafter_failed:
        reasons.append("the model's own drafts are not accepted")
    if reasons:
        more = f"; and {len(failed) - 3} more" if len(failed) > 3 else ""
        return f"NOT LOSSLESS. {'; '.join(reasons)}{more}."
    if (reason := outcome.too_little_drafted) is not None:
        return (
            f"NOT ENOUGH WAS DRAFTED, so this is no pass: no deviation was found, but {reason}. "
            "Give more --tokens, or drafts that are longer or more often accepted."
        )
    if not outcome.checks:
        return "PASSED."
    significance = ERROR_PROBABILITY / len(outcome.checks)
    steady = [check for check in outcome.checks if check.setting in outcome.texts.names]
    if not steady:
        return "PASSED: no deviation from the target was found."
    drafted = any(check.place == DRAFTED for check in steady)
    least = max(
        check.detectable(significance)
        for check in steady
        if check.place == (DRAFTED if drafted else "all")
        and check.method == "KS"
        and check.order in ORDERS
    )
    places = "places that drafts reached" if drafted else "tokens"
    return (
        f"PASSED: no deviation from the target was found. One of {least:.1%} of the probability, "
        f"over all {places} of a setting, would have been."
    )


def write(outcome: Outcome, path: Path) -> None:
    checks = outcome.checks
    p_values = adjusted([check.p_value for check in checks])
    texts, verification = outcome.texts, outcome.verification
    document: dict[str, Any] = {
        "lossless": outcome.lossless,
        "enough_drafted": outcome.too_little_drafted is None,
        "verdict": verdict(outcome),
        **{k: v for k, v in outcome.metadata.items() if k not in ("num_prompts", "rounds")},
        "speculative_config": verification.comparison.configs[1] or None,
        "servers": verification.servers,
        "seconds": {name: round(value, 1) for name, value in outcome.seconds.items()},
        "error_probability": ERROR_PROBABILITY,
        "sampled": {
            "tokens": texts.num_tokens,
            "answers": len(texts.token_ids),
            "places_drafted": texts.num_offered,
            "drafted": texts.drafted,
            "accepted": texts.accepted,
            "checks": [
                {
                    **{k: v for k, v in dataclasses.asdict(check).items() if k != "faults"},
                    "adjusted_p_value": p,
                    "detectable": _finite(check.detectable(ERROR_PROBABILITY / len(checks))),
                    "passed": p >= ERROR_PROBABILITY,
                }
                for p, check in zip(p_values, checks, strict=True)
            ],
        },
        "power": {
            "probability": POWER,
            "leaning": lean_sentences(checks, texts.names),
            "untested": outcome.untested,
        },
    }
    if outcome.served:
        document["workloads"] = verify_workloads.document(outcome.served)
    for name, found in {"greedy": outcome.greedy, "seeded": outcome.seeded}.items():
        if found is not None:
            passed, bound = not found.unexplained, outcome.largest_gap
            document[name] = {**dataclasses.asdict(found), "bound": bound, "passed": passed}
    if outcome.equal_drafter is not None:
        drafted, accepted = outcome.equal_drafter
        passed = not outcome.equal_drafter_failed
        document["equal_drafter"] = {"drafted": drafted, "accepted": accepted, "passed": passed}
    write_json(path, document)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _place(check: Check) -> str:
    named = {"all": "all tokens", DRAFTED: "places that drafts reached", AFTER_DRAFT: AFTER_DRAFT}
    return named.get(check.place, f"place {check.place}")


def self_test_page(results: Sequence[Result]) -> str:
    """A line per sampler, and the verdict."""
    rows = []
    for result in results:
        p_values = adjusted([check.p_value for check in result.checks])
        pairs = zip(p_values, result.checks, strict=True)
        p, check = min(pairs, key=lambda pair: (pair[0], pair[1].p_value))
        name = result.name if result.as_expected else f"{result.name}: WRONG"
        if result.name in MUTANTS:
            name += f"\n    {MUTANTS[result.name].fault}"
        verdict = "found" if result.failed else "passed"
        rows.append((name, str(check.num_tokens), f"{check.shift:.2%}", p_text(p), verdict))
    wrong = [result.name for result in results if not result.as_expected]
    end = "SELF-TEST PASSED: the sound sampler passes, and every mutant is found."
    if wrong:
        end = f"SELF-TEST FAILED: {', '.join(wrong)}."
    return rendered([columns(("", "tokens", "deviation", "p", ""), rows), "", end]).export_text()
