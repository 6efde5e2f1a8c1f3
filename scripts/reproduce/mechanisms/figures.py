"""Survival curves of the study: the share of runs that have not solved their task yet."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

from ...common.figures import plt, save
from .arms import ARMS, QUESTION

COLUMNS = 3
# The arms of the question stand out; the others are there to be compared with them. Each is thinner than the one
# before, so that lines that fall together stay visible.
STYLES = dict(zip(QUESTION, (("#000000", 5.0), ("#d55e00", 3.4), ("#0072b2", 1.8)), strict=True))
# The colors of the others, without blues, oranges and grays; the same in every panel, whichever arms it shows.
TAB20 = plt.get_cmap("tab20").colors
COLORS = dict(zip((name for name in ARMS if name not in STYLES), (*TAB20[4:14], *TAB20[16::2]), strict=True))


def draw_survival(record: Mapping[str, Any], path: Path) -> None:
    """Draws one panel for each task: the share of unsolved runs of each arm against the sequences that they read."""
    tasks = record["tasks"]
    columns = min(COLUMNS, len(tasks))
    rows, entries = -(-len(tasks) // columns), len({name for task in tasks for name in task["arms"]})
    legend = 0.25 * -(-entries // (2 * columns)) + 0.2  # inches
    height = 3.6 * rows + legend
    figure, panels = plt.subplots(rows, columns, figsize=(4.6 * columns, height), dpi=150, squeeze=False, sharey=True)
    for axes, task in zip(panels.flat, tasks, strict=False):
        _draw_task(axes, task)
    for axes in panels.flat[len(tasks) :]:
        axes.set_visible(False)
    for axes in panels[:, 0]:
        axes.set_ylabel("share of runs not solved")
    labeled = {
        label: line for axes in panels.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(labeled.values(), labeled, loc="lower center", ncols=2 * columns, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, legend / height, 1, 1))
    save(figure, path)


def _draw_task(axes: Axes, task: Mapping[str, Any]) -> None:
    for name, arm in task["arms"].items():
        solved = sorted(at for at in arm["solved_at"] if at is not None)
        total = len(arm["solved_at"])
        x = [0, *solved, task["budget"]]
        y = [1.0, *(1 - rank / total for rank in range(1, len(solved) + 1)), 1 - len(solved) / total]
        color, width = STYLES.get(name) or (COLORS[name], 1.1)
        axes.step(
            x, y, where="post", label=ARMS[name].label, color=color, linewidth=width,
            alpha=1 if name in STYLES else 0.7, zorder=2 if name in STYLES else 3,
        )  # fmt: skip
    axes.set_title(f"{task['task']}, {task['layers']} layers, H = {task['heads']}", fontsize=10)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("sequences read")
    axes.set_ylim(-0.03, 1.03)
    axes.grid(alpha=0.3)
