"""Loss curves, drawn from the metrics files of runs."""

from collections.abc import Mapping
from pathlib import Path

from ..common.figures import plt, save
from ..common.metric_records import read_metrics


def draw_losses(runs: Mapping[str, Path], path: Path) -> None:
    """Draws training losses (lines) and validation losses (dots) of runs, by label, from their `metrics.jsonl`."""
    figure, axes = plt.subplots(figsize=(7, 4.5), dpi=150, layout="tight")
    for color, (label, run) in zip(plt.rcParams["axes.prop_cycle"].by_key()["color"], runs.items(), strict=False):
        train, validation = (read_metrics(run / "metrics.jsonl", split) for split in ("train", "validation"))
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
    save(figure, path)
