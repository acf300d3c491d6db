"""Figures from rows of measurements: lines over a column, and bars, a panel for every group."""

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


@contextmanager
def saved_figure(path: Path, width: float, height: float) -> Iterator[Any]:
    """A matplotlib figure that is written to `path` on leaving the block."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def values(rows: Sequence[Row], column: str) -> list[Any]:
    """Different values of a column, in the order in which they come."""
    return list(dict.fromkeys(row[column] for row in rows))


def lines(
    rows: Sequence[Row],
    path: Path,
    *,
    x: str,
    measures: Mapping[str, str],
    line: str = "configuration",
    panel: str | None = None,
    error: str | None = None,
    title: str = "",
    **axes_settings: Any,
) -> None:
    """Means of measures over a column, a line for every configuration.

    With one measure, panels fill rows of three; with several, each measure has a row of panels. A
    panel in which x has one value shows a point for every line instead.

    Args:
        x, line, panel: columns; rows with the same values of all three are averaged.
        measures: column -> label of the vertical axis.
        error: column with half the length of the error bars.
        axes_settings: of every panel, as for `Axes.set`.
    """
    panels = values(rows, panel) if panel else [""]
    across = len(panels) if len(measures) > 1 else min(3, len(panels))
    down = -(-len(panels) * len(measures) // across)
    with saved_figure(path, max(4.0 * across, 7), 3.2 * down + 1) as figure:
        sharing = {"sharex": True, "sharey": "row"} if len(measures) > 1 else {}
        flat = list(figure.subplots(down, across, squeeze=False, **sharing).flat)
        for axes, (measure, name) in zip(flat, itertools.product(measures, panels), strict=False):
            own = [row for row in rows if not panel or row[panel] == name]
            axes.set(title=name, ylabel=measures[measure], xlabel=x)
            _panel(axes, own, x, line, measure, error)
            axes.set(**axes_settings)
        for axes in flat[len(panels) * len(measures) :]:
            axes.axis("off")
        figure.suptitle(title, fontsize=8)


def _panel(
    axes: Any, rows: Sequence[Row], x: str, line: str, measure: str, error: str | None
) -> None:
    rows = [row for row in rows if row[measure] not in ("", None)]
    one_place = len({str(row[x]) for row in rows}) == 1
    for name in values(rows, line):
        own = [row for row in rows if row[line] == name]
        places = [name] if one_place else values(own, x)
        at = [own] if one_place else [[row for row in own if row[x] == place] for place in places]
        heights = [statistics.fmean(float(row[measure]) for row in each) for each in at]
        bars = [float(each[0][error]) for each in at] if error else None
        shown = places if one_place else [float(place) for place in places]
        axes.errorbar(shown, heights, yerr=bars, marker="o", label=name)
    if one_place:
        axes.tick_params("x", rotation=20, labelsize=7)
    else:
        axes.legend(fontsize=7)


def bars(
    rows: Sequence[Row],
    path: Path,
    *,
    x: str,
    panel: str,
    measure: str,
    title: str = "",
) -> None:
    """Bars of configurations from 0, with lines from `measure`_low to `measure`_high; a row of axes
    for each panel. `x` and `panel` are columns.
    """
    panels, places, names = (values(rows, column) for column in (panel, x, "configuration"))
    width = 0.8 / len(names)
    shown: dict[Any, Any] = {}
    with saved_figure(path, 10, 2.5 * len(panels) + 1.5) as figure:
        flat = figure.subplots(len(panels), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axes, name in zip(flat, panels, strict=True):
            for i, each in enumerate(names):
                own = [row for row in rows if (row[panel], row["configuration"]) == (name, each)]
                middle, low, high = (
                    [float(row[f"{measure}{end}"]) for row in own] for end in ("", "_low", "_high")
                )
                # A ratio of sums may lie outside of the quartiles.
                errors = [
                    [max(m - end, 0) for m, end in zip(middle, low, strict=True)],
                    [max(end - m, 0) for m, end in zip(middle, high, strict=True)],
                ]
                at = [places.index(row[x]) + i * width for row in own]
                if own:
                    drawn = axes.bar(at, middle, width, yerr=errors, capsize=2, color=f"C{i}")
                    shown[each] = drawn
            axes.axhline(1, color="gray", linewidth=0.8)
            axes.set(ylabel=measure, title=f"{panel} {name}")
        flat[-1].set_xticks([k + width * (len(names) - 1) / 2 for k in range(len(places))], places)
        figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=4)
        figure.suptitle(title, fontsize=8)
