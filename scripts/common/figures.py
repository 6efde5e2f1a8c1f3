"""What all plots share: Matplotlib without a display, labels, and how a figure is saved."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["MARKERS", "literal_label", "make_panels", "plt", "save"]

# Beside the ten colors of Matplotlib's cycle, so that curves differ in black and white, too.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")


def literal_label(name: str) -> str:
    """A name for Matplotlib, to which dollar signs are formulas, and an underscore at the start hides a curve."""
    return f" {name}".replace("$", r"\$") if name.startswith("_") else name.replace("$", r"\$")


def make_panels(count: int, columns: int, size: tuple[float, float], dpi: int) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels of so many inches each, up to `columns` in a row; the rest of a row stays blank."""
    columns = max(min(count, columns), 1)
    rows = max(-(-count // columns), 1)
    whole = (size[0] * columns, size[1] * rows)
    figure, grid = plt.subplots(rows, columns, figsize=whole, dpi=dpi, squeeze=False, layout="tight")
    for unused in grid.flat[count:]:
        unused.remove()
    return figure, list(grid.flat[:count])


def save(figure: Figure, path: Path, dpi: float | None = None) -> None:
    """Writes a figure to a file, with its own dots per inch or others, and frees its memory."""
    figure.savefig(path, dpi=dpi)
    plt.close(figure)
