"""Plots, drawn from the record alone."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from ...common.figures import MARKERS, make_panels, plt, save
from ..harness.interface import GRAPH
from ..subjects.parts import UNCLOCKED, WHOLE
from .tables import Record, case_title

COLUMNS, PANEL, DPI = 3, (5, 4.5), 120
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STYLES = {"ours": "-", "plain": "--", "other": ":"}
COLORS = {"ours": "tab:blue", "plain": "tab:gray", "other": "tab:orange"}
ROLE_MARKERS = {"ours": "o", "plain": "s", "other": "^"}
# Colors of the parts of a call, by the function of the op that computes them.
MATMUL, COMPOSITION, SOFTMAX, OUTSIDE = "lightskyblue", "sandybrown", "lightgreen", "whitesmoke"
PART_COLORS = {"multiply_heads": MATMUL, "add_to_heads": MATMUL, "compose": COMPOSITION}
PART_COLORS |= {"compose_backward": COMPOSITION, "softmax": SOFTMAX, "softmax_backward": SOFTMAX}
PART_LEGEND = {"matrix products": MATMUL, "composition": COMPOSITION, "masked softmax": SOFTMAX, "rest": OUTSIDE}
RECOMPUTED_HATCH = "//"
# The least share of a bar with room for the name of a part.
LEAST_LABELLED = 0.03


def draw_everything(record: Record, folder: Path) -> None:
    """Draws time and memory against length, ratios and a roofline into `folder`, and profiles if there are any."""
    draw_scaling(record, folder / "time.png", lambda row: row["timing"]["median"] * 1e3, "median ms", floor=True)
    draw_scaling(record, folder / "memory.png", _peak_mebibytes, "peak MiB above the inputs", maps=True)
    draw_ratios(record, folder / "ratios.png")
    draw_roofline(record, folder / "roofline.png")
    profiled = [case for case in record["cases"] if any("profile" in row for row in case["rows"])]
    if profiled:
        draw_profiles(profiled, record["machine"]["gemm_flops_per_second"], folder / "profile.png")


def _peak_mebibytes(row: Record) -> float:
    """The memory of a call; not a number in a CUDA graph, which has taken it before."""
    return math.nan if row["name"].endswith(GRAPH) else row["peak_bytes"] / 2**20


def draw_scaling(
    record: Record,
    path: Path,
    value: Callable[[Record], float],
    label: str,
    *,
    floor: bool = False,
    maps: bool = False,
) -> None:
    """One log-log panel for each subject, pass, head shape and window: `value` of every correct candidate by length.

    A gray line is proportional to the number of tokens. `floor` adds the time of the FLOPs of the subject's function at
    the measured rate of a matrix product; `maps` adds the memory of one attention map of one head.
    """
    groups, looks = group_by_length(record["cases"]), _looks(record)
    figure, panels = make_panels(len(groups), COLUMNS, PANEL, DPI)
    for axes, (title, cases) in zip(panels, groups.items(), strict=True):
        for name, rows in _by_candidate(cases).items():
            points = [(length, value(row)) for length, row in rows]
            style = STYLES[rows[0][1]["role"]]
            axes.plot(*zip(*points, strict=True), style, **looks[name], ms=4, label=name)
        if len(cases) > 1:
            _draw_linear(axes, cases, value)
        if maps and cases[0]["subject"] == "long":
            points = [(length, length**2 * ITEM_BYTES[cases[0]["dtype"]] / 2**20) for length in _lengths(cases)]
            axes.plot(*zip(*points, strict=True), color="tab:red", lw=1, ls="-.", label="one attention map of one head")
        if floor:
            peak = record["machine"]["gemm_flops_per_second"]
            points = [(case["shape"]["length"], case["floor_flops"] / peak * 1e3) for case in cases]
            axes.plot(*zip(*points, strict=True), color="black", lw=1, marker="_", label="FLOP floor")
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
        axes.set_xticks(_lengths(cases), [f"{length:,}" for length in _lengths(cases)], fontsize=7)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_title(title, fontsize=9)
        axes.grid(alpha=0.3, which="both")
        if axes.get_legend_handles_labels()[1]:  # not where every candidate has failed
            axes.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, path)


def draw_ratios(record: Record, path: Path) -> None:
    """Bars of time over the best plain attention, a panel for each case; wrong candidates have none."""
    cases = [case for case in record["cases"] if any("ratio" in row for row in case["rows"])]
    figure, panels = make_panels(len(cases), COLUMNS, PANEL, DPI)
    for axes, case in zip(panels, cases, strict=True):
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
    save(figure, path)


def draw_roofline(record: Record, path: Path) -> None:
    """Roofline: FLOP/s against FLOPs per byte of inputs and results, under the limits of the machine."""
    figure, axes = plt.subplots(figsize=(7, 5), dpi=DPI, layout="tight")
    peak, bandwidth = record["machine"]["gemm_flops_per_second"], record["machine"]["copy_bytes_per_second"]
    points = [
        (row["flops"] / row["traffic_bytes"], row["flops_per_second"], row["role"], row["name"])
        for case in record["cases"]
        for row in case["rows"]
        if row.get("traffic_bytes") and "flops_per_second" in row
    ]
    for intensity, rate, role, _ in points:
        axes.plot(intensity, rate, ROLE_MARKERS[role], ms=4, color=COLORS[role], alpha=0.7)
    edges = [intensity for intensity, *_ in points] + [peak / bandwidth]
    reach = sorted({min(edges) / 2, peak / bandwidth, max(edges) * 2})
    axes.plot(reach, [min(peak, bandwidth * intensity) for intensity in reach], color="black", label="roofline")
    for role, color in COLORS.items():
        axes.plot([], [], ROLE_MARKERS[role], color=color, label=role)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs for each byte", ylabel="FLOP/s")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    save(figure, path)


def draw_profiles(cases: Sequence[Record], peak: float, path: Path) -> None:
    """Stacked bars of the parts of a call, a panel for each case; a line across a bar is the floor of the whole call.

    What the backward pass recomputes is hatched. A candidate without a profile is one white bar.
    """
    figure, panels = make_panels(len(cases), COLUMNS, PANEL, DPI)
    for axes, case in zip(panels, cases, strict=True):
        rows = sorted((row for row in case["rows"] if "timing" in row), key=lambda row: "profile" not in row)
        for place, row in enumerate(rows):
            _draw_parts(axes, place, row)
            floor = row["flops"] / peak * 1e3
            axes.hlines(floor, place - 0.45, place + 0.45, color="black", lw=2)
        axes.set_xticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
        axes.set_title(case_title(case).replace(": ", ":\n"), fontsize=8)
        axes.set_ylabel("median ms")
        keys: list[Any] = [
            Patch(facecolor=color, edgecolor="gray", label=label) for label, color in PART_LEGEND.items()
        ]
        keys += [Patch(facecolor="white", edgecolor="black", hatch=RECOMPUTED_HATCH, label="recomputed")]
        keys += [Line2D([], [], color="black", lw=2, label="FLOP floor of the call")]
        axes.legend(handles=keys, fontsize=6)
    save(figure, path)


def group_by_length(cases: Iterable[Record]) -> dict[str, list[Record]]:
    """Groups of cases that differ in length alone, by title, shortest first.

    If any group has several lengths, those of a single length are left out.
    """
    groups: dict[str, list[Record]] = {}
    for case in sorted(cases, key=lambda case: case["shape"]["length"]):
        shape = case["shape"]
        title = f"{case['subject']}, {case['passes']}, {shape['heads']}x{shape['width']}"
        title += f", batch {case['batch_size']}" if case["batch_size"] > 1 else ""
        title += f", window {case['window']}" if case["window"] else ""
        title += f", {case['note']}" if case.get("note") else ""
        groups.setdefault(title, []).append(case)
    of_several = {title: found for title, found in groups.items() if len(found) > 1}
    return of_several or groups


def _draw_parts(axes: Any, place: int, row: Record) -> None:
    """One bar, stacked from the parts of a profile if there is one, the first part at the bottom."""
    if "profile" not in row:
        axes.bar(place, row["timing"]["median"] * 1e3, color="white", edgecolor="black")
        return
    bottom = 0.0
    parts = [part for part in row["profile"] if part["name"] not in (WHOLE, UNCLOCKED)]
    whole = sum(part["timing"]["median"] for part in parts)
    for part in parts:
        height = part["timing"]["median"] * 1e3
        color = PART_COLORS.get(part["function"], OUTSIDE)
        hatch = RECOMPUTED_HATCH if part["name"].endswith("again") else None
        axes.bar(place, height, bottom=bottom, color=color, edgecolor="gray", hatch=hatch, lw=0.5)
        if height > LEAST_LABELLED * whole * 1e3:
            axes.text(place, bottom + height / 2, part["name"], ha="center", va="center", fontsize=5.5, zorder=3)
        bottom += height


def _looks(record: Record) -> dict[str, dict[str, Any]]:
    """Color and marker of each candidate, the same in all panels."""
    names = dict.fromkeys(row["name"] for case in record["cases"] for row in case["rows"])
    colors = plt.get_cmap("tab10" if len(names) <= 10 else "tab20").colors
    looks = zip(names, cycle(colors), cycle(MARKERS), strict=False)
    return {name: {"color": color, "marker": marker} for name, color, marker in looks}


def _draw_linear(axes: Any, cases: Sequence[Record], value: Callable[[Record], float]) -> None:
    """A line proportional to the number of tokens, from our smallest value at the shortest length."""
    starts = [value(row) for row in cases[0]["rows"] if row["role"] == "ours" and "ratio" in row]
    if starts:
        lengths = _lengths(cases)
        points = [(length, min(starts) * length / lengths[0]) for length in (lengths[0], lengths[-1])]
        axes.plot(*zip(*points, strict=True), color="gray", lw=3, alpha=0.4, label="linear in tokens")


def _lengths(cases: Iterable[Record]) -> list[int]:
    return [case["shape"]["length"] for case in cases]


def _by_candidate(cases: Iterable[Record]) -> dict[str, list[tuple[int, Record]]]:
    found: dict[str, list[tuple[int, Record]]] = {}
    for case in cases:
        for row in case["rows"]:
            if "timing" in row and row["verdict"]["correct"]:
                found.setdefault(row["name"], []).append((case["shape"]["length"], row))
    return found
