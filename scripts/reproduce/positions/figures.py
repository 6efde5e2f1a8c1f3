"""The plot of the study, drawn from its record alone: exact match by length, and what the paper reports."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

STYLES = {"off": "-", "on": "--", "wide": ":"}
LABELS = {"off": "plain", "on": "composed", "wide": "plain, wider MLP"}


def draw_lengths(record: Mapping[str, Any], path: Path) -> None:
    """Draws a panel for each task; lines are means over seeds, bands the span of the seeds."""
    tasks = list(dict.fromkeys(cell["task"] for cell in record["cells"]))
    schemes = list(dict.fromkeys(cell["scheme"] for cell in record["cells"]))
    cycle = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    colors = {scheme: cycle[place % len(cycle)] for place, scheme in enumerate(schemes)}
    figure, panels = plt.subplots(2, len(tasks), figsize=(6 * len(tasks), 7.5), dpi=130, squeeze=False)
    for task, above, below in zip(tasks, *panels, strict=True):
        _draw_lengths(above, record, task, colors)
        _draw_quoted(below, record, task, colors)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _draw_lengths(axes: Axes, record: Mapping[str, Any], task: str, colors: Mapping[str, str]) -> None:
    for cell in (cell for cell in record["cells"] if cell["task"] == task):
        names = ("task", "scheme", "composition")
        runs = [run for run in record["runs"] if all(run[name] == cell[name] for name in names)]
        values = np.array([run["exact_match"] for run in runs])
        lengths, color = np.arange(1, values.shape[1] + 1), colors[cell["scheme"]]
        label = f"{cell['scheme']}, {LABELS[cell['composition']]}"
        axes.plot(lengths, values.mean(0), STYLES[cell["composition"]], color=color, lw=1.4, label=label)
        axes.fill_between(lengths, values.min(0), values.max(0), color=color, alpha=0.08)
        trained = runs[0]["trained"]
    axes.axvline(trained + 0.5, color="black", lw=0.8)
    axes.set_title(f"{task}: trained up to {trained}", fontsize=10)
    axes.set_xlabel("length")
    axes.set_ylabel("exact match")
    axes.set_ylim(-0.02, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="lower left")


def _draw_quoted(axes: Axes, record: Mapping[str, Any], task: str, colors: Mapping[str, str]) -> None:
    quoted = record["quoted"].get(task, {})
    cells = [cell for cell in record["cells"] if cell["task"] == task]
    labels = [f"{cell['scheme']}\n{LABELS[cell['composition']]}" for cell in cells]
    heights = [cell["longer_lengths"]["mean"] for cell in cells]
    axes.bar(labels, heights, color=[colors[cell["scheme"]] for cell in cells], alpha=0.7)
    for place, cell in enumerate(cells):
        axes.plot([place] * len(cell["longer_lengths"]["values"]), cell["longer_lengths"]["values"], "k.", ms=4)
    names = [f"{scheme}\nquoted" for scheme in quoted]
    shades = [colors.get(scheme, "gray") for scheme in quoted]
    axes.bar(names, list(quoted.values()), color=shades, alpha=0.4, hatch="//")
    axes.set_title("untrained lengths up to 2 x; hatched: quoted from arXiv 2305.19466", fontsize=9)
    axes.set_ylim(0, 1.02)
    axes.tick_params(axis="x", labelsize=6, rotation=60)
