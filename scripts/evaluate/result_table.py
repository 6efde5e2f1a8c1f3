"""The table of an evaluation, in Markdown that is aligned for a terminal."""

from collections.abc import Sequence

from ..common.markdown import aligned_table
from .quoted import Quoted, quoted_source
from .results import Metric, Results, TaskResult


def format_table(results: Results) -> str:
    """A Markdown table, aligned for a terminal, with notes on tasks that could not be loaded, and warnings."""
    head = ("Task", "Shots", "n", "Metric", "", "Value", "±", "Chance")
    rows = [
        row
        for result in results.tasks
        for name, metric in result.metrics.items()
        for row in (_row(result, name, metric), *_quoted_rows(results.quoted, result, name))
    ]
    lines = aligned_table(head, rows) if rows else []
    lines += [f"not available: {task}: {reason}" for task, reason in results.unavailable.items()]
    if segment := results.settings.get("segment"):
        lines.append(f"perplexities: documents read in segments of {segment} tokens, with memory carried between them")
    if any(_quoted_rows(results.quoted, result, name) for result in results.tasks for name in result.metrics):
        lines.append(f"quoted, not measured here, with an earlier lm-eval: {quoted_source()}")
    lines += [f"warning: {text}" for text in results.warnings]
    return "\n".join(lines)


def _row(result: TaskResult, name: str, metric: Metric) -> tuple[str, ...]:
    shots = "" if result.num_fewshot is None else str(result.num_fewshot)
    arrow = {True: "↑", False: "↓", None: ""}[metric.higher_is_better]
    stderr = "" if metric.stderr is None else _number(metric.stderr)
    chance = f"{result.chance:.4f}" if result.chance is not None and name.startswith("acc") else ""
    return result.task, shots, str(result.samples), name, arrow, _number(metric.value), stderr, chance


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e5 else f"{value:.4g}"


def _quoted_rows(quoted: Sequence[Quoted], result: TaskResult, name: str) -> list[tuple[str, ...]]:
    """The quoted scores of the same task, number of examples and metric."""
    same = [one for one in quoted if (one.task, one.num_fewshot, one.metric) == (result.task, result.num_fewshot, name)]
    return [("", "", "", f"quoted: {one.model}", "", f"{one.value:.4f}", f"{one.stderr:.4f}", "") for one in same]
