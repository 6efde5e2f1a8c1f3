"""What all plots share: Matplotlib without a display, labels, and how a figure is saved."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

__all__ = ["literal_label", "plt", "save"]


def literal_label(name: str) -> str:
    """A name for Matplotlib, to which dollar signs are formulas, and an underscore at the start hides a curve."""
    return f" {name}".replace("$", r"\$") if name.startswith("_") else name.replace("$", r"\$")


def save(figure: Figure, path: Path) -> None:
    """Writes a figure to a file and frees its memory."""
    figure.savefig(path)
    plt.close(figure)
