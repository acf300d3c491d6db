"""What `vllm-hsd verify` reports: one page, and verify.json."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_hsd.checked_files import written_whole
from vllm_hsd.cli.bench_jobs import config_name
from vllm_hsd.cli.bench_report import WIDTH, environment
from vllm_hsd.lossless import lean
from vllm_hsd.lossless.mutants import MUTANTS
from vllm_hsd.lossless.sampled import AFTER_DRAFT
from vllm_hsd.lossless.seeded import Seeded
from vllm_hsd.lossless.self_test import Result
from vllm_hsd.lossless.statistics import (
    ERROR_PROBABILITY,
    FOLLOWS,
    ORDERS,
    POWER,
    Check,
    adjusted,
)

if TYPE_CHECKING:
    from vllm_hsd.cli.verify_results import Outcome


def page(outcome: Outcome) -> str:
    """What was verified, a table per setting, and the verdict."""
    data = outcome.metadata
    lines = [*environment(data), f"Configuration: {_configuration(outcome)}"]
    if outcome.checks:
        texts = outcome.texts
        drafts = ""
        if texts.drafted:
            rate = texts.accepted / texts.drafted
            drafts = f", {rate:.1%} of {texts.drafted} draft tokens accepted"
        lines += [
            "",
            *_wrap(
                f"Sampled text: {texts.num_tokens} tokens{drafts}. Each token's place in the "
                "target's own distribution, without speculation, must be uniform at every place of "
                "a step, whatever came before."
            ),
            *table(outcome.checks),
        ]
    for sentence in [*lean_sentences(outcome.checks), *outcome.untested]:
        lines += ["", *_wrap(sentence)]
    if outcome.verification.greedy:
        lines += ["", *_wrap(greedy_sentence(outcome))]
    if outcome.seeded is not None:
        lines += ["", *_wrap(seeded_sentence(outcome.seeded, outcome.largest_gap, outcome.dtype))]
    if outcome.equal_drafter is not None:
        lines += ["", *_wrap(equal_drafter_sentence(outcome))]
    return "\n".join([*lines, "", *_wrap(verdict(outcome))])


def table(checks: Sequence[Check]) -> list[str]:
    """A line per setting and place; of several checks the one with the lowest p-value."""
    p_values = adjusted([check.p_value for check in checks])
    significance = ERROR_PROBABILITY / len(checks)
    lines: list[str] = []
    for setting in dict.fromkeys(check.setting for check in checks):
        own = [
            (p, check)
            for p, check in zip(p_values, checks, strict=True)
            if check.setting == setting
        ]
        lines += ["", _line(setting, "tokens", "deviation", "would find", "p", "")]
        for name, chosen in _rows(own):
            p, check = min(chosen, key=lambda pair: (pair[0], pair[1].p_value))
            lines.append(
                _line(
                    f"  {name}",
                    str(check.num_tokens),
                    f"{check.shift:.2%}",
                    _share(check.detectable(significance)),
                    _p(p),
                    "" if p >= ERROR_PROBABILITY else "FAILS",
                )
            )
    notes = (
        "deviation: probability on the wrong side of a quantile, at least (chance gives a little); "
        "of leaning, total variation towards what was drafted, or away from it. "
        f"would find: smallest deviation that is found with probability {POWER:g}. p: how often a "
        "lossless engine deviates as much, corrected for all "
        f"{len(checks)} checks; below {ERROR_PROBABILITY:g} fails. Place 0 is an answer's first "
        "token, place 1 the first of a step."
    )
    return [*lines, "", *_wrap(notes)]


def _rows(own: list[tuple[float, Check]]) -> list[tuple[str, list[tuple[float, Check]]]]:
    groups: dict[str, list[tuple[float, Check]]] = {}
    for p, check in own:
        name = check.hypothesis
        if check.method == "score" and check.place == "all":
            name = f"leans to {check.order}"
        elif check.method == "score" or name == FOLLOWS:
            name = _place(check)
        groups.setdefault(name, []).append((p, check))
    return list(groups.items())


def lean_sentences(checks: Sequence[Check]) -> list[str]:
    """For every drafter, how much leaning towards it would be found, in its worst setting."""
    significance = ERROR_PROBABILITY / max(len(checks), 1)
    found = []
    overall = [check for check in checks if check.method == "score" and check.place == "all"]
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


def _share(value: float) -> str:
    return f"{value:.2%}" if math.isfinite(value) else "none"


def greedy_sentence(outcome: Outcome) -> str:
    """How many greedy answers differ, and by how little the target prefers its own tokens."""
    found, generations = outcome.greedy_results.differences, outcome.greedy_results.generations
    answers = [ids for job, own in generations.items() if job.config for ids in own.token_ids]
    begins = f"Greedy text: {len(answers)} answers, {sum(map(len, answers))} tokens"
    if not found:
        return f"{begins}, equal to no speculation."
    largest = max(each.gap for each in found)
    bad = len(outcome.unexplained)
    differ = f"{begins}; {len(found)} answers differ from no speculation"
    if not bad:
        return (
            f"{differ}, each first where the target's own two tokens nearly tie (largest gap "
            f"{largest:.2g} nats, bound for {outcome.dtype} {outcome.largest_gap:g})."
        )
    gap = f"a gap of {largest:.2g} nats" if math.isfinite(largest) else "one of them ended"
    return (
        f"{differ}, {bad} of them first where nothing ties ({gap}, bound for {outcome.dtype} "
        f"{outcome.largest_gap:g}): FAILS."
    )


def seeded_sentence(seeded: Seeded, bound: float, dtype: str) -> str:
    """How many answers with seeds differ from those without speculation."""
    begins = f"Seeded text: {seeded.answers} answers, {seeded.tokens} tokens"
    if not seeded.partings:
        return f"{begins}, equal to no speculation."
    begins += f"; {len(seeded.partings)} answers differ from no speculation"
    bad = len(seeded.unexplained)
    if not bad:
        return (
            f"{begins}, each first where the target's own two draws nearly tie (bound for {dtype} "
            f"{bound:g} nats)."
        )
    return f"{begins}, {bad} of them first where nothing ties (bound {bound:g} nats): FAILS."


def equal_drafter_sentence(outcome: Outcome) -> str:
    """What the target accepted of its own drafts."""
    assert outcome.equal_drafter is not None
    drafted, accepted = outcome.equal_drafter
    share = accepted / drafted if drafted else 0.0
    result = "FAILS" if outcome.equal_drafter_failed else "as it must be but for rounding"
    return f"The model as its own drafter: {share:.2%} of {drafted} tokens accepted, {result}."


def verdict(outcome: Outcome) -> str:
    """One sentence: what failed, or what would have been found."""
    failed = sorted(outcome.failed_checks, key=lambda check: check.p_value)
    reasons = [
        f"{check.setting}: {_claim(check)} ({_place(check)}), {check.shift:.1%} off"
        for check in failed[:3]
    ]
    if outcome.unexplained:
        reasons.append("greedy text differs from no speculation")
    if outcome.seeded is not None and outcome.seeded.unexplained:
        reasons.append("text with seeds differs from no speculation")
    if outcome.equal_drafter_failed:
        reasons.append("the model's own drafts are not accepted")
    if reasons:
        more = f"; and {len(failed) - 3} more" if len(failed) > 3 else ""
        return f"NOT LOSSLESS. {'; '.join(reasons)}{more}."
    if not outcome.checks:
        return "PASSED."
    significance = ERROR_PROBABILITY / len(outcome.checks)
    overall = [
        check
        for check in outcome.checks
        if check.place == "all" and check.method == "KS" and check.order in ORDERS
    ]
    least = max(check.detectable(significance) for check in overall)
    return (
        f"PASSED: no deviation from the target was found. One of {least:.1%} of the probability, "
        "over all tokens of a setting, would have been."
    )


def write(outcome: Outcome, path: Path) -> None:
    """Write verify.json."""
    checks = outcome.checks
    p_values = adjusted([check.p_value for check in checks])
    texts, verification = outcome.texts, outcome.verification
    document: dict[str, Any] = {
        "lossless": outcome.lossless,
        "verdict": verdict(outcome),
        **{k: v for k, v in outcome.metadata.items() if k not in ("num_prompts", "rounds")},
        "speculative_config": verification.comparison.configs[1] or None,
        "servers": verification.servers,
        "seconds": {name: round(value, 1) for name, value in outcome.seconds.items()},
        "error_probability": ERROR_PROBABILITY,
        "sampled": {
            "tokens": texts.num_tokens,
            "answers": len(texts.token_ids),
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
    }
    document["power"] = {
        "probability": POWER,
        "leaning": lean_sentences(checks),
        "untested": outcome.untested,
    }
    if verification.greedy:
        document["greedy"] = {
            "bound": outcome.largest_gap,
            "differences": [
                {
                    "answer": each.sequence,
                    "token": len(each.context),
                    "expected": each.expected,
                    "found": each.found,
                    "gap": _finite(each.gap),
                }
                for each in outcome.greedy_results.differences
            ],
            "passed": not outcome.unexplained,
        }
    if outcome.seeded is not None:
        document["seeded"] = {
            **dataclasses.asdict(outcome.seeded),
            "bound": outcome.largest_gap,
            "passed": not outcome.seeded.unexplained,
        }
    if outcome.equal_drafter is not None:
        drafted, accepted = outcome.equal_drafter
        document["equal_drafter"] = {
            "drafted": drafted,
            "accepted": accepted,
            "passed": not outcome.equal_drafter_failed,
        }
    with written_whole(path) as unfinished:
        unfinished.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def _configuration(outcome: Outcome) -> str:
    if servers := outcome.verification.servers:
        return f"served at {servers[0]}; without speculation at {servers[1]}"
    return config_name(outcome.verification.comparison.configs[1])


def _claim(check: Check) -> str:
    return f"leans to {check.order}" if check.method == "score" else check.hypothesis


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _place(check: Check) -> str:
    if check.place in ("all", AFTER_DRAFT):
        return "all tokens" if check.place == "all" else check.place
    return f"place {check.place}"


def _p(value: float) -> str:
    return f"{value:.2g}" if value >= 1e-3 else f"{value:.0e}"


def _line(name: str, *cells: str) -> str:
    widths = (9, 10, 11, 8, 6)
    padded = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)]
    return "".join([f"{name:40}", *padded]).rstrip()


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH)


def self_test_page(results: Sequence[Result]) -> str:
    """A line per sampler, and the verdict."""
    lines = [_line("", "tokens", "deviation", "p", "", "")]
    for result in results:
        p_values = adjusted([check.p_value for check in result.checks])
        p, check = min(
            zip(p_values, result.checks, strict=True), key=lambda pair: (pair[0], pair[1].p_value)
        )
        name = result.name if result.as_expected else f"{result.name}: WRONG"
        cells = (str(check.num_tokens), f"{check.shift:.2%}", _p(p))
        verdict = "found" if result.failed else "passed"
        lines.append(_line(name, *cells, verdict, ""))
        if result.name in MUTANTS:
            lines += [f"    {line}" for line in _wrap(MUTANTS[result.name].fault)]
    wrong = [result.name for result in results if not result.as_expected]
    end = "SELF-TEST PASSED: the sound sampler passes, and every mutant is found."
    if wrong:
        end = f"SELF-TEST FAILED: {', '.join(wrong)}."
    return "\n".join([*lines, "", *_wrap(end)])
