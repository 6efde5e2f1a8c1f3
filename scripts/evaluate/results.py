"""The results of an evaluation, and what describes its model and environment beside them."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..common.checkpoint_files import weights_sha256
from ..common.environment import hardware, source_commit, versions
from ..common.folder_names import may_be_on_the_hub
from .quoted import Quoted


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
