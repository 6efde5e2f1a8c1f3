"""The plot of a study of arms: what each seed of each arm reached, and the paired differences."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ...common.figures import plt, save


def draw_arms(record: Mapping[str, Any], path: Path) -> None:
    """Draws a row for each task with results: on the left the first metric of each arm, on the right differences."""
    tasks = [name for name in record["tasks"] if record["results"][name]["arms"]]
    height = 1.2 + 0.42 * max(len(record["arms"]), len(record["contrasts"]))
    size = (13, height * len(tasks))
    figure, panels = plt.subplots(len(tasks), 2, figsize=size, dpi=130, squeeze=False, layout="tight")
    for task, (left, right) in zip(tasks, panels, strict=True):
        _draw_values(left, record, task)
        _draw_differences(right, record, task)
    save(figure, path)


def _draw_values(axes: Axes, record: Mapping[str, Any], task: str) -> None:
    """A dot for each seed, and a bar at the mean."""
    metric = record["tasks"][task]["metrics"][0]
    arms = record["results"][task]["arms"]
    for place, arm in enumerate(arms.values()):
        summary = arm["metrics"][metric["name"]]
        axes.plot(summary["values"], [place] * len(summary["values"]), "o", color="#0072b2", alpha=0.6, ms=5)
        axes.plot([summary["mean"]], [place], "|", color="black", ms=16, mew=2)
    _finish(axes, [record["arms"][name] for name in arms], metric["label"])
    axes.set_title(record["tasks"][task]["label"], fontsize=10)


def _draw_differences(axes: Axes, record: Mapping[str, Any], task: str) -> None:
    """A dot for each seed, and the mean with its 95 % interval where there is one."""
    metric = record["tasks"][task]["metrics"][0]
    rows = record["results"][task]["differences"][metric["name"]]
    for place, row in enumerate(rows):
        low, high = row["interval_95"] or (row["mean"], row["mean"])
        axes.plot([low, high], [place, place], "-", color="#d55e00", lw=1.6)
        axes.plot(row["values"], [place] * len(row["values"]), ".", color="#d55e00", alpha=0.6)
        axes.plot([row["mean"]], [place], "|", color="black", ms=14, mew=2)
    axes.axvline(0, color="black", lw=0.8)
    labels = [f"{record['arms'][row['arm']]}\nminus {record['arms'][row['other']]}" for row in rows]
    _finish(axes, labels, f"difference in {metric['label']},\npaired by seed, 95 % t interval")


def _finish(axes: Axes, labels: list[str], x: str) -> None:
    axes.set_yticks(range(len(labels)), [label.replace("`", "") for label in labels], fontsize=8)  # Markdown's code
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(MaxNLocator(7))  # more labels would run into each other
    axes.set_xlabel(x)
    axes.grid(alpha=0.3)
