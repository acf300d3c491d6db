"""`vllm-hsd watch`: what a running server drafts, accepts and spends, from its /metrics alone."""

from __future__ import annotations

import argparse
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vllm_hsd.errors import UserError

TIMEOUT = 10
HISTORY = 60  # refreshes of the curve of tokens per second
BARS = " ▁▂▃▄▅▆▇█"
GENERATED = "vllm:generation_tokens_total"
DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
BY_PLACE = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
COLUMNS = ("drafted/s", "accepted", "drafts/s", "mean length", "none drafted", "share of time")


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
        return sorted(found - {""}, key=lambda v: (not v.isdigit(), int(v) if v.isdigit() else v))


_SUMMED = ("engine", "model_name")


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

    def ratio(self, part: str, whole: str, **labels: str) -> str:
        """Share of one counter's growth in another's, as text."""
        base = self.gained(whole, **labels)
        return f"{self.gained(part, **labels) / base:.0%}" if base else "-"


def read(url: str) -> Snapshot:
    """The metrics of a server now.

    Raises:
        UserError: they cannot be read.
    """
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT) as response:
            text = response.read().decode()
        return Snapshot.parse(text, time.monotonic())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{url}/metrics cannot be read ({error}): give the address of a running server, as in"
            " http://localhost:8000."
        ) from None


def render(change: Change, curve: list[float]) -> RenderableType:
    """The whole view.

    Args:
        change: what happened since the last refresh.
        curve: generated tokens per second of the last refreshes, oldest first.
    """
    now = change.after
    drafts, accepted = change.gained(DRAFTS), change.gained(ACCEPTED)
    head = Table.grid(padding=(0, 3))
    head.add_row(
        f"[bold]{change.rate(GENERATED):,.0f}[/] tokens/s",
        f"[bold]{1 + accepted / drafts:.2f}[/] tokens per verified draft"
        if drafts
        else "no draft was verified",
        f"{now.value('vllm:num_requests_running'):.0f} running,"
        f" {now.value('vllm:num_requests_waiting'):.0f} waiting",
    )
    parts: list[RenderableType] = [head, Text(sparkline(curve), style="cyan")]
    if drafts:
        places = now.labels(BY_PLACE, "position")
        shares = [change.gained(BY_PLACE, position=p) / drafts for p in places]
        parts.append(Text("accepted by place  ") + _percentages(shares))
    levels = now.labels("vllm_hsd:level_drafted_total", "level")
    parts.append(_levels(change, levels) if levels else Text(NO_CASCADE, style="yellow"))
    return Panel(Group(*parts), title="vllm-hsd watch", title_align="left")


NO_CASCADE = "This server counts no levels: it runs no cascade, or has not drafted yet."


def _percentages(shares: list[float]) -> Text:
    return Text("  ").join(Text(f"{i + 1}: {share:.0%}") for i, share in enumerate(shares))


def _levels(change: Change, levels: list[str]) -> Table:
    table = Table("level", *COLUMNS, box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    for level in reversed(levels):
        counted = {
            name: change.gained(f"vllm_hsd:level_{name}_total", level=level)
            for name in ("drafted", "rounds", "requested", "empty", "seconds")
        }
        length = counted["drafted"] / counted["requested"] if counted["requested"] else None
        table.add_row(
            f"{level}" + (" (cheapest)" if level == levels[0] and len(levels) > 1 else ""),
            f"{counted['drafted'] / change.seconds:,.0f}",
            change.ratio(
                "vllm_hsd:level_accepted_total", "vllm_hsd:level_drafted_total", level=level
            ),
            f"{counted['rounds'] / change.seconds:,.1f}",
            "-" if length is None else f"{length:.1f}",
            f"{counted['empty'] / counted['requested']:.0%}" if counted["requested"] else "-",
            f"{counted['seconds'] / change.seconds:.0%}" if counted["seconds"] else "-",
        )
        drafted = "vllm_hsd:source_drafted_total"
        for source in change.after.labels(drafted, "source"):
            if (drafted, frozenset({("level", level), ("source", source)})) in change.after.samples:
                table.add_row(
                    f"  {source}",
                    f"{change.rate(drafted, level=level, source=source):,.0f}",
                    change.ratio(
                        "vllm_hsd:source_accepted_total", drafted, level=level, source=source
                    ),
                )
    return table


def sparkline(values: list[float]) -> str:
    """One character a value, scaled to the largest."""
    top = max(values, default=0.0) or 1.0
    return "".join(BARS[round(value / top * (len(BARS) - 1))] for value in values)


def changes(url: str, interval: float, count: int | None) -> Iterator[Change]:
    """What happened in each interval, `count` times or until interrupted."""
    before = read(url)
    while count is None or count > 0:
        time.sleep(interval)
        after = read(url)
        yield Change(before, after)
        before = after
        count = None if count is None else count - 1


def run(arguments: argparse.Namespace) -> int:
    """The command; returns the exit status."""
    url = arguments.url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise UserError(f"'{arguments.url}' is not a URL such as http://localhost:8000.")
    if not arguments.interval > 0:
        raise UserError("--interval must be above 0 seconds.")
    curve: deque[float] = deque(maxlen=HISTORY)
    console = Console()
    with Live(console=console, auto_refresh=False, transient=False) as live:
        for change in changes(url, arguments.interval, arguments.count):
            curve.append(change.rate(GENERATED))
            live.update(render(change, list(curve)), refresh=True)
    return 0


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds `watch` to the commands."""
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
