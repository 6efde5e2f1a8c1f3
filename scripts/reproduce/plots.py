"""Loss curves, drawn from the metrics files of runs or from the record of a study."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from numpy.typing import NDArray


def draw_losses(runs: Mapping[str, Path], path: Path) -> None:
    """Draws training losses (lines) and validation losses (dots) of runs, by label, from their `metrics.jsonl`."""
    figure, axes = plt.subplots(figsize=(7, 4.5), dpi=150)
    for color, (label, run) in zip(plt.rcParams["axes.prop_cycle"].by_key()["color"], runs.items(), strict=False):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        train, validation = ([line for line in lines if line["split"] == split] for split in ("train", "validation"))
        axes.plot([line["tokens"] for line in train], [line["loss"] for line in train], color=color, lw=1, alpha=0.6)
        axes.plot(
            [line["tokens"] for line in validation],
            [line["loss"] for line in validation],
            color=color,
            marker="o",
            label=f"{label} (dots: validation)",
        )
    axes.set_xlabel("training tokens")
    axes.set_ylabel("loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def draw_arms(record: Mapping[str, Any], path: Path) -> None:
    """Draws the validation losses of the arms of a study, and their differences from the first arm, paired by seed.

    Lines are means over seeds, and bands one standard deviation to each side. All arms begin at the last losses of the
    record's `parents`.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), dpi=150)
    start = [parent["validation"][-1]["loss"] for parent in record["parents"]]
    losses = {name: _losses(arm["runs"], start) for name, arm in record["arms"].items()}
    baseline = next(iter(losses))
    tokens = [0, *(line["tokens"] for line in record["arms"][baseline]["runs"][0]["validation"])]
    for name, arm in record["arms"].items():
        _band(left, tokens, losses[name], arm["label"])
        _band(right, tokens, losses[name] - losses[baseline], arm["label"])
    left.set_ylabel("validation loss, nats per token")
    right.set_ylabel(f"difference from {record['arms'][baseline]['label']}, nats per token")
    for axes in (left, right):
        axes.set_xlabel("tokens after the parent's training")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _losses(runs: Sequence[Mapping[str, Any]], start: Sequence[float]) -> NDArray[np.float64]:
    """Validation losses `[seeds, 1 + validations]`, beginning with the parents'."""
    curves = [[line["loss"] for line in run["validation"]] for run in runs]
    return np.column_stack([start, curves])


def _band(axes: Axes, tokens: Sequence[int], values: NDArray[np.float64], label: str) -> None:
    """Draws mean and standard deviation of values `[seeds, 1 + validations]`."""
    mean, spread = values.mean(axis=0), values.std(axis=0, ddof=1)
    axes.plot(tokens, mean, marker="o", ms=3, label=label)
    axes.fill_between(tokens, mean - spread, mean + spread, alpha=0.2)
