"""The pictures of `dynattn inspect`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ..common.composition_observation import LayerObservation
from ..common.figures import MARKERS, plt

# Maps can be negative, so the colors diverge from white at zero.
COLORS = "RdBu_r"
HEADS_IN_A_ROW = 8


def draw_terms(measures: Sequence[Mapping[str, Any]], stage: str) -> Figure:
    """The size of each term of a stage by layer."""
    figure, axes = plt.subplots(figsize=(6, 3.2))
    for name, marker in zip(measures[0][stage]["terms"], MARKERS, strict=False):
        sizes = [layer[stage]["terms"][name] for layer in measures]
        axes.plot(range(len(measures)), sizes, marker=marker, ms=4, label=name.replace("_", " "))
    _finish(axes, f"{stage}: size of terms, identity = 1", len(measures))
    return figure


def draw_similarity(measures: Sequence[Mapping[str, Any]], stage: str) -> Figure:
    """How alike heads are before and after a stage, by layer."""
    figure, axes = plt.subplots(figsize=(6, 3.2))
    for index, label in enumerate(("before composing", "after composing")):
        values = [layer[stage]["similarity"][index] for layer in measures]
        axes.plot(range(len(measures)), values, marker=MARKERS[index], ms=4, label=label)
    what = "scores" if stage == "pre" else "probabilities"
    _finish(axes, f"{stage}: mean cosine of two heads' {what}", len(measures))
    return figure


def _finish(axes: Axes, title: str, layers: int) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("layer")
    axes.set_xticks(range(layers) if layers <= 12 else range(0, layers, 4))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    axes.figure.tight_layout()  # type: ignore[union-attr]


def draw_flow(flow: Tensor, title: str) -> Figure:
    """Sizes `[H, H]`, indexed [in, out]. The diagonal is left white, so that the scale shows what other heads add."""
    figure, axes = plt.subplots(figsize=(3.6, 3.2))
    others = flow.masked_fill(torch.eye(len(flow), dtype=torch.bool), 0.0)
    image = axes.imshow(others.numpy(), cmap="Blues")
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("out")
    axes.set_ylabel("in")
    figure.colorbar(image, shrink=0.8)
    figure.tight_layout()
    return figure


def draw_maps(layer: LayerObservation, stage: str) -> Figure:
    """The maps of all heads before a stage (upper rows) and after it (lower rows), each head's in one scale."""
    before, after = (maps[0].masked_fill(~layer.visible, 0.0) for maps in layer.around(stage))
    heads = len(before)
    columns = min(heads, HEADS_IN_A_ROW)
    rows = -(-heads // columns)
    figure, grid = plt.subplots(2 * rows, columns, figsize=(1.3 * columns, 2.8 * rows), squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for head in range(heads):
        largest = float(torch.maximum(before[head].abs().max(), after[head].abs().max())) or 1.0
        row, column = 2 * (head // columns), head % columns
        for offset, maps in enumerate((before[head], after[head])):
            grid[row + offset, column].imshow(maps.numpy(), cmap=COLORS, vmin=-largest, vmax=largest)
        grid[row, column].set_title(f"head {head}", fontsize=8)
    figure.tight_layout(pad=0.3)
    return figure
