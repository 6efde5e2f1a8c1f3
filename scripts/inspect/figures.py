"""The pictures of `dynattn inspect`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from ..common.composition_observation import LayerObservation
from ..common.figures import MARKERS, plt

# Maps can be negative, so the colors diverge from white at zero.
COLORS = "RdBu_r"
HEADS_IN_A_ROW = 8


def draw_terms(measures: Sequence[Mapping[str, Any]], stage: str) -> Figure:
    """The size of each term of a stage by layer."""
    terms = measures[0][stage]["terms"]
    sizes = {name.replace("_", " "): [layer[stage]["terms"][name] for layer in measures] for name in terms}
    return _draw_by_layer(sizes, f"{stage}: size of terms, identity = 1")


def draw_similarity(measures: Sequence[Mapping[str, Any]], stage: str) -> Figure:
    """How alike heads are before and after a stage, by layer."""
    before, after = zip(*(layer[stage]["similarity"] for layer in measures), strict=True)
    what = "scores" if stage == "pre" else "probabilities"
    title = f"{stage}: mean cosine of two heads' {what}"
    return _draw_by_layer({"before composing": before, "after composing": after}, title)


def _draw_by_layer(curves: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Draws values `[layers]` by label."""
    figure, axes = plt.subplots(figsize=(6, 3.2))
    for (label, values), marker in zip(curves.items(), MARKERS, strict=False):
        axes.plot(range(len(values)), values, marker=marker, ms=4, label=label)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("layer")
    layers = max(map(len, curves.values()))
    axes.set_xticks(range(layers) if layers <= 12 else range(0, layers, 4))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    return figure


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
    rows = -(-heads // HEADS_IN_A_ROW)
    columns = -(-heads // rows)  # 9 heads are 5 and 4, not 8 and 1
    figure, grid = plt.subplots(2 * rows, columns, figsize=(1.3 * columns, 2.8 * rows), squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for head in range(heads):
        largest = float(torch.maximum(before[head].abs().max(), after[head].abs().max())) or 1.0
        row, column = 2 * (head // columns), head % columns
        for offset, maps in enumerate((before[head], after[head])):
            grid[row + offset, column].imshow(maps.numpy(), cmap=COLORS, vmin=-largest, vmax=largest)
        grid[row, column].set_title(f"head {head}", fontsize=8)
    figure.tight_layout(pad=0.3, h_pad=0.9)
    return figure
