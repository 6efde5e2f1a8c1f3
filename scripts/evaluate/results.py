"""The results of an evaluation: a JSON file that also describes model, settings and environment, and a table."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lm_eval.utils import handle_non_serializable
from transformers import PreTrainedModel

from ..common.atomic_file import put_in_place, write_json, write_whole
from ..common.atomic_folder import check_nothing_else
from ..common.checkpoint_files import weights_sha256
from ..common.disk_errors import disk_errors_explained
from ..common.environment import hardware, source_commit, versions
from ..common.errors import UserError
from ..common.folder_lock import FolderLock
from ..common.folder_names import make_folder, may_be_on_the_hub, resolve_folder
from ..common.markdown import aligned_table
from .arguments import EvaluateArguments
from .lm_eval_files import FOLDER, write_lm_eval_files
from .quoted import Quoted, quoted_source

RESULTS, TABLE, SAMPLES, PLOT = "results.json", "results.md", "samples.jsonl", "long.png"
LOCK = ".lock"


@dataclass(frozen=True)
class Metric:
    """One score; `stderr` is its standard error, None if lm-eval gives none."""

    value: float
    stderr: float | None = None
    higher_is_better: bool | None = None


@dataclass(frozen=True)
class TaskResult:
    """One task or group at one number of in-context examples.

    Attributes:
        num_fewshot: for a group whose tasks differ in it, the number that was asked for, None if none was.
        chance: the accuracy of guessing, where it is known.
        dataset, dataset_config: the name of its dataset on the Hub, and of the configuration, if it has them.
    """

    task: str
    num_fewshot: int | None
    samples: int
    metrics: dict[str, Metric]
    version: str | None = None
    chance: float | None = None
    dataset: str | None = None
    dataset_config: str | None = None


@dataclass
class Results:
    """All results of one evaluation.

    Attributes:
        unavailable: for each task that could not be loaded, the reason.
        quoted: published scores, for comparison.
        raw: what lm-eval returned for each number of examples.
    """

    model: dict[str, Any]
    settings: dict[str, Any]
    environment: dict[str, Any]
    tasks: list[TaskResult] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list, repr=False)
    quoted: list[Quoted] = field(default_factory=list)
    raw: list[dict[str, Any]] = field(default_factory=list, repr=False)

    def value(self, task: str, metric: str, num_fewshot: int | None = None) -> float:
        """The first value of `metric` of `task`, with `num_fewshot` examples if given.

        Raises:
            KeyError: there is no such value.
        """
        for result in self.tasks:
            if result.task == task and metric in result.metrics and num_fewshot in (None, result.num_fewshot):
                return result.metrics[metric].value
        raise KeyError(f"no value of {metric!r} for task {task!r} with num_fewshot={num_fewshot}")


def read_lm_eval(
    raw: Mapping[str, Any], chances: Mapping[str, float], num_fewshot: int | None = None
) -> list[TaskResult]:
    """Turns lm-eval's result dictionary into `TaskResult`s, tasks first and groups after them.

    Args:
        num_fewshot: the number that was asked for, which lm-eval does not give to a group whose tasks differ in it.
    """
    return [
        TaskResult(
            task=name,
            num_fewshot=raw["n-shot"].get(name, num_fewshot),
            samples=scores["sample_len"],
            metrics=_metrics(scores, raw["higher_is_better"].get(name, {})),
            version=str(raw["versions"].get(name)),
            chance=chances.get(name),
            **_hub_dataset(raw["configs"].get(name, {})),
        )
        for name, scores in raw["results"].items()
        if "sample_len" in scores
    ]


def _hub_dataset(config: Mapping[str, Any]) -> dict[str, str | None]:
    """The fields `dataset` and `dataset_config` of a task: None where its data comes from files of the user."""
    path = config.get("dataset_path") or ""
    given = config.get("dataset_kwargs") or {}
    # Beside files a name without owner is that of their format, such as "json", which several tasks share.
    is_format = "/" not in path and ("data_files" in given or "data_dir" in given)
    if is_format or not may_be_on_the_hub(path):
        return {"dataset": None, "dataset_config": None}
    return {"dataset": path, "dataset_config": config.get("dataset_name")}


def _metrics(scores: Mapping[str, Any], higher_is_better: Mapping[str, bool]) -> dict[str, Metric]:
    """The metrics in lm-eval's scores, whose keys are "METRIC,FILTER", and "METRIC_stderr,FILTER" for errors."""
    metrics = {}
    for key, value in scores.items():
        name, comma, task_filter = key.partition(",")
        if not comma or name.endswith("_stderr"):
            continue
        stderr = scores.get(f"{name}_stderr,{task_filter}")
        label = name if task_filter == "none" else f"{name} ({task_filter})"
        metrics[label] = Metric(float(value), stderr if isinstance(stderr, float) else None, higher_is_better.get(name))
    return metrics


def describe_model(model: PreTrainedModel) -> dict[str, Any]:
    """Where the model came from, its size, and hashes of its weights and of its configuration.

    The hash of a configuration is without path and library version.
    """
    config = model.config.to_dict()
    path = config.pop("_name_or_path", None) or model.config._name_or_path
    config.pop("transformers_version", None)
    text = json.dumps(config, sort_keys=True, default=str)
    return {
        "path": path,
        "model_type": model.config.model_type,
        "architecture": type(model).__name__,
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights_sha256": weights_sha256(Path(path)) if path else None,
        "config_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Date (UTC), commit, versions, threads and hardware."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": source_commit(),
        "hardware": hardware(device),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }


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


def check_output(folder: str | Path, overwrite: bool) -> None:
    """Raises UserError if results cannot be written into `folder`, or would replace others without `overwrite`.

    A folder `lm-eval` is only replaced if all that is in it are results and samples of lm-eval.
    """
    resolve_folder(str(folder))  # refuses names that no folder can have
    folder = Path(folder)
    taken = [name for name in (RESULTS, TABLE, SAMPLES, PLOT, FOLDER) if (folder / name).exists()]
    if taken and not overwrite:
        raise UserError(f"{folder / taken[0]} exists; choose another --output or pass --overwrite")
    check_nothing_else(folder / FOLDER, ("*/results_*.json", "*/samples_*.jsonl"))
    make_folder(folder)
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {error.strerror}") from error


def write_results(results: Results, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Writes results.json, results.md and, if samples were logged, samples.jsonl.

    The same results are also written as lm-eval writes them, into the folder lm-eval.

    Returns:
        The path of results.json.

    Raises:
        UserError: as `check_output`.
    """
    folder = Path(folder)
    content = asdict(replace(results, samples=[], raw=[]))  # which would be copied, and are written apart
    del content["samples"], content["raw"]
    if results.quoted:
        content["quoted_source"] = quoted_source()
    write_files(folder, content, format_table(results), partial(_write_details, results, content), overwrite=overwrite)
    return folder / RESULTS


def _write_details(results: Results, content: Mapping[str, Any], folder: Path) -> None:
    """Writes the samples, if they were logged, and lm-eval's own files; `content` is that of results.json."""
    lines = [json.dumps(sample, default=handle_non_serializable, ensure_ascii=False) for sample in results.samples]
    if lines:
        write_whole(folder / SAMPLES, "\n".join(lines) + "\n")
    write_lm_eval_files(results.raw, folder, content)


def report(
    arguments: EvaluateArguments,
    results: Mapping[str, Any],
    table: str,
    write_details: Callable[[Path], None] = lambda _: None,
) -> None:
    """Prints the table of an evaluation without lm-eval, and writes its files if there is an `--output`."""
    print(table)
    if arguments.output is not None:
        write_files(Path(arguments.output), results, table, write_details, overwrite=arguments.overwrite)


def write_files(
    folder: Path,
    results: Mapping[str, Any],
    table: str,
    write_details: Callable[[Path], None] = lambda _: None,
    *,
    overwrite: bool,
) -> None:
    """Writes the files of an evaluation of any kind in place of those of an earlier one: all of them or none.

    They are complete before the first is put in its place, and `results.json` is there only beside the others.

    Raises:
        UserError: as `check_output`, which is called again, because evaluating takes long enough for others to write;
            or a file cannot be written.
    """
    check_output(folder, overwrite)
    lock = FolderLock(folder / LOCK)
    with disk_errors_explained(folder):
        lock.wait()  # for another evaluation that ends at the same time
    with lock, disk_errors_explained(folder), tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as temporary:
        check_output(folder, overwrite)  # again, for what that one has written
        staging = Path(temporary)
        write_details(staging)
        write_whole(staging / TABLE, table + "\n")
        write_json(staging / RESULTS, results, ensure_ascii=False, allow_nan=False)
        for name in (RESULTS, TABLE, SAMPLES, PLOT):
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
        for name in (FOLDER, PLOT, SAMPLES, TABLE, RESULTS):
            if (staging / name).exists():
                put_in_place(staging / name, folder / name)
