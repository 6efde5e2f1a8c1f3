"""Scores of `dynattn evaluate` as metadata that the Hub reads from a model card."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult
from huggingface_hub.repocard_data import eval_results_to_model_index, model_index_to_eval_results

from ..common.checkpoint_files import weights_sha256
from ..common.errors import UserError
from .checkpoint import Checkpoint

# Names of metrics on the Hub; others keep lm-eval's.
METRICS = {"acc": "accuracy", "acc_norm": "accuracy"}
HARNESS = ("lm-evaluation-harness", "https://github.com/EleutherAI/lm-evaluation-harness")


def read_evaluation(path: Path, checkpoint: Checkpoint) -> list[EvalResult]:
    """The scores of an evaluation, one for each task, number of examples and metric.

    Scores of earlier versions, and of a model that was loaded from the Hub, name no digest of weights.

    Args:
        path: `results.json`, or the folder that holds it.

    Raises:
        UserError: there is no such file, it holds something else, or its scores are those of another model than the
            checkpoint's.
    """
    file = path / "results.json" if path.is_dir() else path
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
        scored = results["model"]["model_type"], results["model"]["parameters"]
        scored_weights = results["model"].get("weights_sha256")
        found = [entry for task in results["tasks"] for entry in _entries(task, results)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{file} holds no scores of tasks, as dynattn evaluate --model MODEL --tasks NAME writes them ({error!r})"
        ) from error
    model = checkpoint.config.model_type, checkpoint.elements.total()
    if scored != model:
        theirs, ours = (f"a {kind} of {count:,} parameters" for kind, count in (scored, model))
        raise UserError(f"the scores in {file} are of {theirs}, and the checkpoint is {ours}; evaluate it")
    if scored_weights not in (None, weights_sha256(checkpoint.folder)):
        raise UserError(f"the scores in {file} are of other weights than those of the checkpoint; evaluate it")
    return found


def _entries(task: Mapping[str, Any], results: Mapping[str, Any]) -> list[EvalResult]:
    shots = task["num_fewshot"]
    own = "dynattn/" + re.sub(r"\W+", "_", task["task"]).strip("_")
    settings = {"num_fewshot": shots, "max_length": results["settings"]["max_length"], "samples": task["samples"]}
    return [
        EvalResult(
            task_type="text-generation",
            task_name="Text Generation",
            dataset_type=task.get("dataset") or own,
            dataset_config=task.get("dataset_config"),
            dataset_name=task["task"],
            metric_type=METRICS.get(name, name),
            metric_name=name if shots is None else f"{name}, {shots}-shot",
            metric_value=round(metric["value"], 6),
            metric_args={**settings, **({} if metric["stderr"] is None else {"stderr": round(metric["stderr"], 6)})},
            source_name=f"{HARNESS[0]} {results['environment']['versions']['lm_eval']}",
            source_url=HARNESS[1],
        )
        for name, metric in task["metrics"].items()
        if math.isfinite(metric["value"])
    ]


def _measured(score: EvalResult) -> tuple[Any, ...]:
    """What a score measures, whatever came out and whichever version measured it."""
    return (
        score.task_type, score.dataset_type, score.dataset_config, score.dataset_name, score.dataset_split,
        score.metric_type, score.metric_name,
    )  # fmt: skip


def merge_evaluation(own: list[EvalResult], added: list[EvalResult], name: str) -> list[EvalResult]:
    """A card's `own` scores and the `added` ones, which replace those of the same task, data and metric.

    Args:
        name: the model's name on its card.

    Raises:
        UserError: written as metadata and read back, as the Hub does, a score is lost or changed.
    """
    replaced = {_measured(one) for one in added}
    kept = [one for one in own if _measured(one) not in replaced]
    merged = [*kept, *added]
    try:
        _, read = model_index_to_eval_results(eval_results_to_model_index(name, merged))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"the scores make no model index that the Hub reads: {error!r}") from error
    if lost := [one.dataset_name for one in merged if one not in read]:
        raise UserError(
            f"the Hub would not read the scores of {', '.join(lost)} as they are; name datasets differently"
        )
    return merged
