"""The plot of the suite `long`, drawn from its results alone: perplexity by position, pass keys by length."""

import statistics
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.ticker import LogFormatter

from ..common.figures import MARKERS, literal_label, plt, save
from .long_context import describe


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draws both panels; pass keys are means over depths."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.8), dpi=130, layout="constrained")
    for one, marker in zip(results["checkpoints"], cycle(MARKERS), strict=False):
        ranges, name = one["by_position"], literal_label(describe(one))
        places = [(line["from"] + line["to"]) / 2 for line in ranges]
        left.plot(places, [line["perplexity"] for line in ranges], marker=marker, lw=1.4, label=name)
        lengths = sorted({cell["length"] for cell in one["pass_key"]})
        cells = [[cell["nats"] for cell in one["pass_key"] if cell["length"] == length] for length in lengths]
        right.plot(lengths, [statistics.mean(nats) for nats in cells], marker=marker, lw=1.4, label=name)
    trained = {one["trained_length"] for one in results["checkpoints"]}
    for axes, label in ((left, "perplexity"), (right, "nats per pass key, mean over depths")):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(LogFormatter(2))
        axes.set_xlabel("position" if axes is left else "tokens")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        for length in trained:
            axes.axvline(length, color="black", lw=0.8)
    left.set_yscale("log")
    left.yaxis.set_major_formatter(LogFormatter())
    left.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
    figure.suptitle("vertical line: trained length", fontsize=9)
    figure.legend(*left.get_legend_handles_labels(), fontsize=8, ncols=2, loc="outside lower center")
    save(figure, path)
