"""The plot of a study: losses of its arms, and their differences from the first."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter
from numpy.typing import NDArray

from ..common.figures import MARKERS, literal_label, plt, save
from .record import AT_LEAST, AT_MOST, RunRecord, loss_unit

PLOT = "losses.png"
# Ten colors with markers, and the same again in other lines where there are more arms.
LOOKS = cycler(color=matplotlib.color_sequences["tab10"]) + cycler(marker=MARKERS)
STYLES = cycler(linestyle=["-", "--", ":"]) * LOOKS
LEGEND_WIDTH = 110  # characters
BANDS = "lines: means over seeds; bands: one standard deviation to each side"
BOUND_MARKS = {None: "o", AT_LEAST: ">", AT_MOST: "<"}


def draw_arms(record: Mapping[str, Any], path: Path) -> None:
    """Draws the validation losses of the arms of a study, and their differences from the first arm, paired by seed.

    Lines are means over seeds, and bands one standard deviation to each side. Arms that continue parents begin at the
    parents' last losses.

    If the FLOPs of a token are known, there are three more panels: losses over FLOPs, losses over seconds of training,
    and for each arm the ratio of FLOPs that the baseline needs for the same loss, beside a published ratio that the
    record may quote.
    """
    runs = [run for arm in record["arms"].values() for run in arm["runs"]]
    has_costs = all(run.get("flops_per_token") for run in runs)
    size = (11, 5 + 8 * has_costs)
    figure, panels = plt.subplots(1 + 2 * has_costs, 2, figsize=size, dpi=150, squeeze=False, layout="constrained")
    for axes in panels.flat:
        axes.set_prop_cycle(STYLES)
    start = {parent["seed"]: parent["validation"][-1]["loss"] for parent in record["parents"]}
    _draw_over_tokens(panels[0], record, start)
    if has_costs:
        _draw_over_costs(panels[1], record, start)
        for axes in panels[2]:
            axes.remove()
        _draw_ratios(figure.add_subplot(panels[2, 0].get_gridspec()[2, :]), record)
    # All panels have the same arms, and a legend inside one of them would hide curves.
    lines, labels = panels[0, 0].get_legend_handles_labels()
    columns = max(LEGEND_WIDTH // (8 + max(map(len, labels))), 1)
    # The title tells what bands are, where there are any.
    title = BANDS if any(len(arm["runs"]) > 1 for arm in record["arms"].values()) else None
    figure.legend(lines, labels, title=title, loc="outside lower center", ncols=min(columns, len(labels)))
    save(figure, path)


def _draw_over_tokens(panels: Sequence[Axes], record: Mapping[str, Any], start: Mapping[int, float]) -> None:
    """Draws the losses of all arms, and in a second panel their differences from the first arm."""
    baseline = next(iter(record["arms"].values()))
    for arm in record["arms"].values():
        tokens, losses = _curves(arm["runs"], start)
        _band(panels[0], tokens.mean(axis=0), losses, literal_label(arm["label"]))
        _band(panels[1], *_differences(arm["runs"], baseline["runs"], start), literal_label(arm["label"]))
    after = "tokens after the parent's training" if start else "tokens"
    _label(panels[0], after, f"validation loss, {loss_unit(record)}")
    _label(panels[1], after, f"difference from {literal_label(baseline['label'])}, {loss_unit(record)}")


def _draw_over_costs(panels: Sequence[Axes], record: Mapping[str, Any], start: Mapping[int, float]) -> None:
    """Draws the losses of all arms over the operations of their training, and in a second panel over its seconds."""
    for arm in record["arms"].values():
        tokens, losses = _curves(arm["runs"], start)
        costs = np.array([[run["flops_per_token"]] for run in arm["runs"]])
        speeds = np.array([[run["tokens_per_second"]] for run in arm["runs"]])
        _band(panels[0], (tokens * costs).mean(axis=0), losses, literal_label(arm["label"]))
        _band(panels[1], (tokens / speeds).mean(axis=0), losses, literal_label(arm["label"]))
    loss = f"validation loss, {loss_unit(record)}"
    _label(panels[0], "floating point operations of training", loss)
    _label(panels[1], "seconds of training", loss)


def _curves(runs: Sequence[RunRecord], start: Mapping[int, float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Tokens and losses `[runs, validations]`."""
    tokens, losses = zip(*(_curve(run, start) for run in runs), strict=True)
    return np.array(tokens), np.array(losses)


def _curve(run: RunRecord, start: Mapping[int, float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Tokens and losses `[validations]` of a run, beginning with the loss of the parent of its seed if there is one."""
    points = [(0.0, start[run["seed"]])] if start else []
    points += [(line["tokens"], line["loss"]) for line in run["validation"]]
    tokens, losses = np.array(points).T
    return tokens, losses


def _differences(
    runs: Sequence[RunRecord], baseline: Sequence[RunRecord], start: Mapping[int, float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Tokens `[validations]`, and differences `[seeds, validations]` from the baseline's runs of the same seeds.

    Arms may be validated after other tokens: the baseline's losses are interpolated, and validations after tokens that
    it never read are left out, as are seeds on which it diverged.
    """
    others = {run["seed"]: _curve(run, start) for run in baseline}
    curves = [(_curve(run, start), others[run["seed"]]) for run in runs if run["seed"] in others]
    if not curves:
        return np.zeros(0), np.zeros((0, 0))
    tokens = np.array([at for (at, _), _ in curves]).mean(axis=0)
    beyond = {"left": np.nan, "right": np.nan}
    differences = np.array([losses - np.interp(at, *other, **beyond) for (at, losses), other in curves])
    both = ~np.isnan(differences).any(axis=0)
    return tokens[both], differences[:, both]


def _band(axes: Axes, x: NDArray[np.float64], values: NDArray[np.float64], label: str) -> None:
    """Draws mean and standard deviation of values `[seeds, validations]` at the points `x` `[validations]`."""
    if not len(values):
        axes.plot([], [], label=label)  # the next arm gets the next color in all panels
        return
    mean = values.mean(axis=0)
    (line,) = axes.plot(x, mean, ms=4, label=label)
    if len(values) > 1:
        spread = values.std(axis=0, ddof=1)
        axes.fill_between(x, mean - spread, mean + spread, color=line.get_color(), lw=0, alpha=0.12)


def _draw_ratios(axes: Axes, record: Mapping[str, Any]) -> None:
    """Draws the ratio of FLOPs of each arm with its 95 % interval, the best one on top; bounds are arrows."""
    ratios = {name: comparison.get("operations_ratio") for name, comparison in record["comparison"].items()}
    known = sorted(((ratio["mean"], name) for name, ratio in ratios.items() if ratio), reverse=True)
    for place, (mean, name) in enumerate(known):
        low, high = ratios[name]["interval_95"] or (mean, mean)
        mark = BOUND_MARKS[ratios[name].get("bound")]
        axes.errorbar(mean, -place, xerr=[[mean - low], [high - mean]], fmt=mark, color="black", capsize=3)
    if quoted := record.get("quoted"):
        axes.axvspan(*quoted["interval"], color="tab:orange", alpha=0.25)
        axes.set_title(f"shaded: {quoted['label']} (quoted)", fontsize="medium")
    axes.axvline(1, color="gray", lw=1)
    labels = [literal_label(record["arms"][name]["label"]) for _, name in known]
    axes.set_yticks([-place for place in range(len(known))], labels)
    arrows = "; arrows: at least, or at most" if any(ratios[name].get("bound") for _, name in known) else ""
    what = "operations the baseline needs for the same loss, as a multiple of the arm's"
    axes.set_xlabel(f"{what}\n(mean, 95 % interval{arrows})")
    axes.grid(alpha=0.3)


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
