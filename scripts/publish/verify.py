"""Verifies that a published folder works on its own: a process without the package must give the same answers."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..common.checkpoint_loading import check_loaded, quiet_loading
from ..common.errors import UserError, last_line, refusal_of
from . import probe
from .checkpoint import Checkpoint
from .sentence_modules import LIBRARY

# Largest difference in roundings of the largest element. Usually there is none, but kernels may sum in another order.
ROUNDINGS = 8
# What a checkpoint may raise where its configuration or its weights are wrong.
REFUSALS = (
    ArithmeticError, ImportError, LookupError, OSError, RuntimeError, SafetensorError, TypeError, ValueError,
)  # fmt: skip
NOT_PASSED_ON = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_CACHE", "HF_MODULES_CACHE", "TRANSFORMERS_CACHE")


@dataclass(frozen=True)
class PublishedCheck:
    """The names of the answers that were compared, and their largest difference with and without the package."""

    compared: tuple[str, ...]
    max_difference: float


def answers_with_package(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Loads the checkpoint with the package's classes and returns its answers, as `probe.measure` does.

    Raises:
        UserError: it does not load, its weights do not fit its configuration, it refuses to be called, or its outputs
            are not finite.
    """
    options: Any = {"dtype": "auto", "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        loaded: Any = checkpoint.model_class.from_pretrained(checkpoint.folder, **options)
    except REFUSALS as error:
        raise UserError(f"{checkpoint.folder} does not load: {refusal_of(error)}") from error
    model, info = loaded
    check_loaded(str(checkpoint.folder), info, exactly=True)
    try:
        answers = probe.measure(model.eval(), checkpoint.tokenizer)
    except (AttributeError, *REFUSALS) as error:
        if checkpoint.plain_class is None:
            raise
        raise UserError(
            f"the {checkpoint.model_class.__name__} in {checkpoint.folder} does not work: {refusal_of(error)}"
        ) from error
    if verifies_sentences(checkpoint):
        answers["embeddings"] = sentence_answer(checkpoint, model)
    for name, answer in answers.items():
        if not torch.isfinite(answer).all():
            raise UserError(f"the model in {checkpoint.folder} outputs NaN or infinity ({name}); repair its weights")
    return answers


def verify_folder(folder: Path, checkpoint: Checkpoint, expected: dict[str, Tensor]) -> PublishedCheck:
    """Loads `folder` in a process that cannot import the package and compares its answers with `expected`.

    That process also generates, and saves the model again and loads the copy. It works in a temporary folder (`TMPDIR`)
    that must have room for one copy of the weights.

    Raises:
        UserError: the folder does not work there, or answers differ by more than rounding.
    """
    with tempfile.TemporaryDirectory(prefix="publish-") as temporary:
        work = Path(temporary)
        job: dict[str, Any] = {
            "folder": str(folder),
            "auto_class": checkpoint.auto_class,
            "has_tokenizer": checkpoint.tokenizer is not None,
            "sentence_class": checkpoint.sentence_class if verifies_sentences(checkpoint) else None,
            "copy": str(work / "copy"),
            "answers": str(work / "answers.safetensors"),
            "copy_answers": str(work / "copy_answers.safetensors"),
            "threads": torch.get_num_threads(),
            "roots": package_roots(),
        }
        (work / "job.json").write_text(json.dumps(job), encoding="utf-8")
        run_probe(work)
        compare_answers(expected, load_file(job["copy_answers"]))
        return compare_answers(expected, load_file(job["answers"]))


def sentence_answer(checkpoint: Checkpoint, model: Any) -> Tensor:
    """What Sentence Transformers makes of the outputs of a model that was loaded with the package.

    Where heads are composed in place, that library loads a plain model, which is replaced, and reports what it drops.

    Raises:
        UserError: a module does not load, or does not take the outputs of the model.
    """
    try:
        with quiet_loading():
            encoder = probe.load_encoder(checkpoint.folder, str(checkpoint.sentence_class))
            encoder[0].model = model
            return probe.embed(encoder)
    except (AttributeError, *REFUSALS) as error:
        raise UserError(
            f"Sentence Transformers does not load or use {checkpoint.folder}: {refusal_of(error)}"
        ) from error


def verifies_sentences(checkpoint: Checkpoint) -> bool:
    """Whether the embeddings or scores of a model of Sentence Transformers can be compared."""
    return checkpoint.sentence_class is not None and find_spec(LIBRARY) is not None


def run_probe(work: Path) -> None:
    """Runs the probe on `job.json` in `work`, isolated (`-I`: no PYTHONPATH, no current folder), with caches in `work`.

    Raises:
        UserError: it failed; the message is its last line.
    """
    environment = {name: value for name, value in os.environ.items() if name not in NOT_PASSED_ON}
    environment |= {"HF_HOME": str(work / "home"), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-I", probe.__file__, str(work / "job.json")]
    finished = subprocess.run(
        command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, errors="replace", check=False
    )
    if finished.returncode != 0:
        reason = last_line(finished.stderr) if finished.stderr.strip() else f"exit status {finished.returncode}"
        raise UserError(f"the folder does not work without the package, so it was not written: {reason}")


def compare_answers(expected: dict[str, Tensor], observed: dict[str, Tensor]) -> PublishedCheck:
    """Compares answers of equal names and shapes: integers exactly, floats up to a few roundings of the largest one.

    Raises:
        UserError: an answer is absent or differs.
    """
    if expected.keys() != observed.keys():
        raise UserError(f"with the package the answers are {sorted(expected)}, without it {sorted(observed)}")
    largest = 0.0
    for name, answer in expected.items():
        if answer.shape != observed[name].shape or answer.dtype != observed[name].dtype:
            raise UserError(f"without the package the answer {name!r} has another shape or dtype")
        difference = (answer.double() - observed[name].double()).abs().max().item()
        rounding = torch.finfo(answer.dtype).eps * answer.abs().max().item() if answer.is_floating_point() else 0.0
        if not difference <= (limit := ROUNDINGS * rounding):
            raise UserError(
                f"without the package the answer {name!r} differs by {difference:.1e}, which is more than rounding "
                f"({limit:.1e}), so the folder was not written"
            )
        largest = max(largest, difference)
    return PublishedCheck(tuple(expected), largest)


def package_roots() -> list[str]:
    """The folders that the package's code is in, however it is installed."""
    packages = [module for name, module in sys.modules.items() if name.partition(".")[0] == "dynattn"]
    return sorted({str(Path(path).resolve()) for module in packages for path in getattr(module, "__path__", ())})
