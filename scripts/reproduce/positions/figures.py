"""The plot of the study, drawn from its record alone: exact match by length, and what the paper reports."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ...common.figures import plt, save
from .record import key_of

STYLES = {"off": "-", "on": "--", "wide": ":"}
LABELS = {"off": "plain", "on": "composed", "wide": "plain, wider MLP"}


def draw_lengths(record: Mapping[str, Any], path: Path) -> None:
    """Draws a row of two panels for each task; lines are means over seeds, bands the span of the seeds."""
    tasks = list(dict.fromkeys(cell["task"] for cell in record["cells"]))
    schemes = list(dict.fromkeys(cell["scheme"] for cell in record["cells"]))
    cycle = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    colors = {scheme: cycle[place % len(cycle)] for place, scheme in enumerate(schemes)}
    size = (12, 1 + 3.6 * len(tasks))
    figure, panels = plt.subplots(len(tasks), 2, figsize=size, dpi=130, squeeze=False, layout="constrained")
    for task, (left, right) in zip(tasks, panels, strict=True):
        _draw_lengths(left, record, task, colors)
        _draw_longer(right, record, task, colors)
    # All panels have the same arms, and a legend inside one of them would hide curves.
    lines, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=4, fontsize=9)
    save(figure, path)


def _draw_lengths(axes: Axes, record: Mapping[str, Any], task: str, colors: Mapping[str, str]) -> None:
    for cell in (cell for cell in record["cells"] if cell["task"] == task):
        runs = [run for run in record["runs"] if key_of(run) == key_of(cell)]
        values = np.array([run["exact_match"] for run in runs])
        lengths, color = np.arange(1, values.shape[1] + 1), colors[cell["scheme"]]
        axes.plot(lengths, values.mean(0), STYLES[cell["composition"]], color=color, lw=1.4, label=_label(cell))
        axes.fill_between(lengths, values.min(0), values.max(0), color=color, alpha=0.08)
        trained = runs[0]["trained"]
    axes.axvline(trained + 0.5, color="black", lw=0.8)
    axes.set_title(f"{task}: trained up to {trained}", fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("length")
    axes.set_ylabel("exact match")
    axes.set_ylim(-0.02, 1.02)
    axes.grid(alpha=0.3)


def _draw_longer(axes: Axes, record: Mapping[str, Any], task: str, colors: Mapping[str, str]) -> None:
    """The means over untrained lengths, dots for the seeds, and what the paper reports."""
    cells = [cell for cell in record["cells"] if cell["task"] == task]
    heights = [cell["longer_lengths"]["mean"] for cell in cells]
    axes.bar(range(len(cells)), heights, color=[colors[cell["scheme"]] for cell in cells], alpha=0.7)
    for place, cell in enumerate(cells):
        axes.plot([place] * len(cell["longer_lengths"]["values"]), cell["longer_lengths"]["values"], "k.", ms=4)
    quoted = record["quoted"].get(task, {})
    places = range(len(cells), len(cells) + len(quoted))
    shades = [colors.get(scheme, "gray") for scheme in quoted]
    axes.bar(places, list(quoted.values()), color=shades, alpha=0.4, hatch="//")
    labels = [*map(_label, cells), *(f"{scheme}, quoted" for scheme in quoted)]
    axes.set_xticks(range(len(labels)), labels, fontsize=7, rotation=45, ha="right", rotation_mode="anchor")
    source = " (hatched: arXiv 2305.19466)" if quoted else ""
    axes.set_title(f"{task}, untrained lengths up to 2 x{source}", fontsize=10)
    axes.set_ylim(0, 1.02)


def _label(cell: Mapping[str, Any]) -> str:
    return f"{cell['scheme']}, {LABELS[cell['composition']]}"
