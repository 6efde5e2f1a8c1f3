"""Draws curves as SVG elements for an HTML page."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..common.figures import MARKERS, literal_label
from .run import ReportedRun

WIDTH, HEIGHT, NAME_HEIGHT = 6.2, 3.2, 0.18
# A legend inside of the axes has at most so many names.
MOST_INSIDE = 4
# Colours that readers with any colour vision can tell apart (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
# A curve is marked at about so many points.
MARKED = 30
# A curve with more points is drawn with so many of them, evenly spread, and looks the same.
MOST_POINTS = 2000
# The XML declaration and document type before the drawing, which name an address on another machine.
PROLOGUE = re.compile(r"^.*?(?=<svg)", re.DOTALL)
METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
STYLES = {"train": "-", "validation": "--"}


def draw_curves(
    runs: Sequence[ReportedRun], splits: Sequence[str], field: str, label: str, *, log: bool = False
) -> str | None:
    """One measurement of all runs against the update, as SVG; None if no run has it."""
    figure, axes = _figure(label)
    drawn = False
    for index, run in enumerate(runs):
        for split in splits:
            steps, values = run.series(split, field)
            if not any(map(math.isfinite, values)):
                continue
            drawn = True
            name = literal_label(run.name if len(splits) == 1 else f"{run.name}, {split}")
            chosen = _spread(len(steps))
            axes.plot(
                np.array(steps)[chosen], np.array(values)[chosen], STYLES.get(split, "-"), label=name,
                **_look(index), linewidth=1.4, markersize=3, markevery=1 + len(chosen) // MARKED,
            )  # fmt: skip
    if not drawn:
        return None
    axes.set_xlabel("update")
    if log:
        axes.set_yscale("log")
    if len(runs) * len(splits) > 1:
        _add_legend(figure, axes)
    return to_svg(figure)


def _add_legend(figure: Figure, axes: matplotlib.axes.Axes) -> None:
    """Names the curves between them if they are few, and else below, where no name hides a curve."""
    lines, names = axes.get_legend_handles_labels()
    if len(names) <= MOST_INSIDE:
        axes.legend(frameon=False, fontsize=8)
        return
    figure.set_figheight(HEIGHT + NAME_HEIGHT * math.ceil(len(names) / 2))
    figure.legend(lines, names, loc="outside lower center", ncols=2, frameon=False, fontsize=8)


def draw_layers(values: Mapping[str, Sequence[float]], label: str) -> str:
    """Measurements `[layers]` by name, against the layer, as SVG."""
    figure, axes = _figure(label)
    for index, (name, series) in enumerate(values.items()):
        axes.plot(range(len(series)), series, label=name, markersize=3, **_look(index))
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=8)
    return to_svg(figure)


def to_svg(figure: Figure) -> str:
    """A figure as an `svg` element with selectable text, and without references to other files."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dynattn"}):
        figure.savefig(buffer, format="svg")
    return METADATA.sub("", PROLOGUE.sub("", buffer.getvalue()))


def _figure(label: str) -> tuple[Figure, matplotlib.axes.Axes]:
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(label, fontsize=10, loc="left")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _look(index: int) -> dict[str, Any]:
    """Colour and marker of a curve; 70 curves differ in one or both."""
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}


def _spread(count: int) -> np.ndarray:
    """The indices of up to `MOST_POINTS` of `count` points, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(count, MOST_POINTS)).astype(int))
