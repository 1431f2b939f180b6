"""Curves of metrics: in a terminal, and as a picture.

The terminal curve is drawn with braille dots: forty lines of code replace a compiled dependency
whose interface changes between versions.
"""

from __future__ import annotations

import io
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchrl_llm._run_log import printable

Series = tuple[Sequence[int], Sequence[float]]

# Bits of a braille cell, two dots wide and four high, by column and row from the top.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
# Smallest span of an axis: in units of the metric, and of its largest absolute value.
_LEAST_SPAN, _LEAST_SHARE = 1e-3, 0.01
_LEARNING_RATE = re.compile(r"\s*(\w+/)?lr\b")


def axis_limits(name: str, values: Iterable[float]) -> tuple[float, float]:
    """Lower and upper end of the axis of a metric, so that rounding noise is drawn flat.

    The axis spans at least 0.001 and a hundredth of the largest absolute value. Learning rates
    (``lr``) are small numbers, so their axis spans only the hundredth. A widened axis stays at or
    above 0 if all values are.

    Args:
        name: name of the metric, or a text that starts with it.
        values: one or more values; values that are not finite are left out.

    Example:
        >>> axis_limits("train/reward", [0.25, 0.75])
        (0.25, 0.75)
        >>> axis_limits("train/kl_approx", [0.0, 1e-7])
        (0.0, 0.001)
        >>> axis_limits("train/lr", [0.0, 1e-6])
        (0.0, 1e-06)
    """
    known = [value for value in values if math.isfinite(value)]
    low, high = min(known), max(known)
    least = max(abs(low), abs(high)) * _LEAST_SHARE
    if not (_LEARNING_RATE.match(name) and least):
        least = max(least, _LEAST_SPAN)
    if high - low >= least:
        return low, high
    bottom = (low + high - least) / 2
    bottom = max(bottom, 0.0) if low >= 0 else bottom
    return bottom, bottom + least


def terminal_curve(
    steps: Sequence[int], values: Sequence[float], *, title: str, width: int = 64, height: int = 12
) -> str:
    """Draw one series with braille dots, averaged over the steps that share a column.

    Args:
        steps: ascending steps.
        values: one value per step; steps whose value is not finite are left out.
        title: first line of the plot; begins with the name of the metric.
        width: characters of the drawing area.
        height: lines of the drawing area.

    Returns:
        A text of ``height + 2`` lines; only the title if there are no values.

    Example:
        >>> values = [0.0, 0.25, 0.75, 1.0]
        >>> print(terminal_curve([1, 2, 3, 4], values, title="r", width=2, height=2))
        r
          1.00 |⠀⡎
          0.00 |⡜⠀
                1 .. 4
    """
    known = [pair for pair in zip(steps, values, strict=True) if math.isfinite(pair[1])]
    if not known:
        return title
    steps, values = zip(*known, strict=True)
    low, high = axis_limits(title, values)
    span = high - low
    columns, rows = 2 * width, 4 * height
    first, last = steps[0], steps[-1]
    buckets: list[list[float]] = [[] for _ in range(columns)]
    for step, value in zip(steps, values, strict=True):
        buckets[round((step - first) / max(1, last - first) * (columns - 1))].append(value)
    levels = [
        round((high - sum(bucket) / len(bucket)) / span * (rows - 1)) if bucket else None
        for bucket in buckets
    ]
    cells = [[0] * width for _ in range(height)]
    previous: tuple[int, int] | None = None
    for column, level in enumerate(levels):
        if level is None:
            continue
        for x, y in _segment(previous or (column, level), (column, level)):
            cells[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
        previous = (column, level)
    labels = [""] * height
    digits = ".2f" if span >= 0.1 else ".4g"
    labels[0], labels[-1] = f"{high:{digits}}", f"{low:{digits}}"
    wide = max(6, *map(len, labels))
    lines = [
        f"{label:>{wide}} |" + "".join(chr(0x2800 + cell) for cell in row)
        for label, row in zip(labels, cells, strict=True)
    ]
    return "\n".join([title, *lines, f"{'':{wide + 2}}{first} .. {last}"])


def _segment(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Dots of a straight line from ``start`` to ``end``."""
    (x0, y0), (x1, y1) = start, end
    count = max(abs(x1 - x0), abs(y1 - y0), 1)
    return [
        (x0 + round((x1 - x0) * i / count), y0 + round((y1 - y0) * i / count))
        for i in range(count + 1)
    ]


def draw_curves(series: Mapping[str, Series]) -> Any:
    """Draw named series over the steps.

    Args:
        series: name to (steps, values).

    Returns:
        A matplotlib figure.
    """
    return draw_panels({"": {name: Curve(*pair) for name, pair in series.items()}})


def save_curves(path: str | Path, series: Mapping[str, Series]) -> Path:
    """Draw named series over the steps into a picture.

    Args:
        path: the file to write.
        series: name to (steps, values).

    Returns:
        The path.
    """
    draw_curves(series).savefig(path)
    return Path(path)


class Curve(NamedTuple):
    """A series, or the mean of several runs with their spread.

    Attributes:
        steps: ascending.
        values: one per step.
        spread: half the height of a band around each value; empty for none.
    """

    steps: Sequence[int]
    values: Sequence[float]
    spread: Sequence[float] = ()


def draw_panels(panels: Mapping[str, Mapping[str, Curve]]) -> Any:
    """Draw curves in several panels; a label has one colour in all of them.

    Args:
        panels: title of a panel to its curves by label.

    Returns:
        A matplotlib figure.
    """
    logging.getLogger("matplotlib.font_manager").setLevel(logging.WARNING)  # "generated new ..."
    import matplotlib

    labels = list(dict.fromkeys(label for curves in panels.values() for label in curves))
    names = "tab10" if len(labels) <= 10 else "turbo"
    colours = matplotlib.colormaps[names].resampled(max(10, len(labels)))
    size = (7, 4) if len(panels) == 1 else (5.2 * len(panels), 4)
    figure = _figure(figsize=size, dpi=120, layout="constrained")
    drawn = {}
    for axes, (title, curves) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        values = [value for curve in curves.values() for value in curve.values]
        if any(map(math.isfinite, values)):
            limits = axis_limits(title or next(iter(curves)), values)
            at = next(curve.steps[0] for curve in curves.values() if curve.steps)
            axes.update_datalim([(at, end) for end in limits])
        for label, curve in curves.items():
            # A series with few values is shown with its points, a dense one as a thin line.
            style = "o-" if len(curve.steps) <= 20 else "-"
            colour = colours(labels.index(label))
            (drawn[label],) = axes.plot(
                curve.steps, curve.values, style, linewidth=1.2, markersize=4, color=colour
            )
            if curve.spread:
                pairs = list(zip(curve.values, curve.spread, strict=True))
                low, high = [v - s for v, s in pairs], [v + s for v, s in pairs]
                axes.fill_between(curve.steps, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.set_title(_plain(title))
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    drawn = {_plain(label): line for label, line in drawn.items()}
    if drawn and len(panels) == 1:
        axes.legend(drawn.values(), drawn)
    elif drawn:
        columns = max(1, min(len(drawn), 140 // max(map(len, drawn))))
        figure.legend(drawn.values(), drawn, loc="outside lower center", ncols=columns)
    return figure


def _plain(text: str) -> str:
    """Escape a text so that matplotlib does not read it as a formula."""
    return printable(text).replace("$", r"\$")


def _figure(**settings: Any) -> Any:
    """A figure that a notebook shows."""
    # Without pyplot: no backend is chosen for the process and half the import time is saved.
    from matplotlib.figure import Figure

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png")
            return file.getvalue()

    return Picture(**settings)
