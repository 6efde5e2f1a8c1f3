"""When the runs of the study solved their tasks: one dot for each run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

from ...common.figures import plt, save
from .arguments import QUESTION
from .arms import ARMS

COLUMNS = 3
# The arms of the question stand out; the others are there to be compared with them.
COLORS = dict(zip(QUESTION, ("#000000", "#d55e00", "#0072b2"), strict=True))
OTHERS = "#777777"
SPREAD = 0.75  # of a row's height, over which its runs lie
SOLVED: dict[str, Any] = {"marker": "o", "markersize": 4, "linestyle": "none"}
UNSOLVED: dict[str, Any] = {"marker": ">", "markersize": 4, "linestyle": "none", "fillstyle": "none"}
MEAN: dict[str, Any] = {"marker": "|", "markersize": 16, "linestyle": "none"}
# The mean counts runs that are not solved at the place where they are drawn, and is too low where there are any.
LEGEND = ("solved", "not solved", "mean of both")


def draw_solved(record: Mapping[str, Any], path: Path) -> None:
    """Draws one panel for each task: a row for each arm, with the sequences that each run read until it solved it."""
    tasks = record["tasks"]
    arms = [name for name in ARMS if any(name in task["arms"] for task in tasks)]
    columns = min(COLUMNS, len(tasks))
    rows = -(-len(tasks) // columns)
    size = (2 + 3.6 * columns, rows * (0.8 + 0.3 * len(arms)) + 0.4)
    figure, panels = plt.subplots(rows, columns, figsize=size, dpi=150, squeeze=False, sharey=True)
    for axes, task in zip(panels.flat, tasks, strict=False):
        _draw_task(axes, task, arms)
    for axes in panels.flat[len(tasks) :]:
        axes.set_visible(False)
    panels[0, 0].set_yticks(range(len(arms)), [ARMS[name].label for name in arms])
    panels[0, 0].invert_yaxis()
    solved, unsolved, mean = (Line2D([], [], color=OTHERS, **mark) for mark in (SOLVED, UNSOLVED, MEAN))
    figure.legend((solved, unsolved, mean), LEGEND, loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.4 / size[1], 1, 1))
    save(figure, path)


def _draw_task(axes: Axes, task: Mapping[str, Any], arms: Sequence[str]) -> None:
    for row, name in enumerate(arms):
        axes.axhline(row + 0.5, color="#dddddd", linewidth=0.8)
        if name in task["arms"]:
            _draw_arm(axes, task["arms"][name], row, task["budget"], COLORS.get(name, OTHERS))
    axes.set_title(f"{task['task']}, {task['layers']} layers, H = {task['heads']}", fontsize=10)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("sequences read")
    axes.grid(axis="x", alpha=0.3)


def _draw_arm(axes: Axes, arm: Mapping[str, Any], row: int, budget: int, color: str) -> None:
    """Draws runs one below the other, the earliest first; those that did not solve the task stand at the budget."""
    runs = sorted(arm["solved_at"], key=lambda at: at or budget + 1)
    step = SPREAD / max(1, len(runs) - 1)
    for run, at in enumerate(runs):
        axes.plot(at or budget, row - SPREAD / 2 + run * step, color=color, **(SOLVED if at else UNSOLVED))
    axes.plot(arm["mean_sequences"], row, color=color, **MEAN)
