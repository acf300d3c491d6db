"""`vllm-hsd watch`: what a running server drafts, accepts and spends, from its /metrics alone."""

from __future__ import annotations

import argparse
import http.client
import itertools
import math
import time
import urllib.request
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vllm_hsd.errors import UserError, brief

TIMEOUT = 10
LONGEST_INTERVAL = 86400
HISTORY = 60  # refreshes of the curve of tokens per second
BARS = " ▁▂▃▄▅▆▇█"
GENERATED = "vllm:generation_tokens_total"
DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
BY_PLACE = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
COLUMNS = ("drafted/s", "accepted", "drafts/s", "mean length", "none drafted", "share of time")
NO_CASCADE = "This server counts no levels: it runs no cascade, or has not drafted yet."
_SUMMED = ("engine", "model_name")


@dataclass(frozen=True)
class Snapshot:
    """One reading of /metrics.

    Attributes:
        seconds: when it was read, on a clock that only moves forward.
        samples: (name, labels but for the engine's and the model's) -> value, engines summed.
    """

    seconds: float
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float]

    @staticmethod
    def parse(text: str, seconds: float) -> Snapshot:
        """Reads Prometheus' text format."""
        samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not math.isfinite(sample.value):
                    continue
                labels = {k: v for k, v in sample.labels.items() if k not in _SUMMED}
                key = sample.name, frozenset(labels.items())
                samples[key] = samples.get(key, 0.0) + sample.value
        return Snapshot(seconds, samples)

    def value(self, name: str, **labels: str) -> float:
        """A sample; 0 where the server has none."""
        return self.samples.get((name, frozenset(labels.items())), 0.0)

    def labels(self, name: str, label: str) -> list[str]:
        """Values of a label of a metric, numbers in their order."""
        found = {dict(labels).get(label, "") for key, labels in self.samples if key == name}
        return sorted(found - {""}, key=lambda v: (0, int(v)) if v.isdecimal() else (1, v))


@dataclass(frozen=True)
class Change:
    """What happened between two snapshots."""

    before: Snapshot
    after: Snapshot

    @property
    def seconds(self) -> float:
        """Between both, never 0."""
        return max(self.after.seconds - self.before.seconds, 1e-9)

    def gained(self, name: str, **labels: str) -> float:
        """Growth of a counter; what it counted since its restart if the server was restarted."""
        now, then = self.after.value(name, **labels), self.before.value(name, **labels)
        return now - then if now >= then else now

    def rate(self, name: str, **labels: str) -> float:
        """Growth a second."""
        return self.gained(name, **labels) / self.seconds

    @property
    def tokens_per_draft(self) -> float:
        """Of the drafts that were verified, of which there is one at least."""
        return 1 + self.gained(ACCEPTED) / self.gained(DRAFTS)

    def ratio(self, part: str, whole: str, **labels: str) -> str:
        """Share of one counter's growth in another's, as text."""
        base = self.gained(whole, **labels)
        return f"{self.gained(part, **labels) / base:.0%}" if base else "-"


def read(url: str) -> Snapshot:
    """The metrics of a server now; raises UserError where they cannot be read."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT) as response:
            return Snapshot.parse(response.read().decode(), time.monotonic())
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UserError(
            f"{url}/metrics cannot be read ({brief(error)}): give the address of a running "
            "server, as in http://localhost:8000."
        ) from None


def render(change: Change, curve: Sequence[float]) -> RenderableType:
    """The whole view; `curve` has the tokens per second of the last refreshes, oldest first."""
    now, drafts = change.after, change.gained(DRAFTS)
    per_draft = "no draft just now"
    if drafts:
        per_draft = f"[bold]{change.tokens_per_draft:.2f}[/] tokens per verified draft"
    head = Table.grid(padding=(0, 3))
    head.add_row(
        f"[bold]{change.rate(GENERATED):,.0f}[/] tokens/s",
        per_draft,
        f"{now.value('vllm:num_requests_running'):.0f} running,"
        f" {now.value('vllm:num_requests_waiting'):.0f} waiting",
    )
    parts: list[RenderableType] = [head, Text(sparkline(curve), style="cyan")]
    if drafts:
        places = enumerate(now.labels(BY_PLACE, "position"), 1)
        shares = (f"{i}: {change.gained(BY_PLACE, position=p) / drafts:.0%}" for i, p in places)
        parts.append(Text("accepted by place  " + "  ".join(shares)))
    levels = now.labels("vllm_hsd:level_drafted_total", "level")
    parts.append(_levels(change, levels) if levels else Text(NO_CASCADE, style="yellow"))
    if now.value(DRAFTS):
        since = Change(Snapshot(0.0, {}), now)
        parts.append(
            Text(
                f"since its start: {now.value(ACCEPTED):,.0f} of {now.value(DRAFTED):,.0f} drafted "
                f"tokens accepted, {since.tokens_per_draft:.2f} tokens per verified draft"
            )
        )
    return Panel(Group(*parts), title="vllm-hsd watch", title_align="left")


def _levels(change: Change, levels: list[str]) -> Table:
    table = Table("level", *COLUMNS, box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    for level in reversed(levels):
        drafted, accepted, rounds, requested, empty, seconds = (
            change.gained(f"vllm_hsd:level_{name}_total", level=level)
            for name in ("drafted", "accepted", "rounds", "requested", "empty", "seconds")
        )
        table.add_row(
            level + (" (cheapest)" if level == levels[0] and len(levels) > 1 else ""),
            f"{drafted / change.seconds:,.0f}",
            f"{accepted / drafted:.0%}" if drafted else "-",
            f"{rounds / change.seconds:,.1f}",
            f"{drafted / requested:.1f}" if requested else "-",
            f"{empty / requested:.0%}" if requested else "-",
            f"{seconds / change.seconds:.0%}" if seconds else "-",
        )
        name, accepted_of = "vllm_hsd:source_drafted_total", "vllm_hsd:source_accepted_total"
        for source in change.after.labels(name, "source"):
            labels = {"level": level, "source": source}
            if (name, frozenset(labels.items())) in change.after.samples:
                drafted_text = f"{change.rate(name, **labels):,.0f}"
                table.add_row(
                    f"  {source}", drafted_text, change.ratio(accepted_of, name, **labels)
                )
    return table


def sparkline(values: Sequence[float]) -> str:
    """One character a value, scaled to the largest."""
    top = max(values, default=0.0) or 1.0
    return "".join(BARS[round(value / top * (len(BARS) - 1))] for value in values)


def run(arguments: argparse.Namespace) -> int:
    url = arguments.url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise UserError(f"'{arguments.url}' is not a URL such as http://localhost:8000.")
    if not 0 < arguments.interval <= LONGEST_INTERVAL:
        raise UserError(f"--interval must be above 0 and at most {LONGEST_INTERVAL} seconds.")
    if arguments.count is not None and arguments.count < 1:
        raise UserError("--count must be at least 1.")
    curve: deque[float] = deque(maxlen=HISTORY)
    before = read(url)
    refreshes = itertools.count() if arguments.count is None else range(arguments.count)
    console = Console()
    # What is no terminal gets one view after the other.
    lasting = Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext()
    with lasting as live:
        for _ in refreshes:
            time.sleep(arguments.interval)
            change = Change(before, read(url))
            curve.append(change.rate(GENERATED))
            view = render(change, curve)
            if live is None:
                console.print(view)
            else:
                live.update(view, refresh=True)
            before = change.after
    return 0


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "watch",
        help="show what a running server drafts, accepts and spends",
        description="Shows tokens per second and per verified draft, and for each level and source"
        " what it drafts, what is accepted, how long drafts are and which share of the time it"
        " takes. Reads /metrics only. End it with Ctrl-C.",
        epilog="example:\n  vllm-hsd watch http://localhost:8000 --interval 2\n",
    )
    parser.add_argument("url", metavar="URL", help="of a server, as in http://localhost:8000")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two refreshes")
    parser.add_argument("--count", type=int, help="end after so many refreshes")
    parser.set_defaults(run=run)
