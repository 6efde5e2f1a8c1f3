"""A record as Markdown."""

from collections.abc import Mapping
from typing import Any

from ...common.markdown import aligned_table
from ..harness.interface import GRAPH
from ..subjects.parts import WHOLE

Record = Mapping[str, Any]
NOTE = """\
Times are medians of interleaved rounds in one process; `IQR` is the spread of the middle half. `/ best plain` divides
by the fastest plain multi-head attention of the case (`1`). Errors are relative to the reference op in float64, all
gradients as one vector; "wrong" is a tensor that is off by more than {rms:g} times the reference op's own error in this
dtype ({largest:g} times for the largest single deviation), and gets no ratio. `of peak` counts composition as work and
divides by the rate of a large matrix product. `peak` is the most memory above the inputs, results included. `first` is
the first call, compilation included."""
GRAPH_NOTE = """\
Candidates in a CUDA graph replay what one call launched: their times lack the launches by the CPU, and they have taken
their memory before."""
PROFILE_NOTE = """\
Parts are timed inside whole calls, in interleaved rounds of their own; `share` is of the call. The floor of a matrix
product is its FLOPs over visible pairs at the rate of a large square product ({product:,.0f} GFLOP/s). The floor of any
other part is the larger of two times: one in-place multiplication of as many elements of a map in the processor's cache
({elements:,.1f} G elements/s), and the FLOPs of its composition at the rate of the product. The floor of the call is
the FLOPs of the function, nothing recomputed. All rates are of this run. `rest` is the call less its parts: packing,
copies, buffers, autograd and the loop in Python; `without the clock` are calls in the same rounds that are not timed
inside."""


def format_record(record: Record) -> str:
    """Metadata of the run, how to read the tables, and one table for each case."""
    parts = [_heading(record), NOTE.format(**record["error_multiples"])]
    if any(row["name"].endswith(GRAPH) for case in record["cases"] for row in case["rows"]):
        parts.append(GRAPH_NOTE)
    if any("profile" in row for case in record["cases"] for row in case["rows"]):
        rates = [record["machine"][f"{name}_per_second"] / 1e9 for name in ("gemm_flops", "pass_elements")]
        parts += [PROFILE_NOTE.format(product=rates[0], elements=rates[1])]
    parts += [format_case(case, record["machine"]["gemm_flops_per_second"]) for case in record["cases"]]
    return "\n\n".join(parts) + "\n"


def case_title(case: Record) -> str:
    """One line that names a case."""
    shape = case["shape"]
    memory = f", memory {shape['memory']}" if shape["memory"] else ""
    window = f", window {case['window']}" if case["window"] else ""
    note = f", {case['note']}" if case.get("note") else ""
    size = f"{shape['heads']}x{shape['width']}, {shape['length']} tokens{memory}{window}{note}"
    return f"{case['subject']}, {case['passes']}: {size}, batch {case['batch_size']}, {case['dtype']}"


def format_case(case: Record, peak: float) -> str:
    """The table of a case, fastest first; then what was wrong and what could not be measured."""
    head = ["candidate", "median ms", "min", "IQR", "n", "/ best plain", "peak MiB", "of peak"]
    head += ["output error", "gradient error", "first s"]
    with_tokens = any(row.get("tokens_per_second") for row in case["rows"])
    head += ["tokens/s"] if with_tokens else []
    measured = sorted((row for row in case["rows"] if "timing" in row), key=lambda row: row["timing"]["median"])
    rows = [_cells(row, peak, with_tokens) for row in measured]
    failures = [f"not measured: {row['name']}: {row['failure']}" for row in case["rows"] if "failure" in row]
    wrong = [f"wrong: {row['name']}: {_fault(row['verdict'])}" for row in measured if not row["verdict"]["correct"]]
    table = "\n".join([f"**{case_title(case)}**", "", *aligned_table(head, rows), *wrong, *failures])
    return "\n\n".join([table, *(format_profile(row) for row in measured if "profile" in row)])


def format_profile(row: Record) -> str:
    """The table of the parts of one candidate's calls, in the order of computation."""
    (whole,) = (part["timing"]["median"] for part in row["profile"] if part["name"] == WHOLE)
    head = [f"part of {row['name']}", "median ms", "min", "IQR", "share", "calls", "floor ms", "/ floor"]
    return "\n".join(aligned_table(head, [_part_cells(part, whole) for part in row["profile"]]))


def _part_cells(part: Record, whole: float) -> list[str]:
    timing, floor = part["timing"], part["floor_seconds"]
    cells = [part["name"], *(f"{timing[name] * 1e3:.4g}" for name in ("median", "minimum", "spread"))]
    cells += [f"{timing['median'] / whole:.1%}", "" if part["calls"] is None else f"{part['calls']:g}"]
    return cells + (["", ""] if floor is None else [f"{floor * 1e3:.4g}", f"{timing['median'] / floor:.2f}"])


def _cells(row: Record, peak: float, with_tokens: bool) -> list[str]:
    timing, verdict = row["timing"], row["verdict"]
    cells = [row["name"], *(f"{timing[name] * 1e3:.4g}" for name in ("median", "minimum", "spread")), str(timing["n"])]
    cells += [_ratio(row), "" if row["name"].endswith(GRAPH) else f"{row['peak_bytes'] / 2**20:.3g}"]
    cells += [f"{row['flops_per_second'] / peak:.1%}" if verdict["correct"] else ""]
    cells += ["" if verdict[name] is None else f"{verdict[name]:.1e}" for name in ("output_error", "gradient_error")]
    cells += [f"{row['first_seconds']:.3g}"]
    tokens = row.get("tokens_per_second")
    return cells + ([f"{tokens:,.0f}" if tokens else ""] if with_tokens else [])


def _fault(verdict: Record) -> str:
    if verdict["excess"] is None:
        return f"{verdict['where']} is missing, not finite or of another shape"
    return f"{verdict['where']} is off by {verdict['excess']:.3g} times the limit"


def _ratio(row: Record) -> str:
    if not row["verdict"]["correct"]:
        return "wrong"
    if "ratio" not in row:
        return ""
    return "1" if row["is_baseline"] else f"{row['ratio']:.2f}"


def _heading(record: Record) -> str:
    versions = ", ".join(f"{name} {record['versions'][name]}" for name in ("torch", "transformers", "python"))
    allocator = ", ".join(f"{name}={value}" for name, value in record["allocator"].items())
    rates = record["machine"]["gemm_flops_per_second"] / 1e9, record["machine"]["copy_bytes_per_second"] / 1e9
    commands = dict.fromkeys(" ".join(words) for words in [*record.get("command_before", []), record["command"]])
    starts = ", then ".join([*record.get("started_before", []), record["started"]])
    lines = [
        ", then ".join(f"`{command}`" for command in commands),
        "",
        f"{starts}, commit {record['commit'] or 'unknown'}, {record['hardware']}, "
        f"{record['threads']} threads, {versions}, {allocator}. Matrix product {rates[0]:,.0f} GFLOP/s, "
        f"copy {rates[1]:,.1f} GB/s. Load average {record['load_average'][0]:.1f} before and {_load_after(record)}.",
    ]
    if record["left_out"]:
        lines += ["", f"Left out: {', '.join(record['left_out'])}."]
    if record.get("cases_left_out"):
        lines += ["", f"No time was left for: {'; '.join(record['cases_left_out'])}."]
    if record.get("clocks"):
        lines += ["", ", ".join(f"{name} {value}" for name, value in record["clocks"].items()) + "."]
    return "\n".join(lines)


def _load_after(record: Record) -> str:
    """The load at the end; a run that was interrupted has the cases that it came to."""
    load = record.get("load_average_after")
    return "not known after: the run was interrupted, and lacks cases" if load is None else f"{load[0]:.1f} after"
