"""The workloads of `vllm-hsd verify`: which are served, and their part of the page."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType

from vllm_hsd.errors import UserError
from vllm_hsd.tools.audit.sampled import DRAFTED
from vllm_hsd.tools.audit.statistics import ERROR_PROBABILITY, ORDERS, POWER, Check, adjusted
from vllm_hsd.tools.audit.workloads import STEADY, WORKLOADS, Found
from vllm_hsd.tools.cli.options import columns

NAMES = (STEADY, *WORKLOADS)


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """The workloads of `--workload`.

    Raises:
        UserError: names none.
    """
    for name in names:
        if name not in NAMES:
            raise UserError(f"--workload '{name}' is none of {', '.join(NAMES)}.")
    return tuple(name for name in NAMES if name in names)


def shares(names: Sequence[str], num_tokens: int, settings: int) -> tuple[int, int]:
    """(tokens of every setting of STEADY, of every other workload): half of all for the others."""
    others = [name for name in names if name != STEADY]
    if not others:
        return num_tokens, 0
    steady = num_tokens // 2 if STEADY in names else 0
    return steady, (num_tokens - steady) * max(settings, 1) // len(others)


def table(served: Sequence[Found], checks: Sequence[Check]) -> list[RenderableType]:
    """A line per workload, whose checks are those of the setting of its name; what columns say."""
    significance = ERROR_PROBABILITY / max(len(checks), 1)
    p_values = adjusted([check.p_value for check in checks])
    rows = []
    for each in served:
        own = [(p, c) for p, c in zip(p_values, checks, strict=True) if c.setting == each.name]
        lowest = min((p for p, _ in own), default=1.0)
        bad = each.compared.unexplained if each.compared else []
        verdict = "FAILS" if lowest < ERROR_PROBABILITY or bad else ""
        places = _places([c for _, c in own])
        found = max((c.detectable(significance) for c in places), default=math.inf)
        leaning = [c.detectable(significance) for _, c in own if c.leans]
        count = each.compared.tokens if each.compared else 0
        figures = (
            str(each.drawn.num_tokens),
            str(each.drawn.num_offered),
            _share(found),
            _share(min(leaning, default=math.inf)),
            str(count),
            # The largest share of wrong tokens that is missed with probability 1 - POWER.
            _share(-math.log(1 - POWER) / count if count else math.inf),
            p_text(lowest),
            verdict,
        )
        rows.append((f"{each.name}\n  {WORKLOADS[each.name].what}", *figures))
    headings = ("workload", "drawn", "drafted", "finds", "leans", "compared", "finds", "p", "")
    notes = (
        "drawn: tokens whose places must be uniform; drafted: those that a draft reached; finds, "
        "leans: the smallest deviation, and the smallest leaning, that is found; compared: greedy "
        "tokens and tokens with seeds, which are those of no speculation but for near ties; finds: "
        "the smallest share of wrong ones that is found."
    )
    return [columns(headings, rows), "", notes]


def _places(checks: Sequence[Check]) -> list[Check]:
    """The checks that all places together follow the target, drafted ones where they are known."""
    uniform = [c for c in checks if c.method == "KS" and c.order in ORDERS]
    drafted = [c for c in uniform if c.place == DRAFTED]
    return drafted or [c for c in uniform if c.place == "all"]


def p_text(value: float) -> str:
    """A p-value as tables show it."""
    return f"{value:.2g}" if value >= 1e-3 else f"{value:.0e}"


def _share(value: float) -> str:
    return f"{value:.1%}" if math.isfinite(value) else "none"


def unmet(served: Sequence[Found]) -> list[str]:
    """A sentence for every workload of which what it is for was not met."""
    return [
        f"{each.name}: its purpose was not met ({WORKLOADS[each.name].met} 0), so it shows nothing."
        for each in served
        if each.met == 0
    ]


def document(served: Sequence[Found]) -> list[dict[str, Any]]:
    """For verify.json."""
    return [
        {
            "name": each.name,
            "tokens": each.drawn.num_tokens,
            "places_drafted": each.drawn.num_offered,
            "compared": dataclasses.asdict(each.compared) if each.compared else None,
            "met": each.met,
        }
        for each in served
    ]
