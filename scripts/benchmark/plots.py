"""Plots that are drawn from a record."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from .tables import Record, case_title

STYLES = {"ours": "-", "plain": "--", "other": ":"}
COLORS = {"ours": "tab:blue", "plain": "tab:gray", "other": "tab:orange"}


def draw_plots(record: Record, folder: Path) -> list[Path]:
    """Draws time and memory against length, ratios and a roofline; returns the files."""
    groups = _group(record["cases"])
    drawings = {
        "time.png": lambda path: draw_scaling(record, groups, path, _median_ms, "median ms", with_floor=True),
        "memory.png": lambda path: draw_scaling(record, groups, path, _peak_mib, "peak MiB above the inputs"),
        "ratios.png": lambda path: draw_ratios(record, path),
        "roofline.png": lambda path: draw_roofline(record, path),
    }
    for name, draw in drawings.items():
        draw(folder / name)
    return [folder / name for name in drawings]


def draw_scaling(
    record: Record, groups: dict[str, list[Record]], path: Path, value: Any, label: str, with_floor: bool = False
) -> None:
    """One log-log panel for each subject, pass and head shape: `value` of every correct contestant against length.

    The floor is the FLOPs of the function that the subject is about, at the measured rate of a matrix product.
    """
    figure, panels = plt.subplots(1, len(groups), figsize=(5.2 * len(groups), 5), dpi=120, squeeze=False)
    for axes, (title, cases) in zip(panels[0], groups.items(), strict=True):
        for name, rows in _by_contestant(cases).items():
            points = [(length, value(row)) for length, row in rows]
            axes.plot(*zip(*points, strict=True), STYLES[rows[0][1]["role"]], marker="o", ms=4, label=name)
        if with_floor:
            floor = _floor(cases, record["machine"]["gemm_flops_per_second"])
            axes.plot(*zip(*floor, strict=True), color="black", lw=1, marker="_", label="FLOP floor")
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
        axes.set_title(title, fontsize=9)
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=6)
    _save(figure, path)


def draw_ratios(record: Record, path: Path) -> None:
    """Bars of time over the best plain attention, a panel for each case; wrong contestants have none."""
    cases = [case for case in record["cases"] if any("ratio" in row for row in case["rows"])]
    panels_wide = max(len(cases), 1)
    figure, panels = plt.subplots(1, panels_wide, figsize=(4.2 * panels_wide, 4.5), dpi=120, squeeze=False)
    for axes, case in zip(panels[0], cases, strict=False):
        rows = sorted((row for row in case["rows"] if "ratio" in row), key=lambda row: -row["ratio"])
        bars = axes.barh([row["name"] for row in rows], [row["ratio"] for row in rows])
        for bar, row in zip(bars, rows, strict=True):
            bar.set_color(COLORS[row["role"]])
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
        axes.axvline(1, color="black", lw=1)
        axes.margins(x=0.15)
        axes.set_title(case_title(case).replace(": ", ":\n"), fontsize=8)
        axes.tick_params(labelsize=7)
        axes.set_xlabel("time / best plain attention", fontsize=8)
    _save(figure, path)


def draw_roofline(record: Record, path: Path) -> None:
    """FLOP/s reached against FLOPs for each byte of inputs and results, under what the machine can do."""
    figure, axes = plt.subplots(figsize=(7, 5), dpi=120)
    peak, bandwidth = record["machine"]["gemm_flops_per_second"], record["machine"]["copy_bytes_per_second"]
    points = [
        (row["flops"] / row["traffic_bytes"], row["flops_per_second"], row["role"], row["name"])
        for case in record["cases"]
        for row in case["rows"]
        if row.get("traffic_bytes") and "flops_per_second" in row
    ]
    for intensity, rate, role, _ in points:
        axes.plot(intensity, rate, "o", ms=4, color=COLORS[role], alpha=0.7)
    edges = [intensity for intensity, *_ in points] + [peak / bandwidth]
    reach = sorted({min(edges) / 2, peak / bandwidth, max(edges) * 2})
    axes.plot(reach, [min(peak, bandwidth * intensity) for intensity in reach], color="black", label="roofline")
    for role, color in COLORS.items():
        axes.plot([], [], "o", color=color, label=role)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs for each byte", ylabel="FLOP/s")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    _save(figure, path)


def _group(cases: Iterable[Record]) -> dict[str, list[Record]]:
    """Cases that differ in length alone, by title, shortest first."""
    groups: dict[str, list[Record]] = {}
    for case in sorted(cases, key=lambda case: case["shape"]["length"]):
        shape = case["shape"]
        memory = f", memory {shape['memory']}" if shape["memory"] else ""
        title = f"{case['subject']}, {case['passes']}, {shape['heads']}x{shape['width']}{memory}"
        groups.setdefault(title, []).append(case)
    return groups


def _by_contestant(cases: Iterable[Record]) -> dict[str, list[tuple[int, Record]]]:
    found: dict[str, list[tuple[int, Record]]] = {}
    for case in cases:
        for row in case["rows"]:
            if "timing" in row and row["verdict"]["correct"]:
                found.setdefault(row["name"], []).append((case["shape"]["length"], row))
    return found


def _floor(cases: Iterable[Record], peak: float) -> list[tuple[int, float]]:
    return [(case["shape"]["length"], case["floor_flops"] / peak * 1e3) for case in cases]


def _median_ms(row: Record) -> float:
    return row["timing"]["median"] * 1e3


def _peak_mib(row: Record) -> float:
    return row["peak_bytes"] / 2**20


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
