"""Writes results in the files that lm-eval itself writes, so that tools for such files can read them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.loggers import EvaluationTracker

from ..common.errors import UserError

FOLDER = "lm-eval"


def write_lm_eval_files(raw: Sequence[Mapping[str, Any]], folder: Path, content: Mapping[str, Any]) -> None:
    """Writes `lm-eval/MODEL/results_TIME.json`, one for each number of examples, and samples if they were logged.

    Args:
        raw: what `lm_eval.evaluate` returned for each number of examples.
        folder: the folder in which the folder `lm-eval` is created.
        content: the fields `model`, `settings` and `environment` of `Results`.

    Raises:
        UserError: lm-eval could not write them.
    """
    for results in raw:
        source = f"pretrained={content['model']['path']}"
        tracker = EvaluationTracker(output_path=str(folder / FOLDER))
        tracker.general_config_tracker.log_experiment_args("hf", source, None, None, False)
        samples = results.get("samples", {})
        told = {name: value for name, value in results.items() if name != "samples"}
        tracker.save_results_aggregated({**told, **_circumstances(source, content)}, samples)
        for task, lines in samples.items():
            tracker.save_results_samples(task, [dict(line) for line in lines])
    # The tracker logs errors instead of raising them, so the files are counted.
    written = list((folder / FOLDER).rglob("results_*.json"))
    if len(written) != len(raw):
        place = folder / FOLDER
        raise UserError(f"lm-eval wrote {len(written)} of {len(raw)} result files into {place}; is the disk full?")


def _circumstances(source: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that `lm_eval.simple_evaluate` adds to the results of `lm_eval.evaluate`."""
    model, settings, environment = (content[name] for name in ("model", "settings", "environment"))
    seeds = dict.fromkeys(("random_seed", "numpy_seed", "torch_seed", "fewshot_seed"), settings["seed"])
    return {
        "config": {
            "model": "hf",
            "model_args": source,
            "model_num_parameters": model["parameters"],
            "model_dtype": model["dtype"],
            "batch_size": settings["batch_size"],
            "limit": settings["limit"],
            **seeds,
        },
        "date": environment["date"],
        "transformers_version": environment["versions"]["transformers"],
        "lm_eval_version": environment["versions"]["lm_eval"],
        "max_length": settings["max_length"],
    }
