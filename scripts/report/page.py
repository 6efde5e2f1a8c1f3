"""The page: what differs between the runs, how they ended, and their curves."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..common.atomic_file import write_whole
from ..common.errors import UserError
from ..common.figures import literal_label
from ..common.html_page import DOCTYPE, gallery, heading, page, table
from ..common.metric_records import is_number
from .charts import draw_curves, draw_layers
from .run import ReportedRun, differing

CURVES = (
    (("train", "validation"), "loss", "Loss (nats per target)", False),
    (("validation",), "average_loss", "Loss of the averaged weights (nats per target)", False),
    (("validation",), "bits_per_byte", "Bits per byte of held-out text", False),
    (("train",), "grad_norm", "Gradient norm before clipping", True),
    (("train",), "learning_rate", "Learning rate", False),
    (("train",), "composition_learning_rate", "Learning rate of the weights that compose heads", False),
    (("train",), "tokens_per_second", "Tokens per second", False),
    (("train",), "mfu", "Model FLOPs utilization", False),
    (("train",), "memory_gib", "Memory (GiB) of a process at most", False),
    (("train",), "passes", "Passes over the data", False),
)
RESULTS = (
    "steps", "tokens", "parameters", "train_loss", "validation_loss", "perplexity", "bits_per_byte",
    "tokens_per_second", "mfu", "train_seconds", "hardware",
)  # fmt: skip
PASSES = "passes_"
HEALTH = "composition"
TERMS = ("query_low_rank", "key_low_rank", "query_gate", "key_gate", "static")
STAGES = {"pre": "scores", "post": "probabilities"}


def write_page(runs: Sequence[ReportedRun], output: Path) -> None:
    """Writes the page of some runs.

    Raises:
        UserError: `output` is a file that is no page.
        OSError: the page cannot be written.
    """
    check_is_page(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, render(runs))


def check_is_page(output: Path) -> None:
    """Raises UserError if the page would replace something else, such as a file that was meant to be read."""
    if not output.exists():
        return
    if not output.is_file():  # opening a named pipe would wait for its other end
        raise UserError(f"--output {str(output)!r} is no file; give the name of one, such as report.html")
    with output.open("rb") as file:
        start = file.read(len(DOCTYPE)).decode("utf-8", "replace")
    if start and start != DOCTYPE:
        raise UserError(f"{output} is no page of this job, and would be replaced; give another file with --output")


def render(runs: Sequence[ReportedRun]) -> str:
    """The page as HTML."""
    title = ", ".join(run.name for run in runs)
    sections = [
        ("Results", values_table(runs, {run.name: _chosen(run.result, RESULTS) for run in runs})),
        ("Settings" if len(runs) == 1 else "Settings that differ", _settings(runs)),
        ("Curves", gallery([draw_curves(runs, s, f, label, log=log) for s, f, label, log in curves_of(runs)])),
        *((f"Composition of {run.name}", gallery(draw_health(run))) for run in runs if run.fields(HEALTH)),
    ]
    parts = [part for name, content in sections if content for part in (heading(name), content)]
    return page(title, parts)


def curves_of(runs: Sequence[ReportedRun]) -> list[tuple[tuple[str, ...], str, str, bool]]:
    """`CURVES`, and for mixtures the passes over each source."""
    fields = dict.fromkeys(field for run in runs for field in run.fields("train") if field.startswith(PASSES))
    labels = {field: literal_label(f"Passes over {field.removeprefix(PASSES)}") for field in fields}
    return [*CURVES, *((("train",), field, label, False) for field, label in labels.items())]


def draw_health(run: ReportedRun) -> list[str]:
    """Charts of composition in each layer at the last measurement: sizes of terms, similarities of heads, gates."""
    last = [record for record in run.records if record["split"] == HEALTH][-1]
    charts = []
    for stage, maps in STAGES.items():
        sizes = {term: _by_layer(last, stage, term) for term in TERMS}
        likeness = {f"{when} composing": _by_layer(last, stage, f"similarity_{when}") for when in ("before", "after")}
        share = {"gates": _by_layer(last, stage, "gate_share")}
        step = f"update {last['step']}"
        for label, values in {
            f"Size of the terms on {maps} against the identity, {step}": sizes,
            f"Similarity of the heads' {maps}, {step}": likeness,
            f"Share of the gates in the terms on {maps}, {step}": share,
        }.items():
            present = {name: series for name, series in values.items() if series}
            charts += [draw_layers(present, label)] if present else []
    return charts


def values_table(runs: Sequence[ReportedRun], values: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each value and a column for each run; empty if there are no values."""
    names = dict.fromkeys(name for run in runs for name in values[run.name])
    rows = [[name, *(_show(values[run.name].get(name)) for run in runs)] for name in names]
    return table(["", *(run.name for run in runs)], rows) if rows else ""


def _settings(runs: Sequence[ReportedRun]) -> str:
    names = differing(runs)
    return values_table(runs, {run.name: _chosen(run.arguments, names) for run in runs})


def _chosen(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _by_layer(record: Mapping[str, Any], stage: str, what: str) -> list[float]:
    """One measurement of all layers, in their order; NaN for what is no number."""
    values = (record[name] for name in record if name.endswith(f".{stage}.{what}"))
    return [value if is_number(value) else math.nan for value in values]


def _show(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
