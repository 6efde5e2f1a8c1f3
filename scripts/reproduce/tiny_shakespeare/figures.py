"""Plots of the study, drawn from its record alone."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ...common.figures import make_panels, plt, save
from .plan import GROUPS, TYPES
from .record import cells_by_group

COLORS = dict(zip(TYPES, plt.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
PANELS_PER_ROW, PANEL, DPI = 4, (5, 4.8), 110
# Variants of one type in a group.
LINES = ("-", "--", ":", "-.")


def draw_curves(record: Mapping[str, Any], path: Path) -> None:
    """Draws bits per character: lines for training, dots for the validation split at the end.

    Bands are one standard deviation over seeds to each side.
    """
    groups = cells_by_group(record)
    figure, panels = make_panels(len(groups), PANELS_PER_ROW, PANEL, DPI)
    for axes, (group, cells) in zip(panels, groups.items(), strict=True):
        of_type: dict[str, int] = dict.fromkeys(TYPES, 0)
        for cell in cells:
            kind = _type_of(cell)
            style = {"color": COLORS[kind], "ls": LINES[of_type[kind] % len(LINES)]}
            _draw_curve(axes, cell, [run for run in record["runs"] if _is_of(run, cell)], style)
            of_type[kind] += 1
        axes.set_title(_title(group), fontsize=9)
        axes.set_xlabel("update")
        axes.set_ylabel("bits per character")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4)  # inside it would hide curves
    figure.suptitle("lines: training; points: validation split at the end", fontsize=10)
    save(figure, path)


def draw_bars(record: Mapping[str, Any], path: Path) -> None:
    """Draws validation accuracy as bars with standard deviation and every seed, and the paper's figures beside them."""
    groups = cells_by_group(record)
    figure, (*panels, last) = make_panels(len(groups) + 1, PANELS_PER_ROW, PANEL, DPI)
    for axes, (group, cells) in zip(panels, groups.items(), strict=True):
        _draw_bars(axes, cells)
        axes.set_title(_title(group), fontsize=9)
        axes.set_ylabel("validation accuracy")
    quoted = record["quoted"]["accuracy"]
    last.bar(list(quoted), list(quoted.values()), color=[COLORS[kind] for kind in quoted], alpha=0.5, hatch="//")
    _number(last, quoted.values())
    last.set_title("quoted from the paper: training and\nvalidation mixed, since the start of training", fontsize=9)
    save(figure, path)


def _draw_curve(
    axes: Axes, cell: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], style: Mapping[str, Any]
) -> None:
    shared = min(len(run["curve"]) for run in runs)  # runs that end by themselves have curves of several lengths
    steps = [point["step"] for point in runs[0]["curve"][:shared]]
    values = np.array([[point["bits_per_character"] for point in run["curve"][:shared]] for run in runs])
    mean = values.mean(axis=0)
    axes.plot(steps, mean, lw=1.2, label=_label(cell), **style)
    if len(runs) > 1:
        deviation = values.std(axis=0, ddof=1)
        axes.fill_between(steps, mean - deviation, mean + deviation, alpha=0.2, color=style["color"])
    validation = cell["validation"]["bits_per_character"]
    if validation["mean"] is not None:  # no run diverged
        spread = validation["sd"] or 0
        axes.errorbar(steps[-1:], [validation["mean"]], yerr=[spread], fmt="o", color=style["color"], ms=5)


def _draw_bars(axes: Axes, cells: Sequence[Mapping[str, Any]]) -> None:
    scores = [cell["validation"]["accuracy"] for cell in cells]
    labels = [_label(cell) for cell in cells]
    colors = [COLORS.get(cell["variant"], "tab:gray") for cell in cells]
    axes.bar(
        labels,
        [score["mean"] or 0 for score in scores],
        yerr=[score["sd"] or 0 for score in scores],
        color=colors,
        alpha=0.7,
        capsize=4,
    )
    for place, score in enumerate(scores):
        values = [value for value in score["values"] if value is not None]
        axes.plot([place] * len(values), values, "k.", ms=4)
    _number(axes, [score["mean"] for score in scores])
    axes.tick_params(axis="x", labelsize=7)


def _number(axes: Axes, heights: Collection[float | None]) -> None:
    """Writes the heights into the bars and sets the axis limits, which are normally the same in all panels.

    A height is None where a run diverged.
    """
    known = [height or 0 for height in heights]
    axes.set_ylim(0, max(0.65, 1.1 * max(known)))
    for place, height in enumerate(heights):
        box = {"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 1}  # hatches would strike the number out
        text = "diverged" if height is None else f"{height:.3f}"
        axes.text(place, known[place] / 2, text, ha="center", fontsize=8, bbox=box)


def _label(cell: Mapping[str, Any]) -> str:
    variant = cell["variant"].replace(", ", ",\n")
    return f"{variant}\n(n = {len(cell['seeds'])})"


def _type_of(cell: Mapping[str, Any]) -> str:
    """The attention type of a variant such as `rcmha, ReLU`."""
    return str(cell["variant"]).partition(",")[0]


def _title(group: str) -> str:
    return f"{GROUPS[group].corpus}\n{GROUPS[group].title}"


def _is_of(run: Mapping[str, Any], cell: Mapping[str, Any]) -> bool:
    return all(run["settings"][name] == cell[name] for name in ("group", "variant"))
