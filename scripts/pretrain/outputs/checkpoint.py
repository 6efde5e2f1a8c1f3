"""Checkpoints that are complete or absent, and that only the run that made them can resume.

A checkpoint is a folder with

* `tensors`: weights, buffers and the state of the optimizer (see `training_state.py`);
* for each process its random states and, if it carries memory, the memory;
* `state.json`: the progress, the fingerprint of the run, how its processes shared the work, the size and the checksum
  of every other file, and a checksum of all this.

It is written under another name and renamed (see `checkpoint_writer.py`), so that a run that is killed while it saves
leaves no incomplete checkpoint.
"""

import json
import logging
import math
import pickle
import re
import shutil
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn
from torch.optim import Optimizer

from ...common.atomic_file import partial_path, put_in_place, write_json
from ...common.errors import UserError, first_line, refusal_of
from ..carried_memory import CarriedMemory
from ..engines.interface import Engine
from ..weight_average import WeightAverage
from . import checksums
from .earlier_format import is_earlier_format, load_earlier
from .random_state import load_random_state, random_state_file

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"
# The folder of weights and optimizer.
TENSORS = "tensors"
CHECKPOINT_NAME = re.compile(r"step-(\d{6,})")
# The name that a checkpoint has while it is deleted.
DELETED = ".deleted"


@dataclass
class TrainingProgress:
    """How far a run has come.

    Attributes:
        step: updates made.
        tokens: tokens read by all processes.
        seconds: time spent on updates, without validation and saving.
        loss_sum, loss_count: sum and number of the losses since the last line of training metrics.
        throughput: the counts of `Throughput` since that line, as they were when the checkpoint was saved.
        validated: the update after which the last validation was made.
        skipped: how many updates' data rollbacks have left out.
        bad_updates: how many updates have been skipped or rolled back.
        recent_losses: the losses of the last updates, with which a spike is compared.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0
    loss_count: int = 0
    throughput: dict[str, float] = field(default_factory=dict)
    validated: int = 0
    skipped: int = 0
    bad_updates: int = 0
    recent_losses: list[float] = field(default_factory=list)

    @property
    def data_step(self) -> int:
        """The number, from 0, of the update whose data is read next, if data that was left out is counted."""
        return self.step + self.skipped

    def add(self, loss: float, tokens: int, seconds: float) -> None:
        """Counts an update; one that was skipped has a loss of nan."""
        self.step += 1
        self.tokens += tokens
        self.seconds += seconds
        if not math.isnan(loss):
            self.loss_sum += loss
            self.loss_count += 1


def load(
    engine: Engine,
    path: Path,
    model: nn.Module,
    optimizer: Optimizer,
    memory: CarriedMemory,
    average: WeightAverage | None = None,
) -> TrainingProgress:
    """Restores weights, their average, optimizer, random states and memory from a verified checkpoint.

    Another engine or another number of processes may have saved it. A process without a saved random state keeps its
    own. No code in the files is run.

    Returns:
        The progress of the run.

    Raises:
        UserError: a file holds something else than tensors and plain values, or the engine does not read checkpoints of
            earlier versions.
    """
    if is_earlier_format(path) and not engine.reads_earlier_format:
        raise UserError(
            f"the checkpoint {path} is of an earlier version, which engine={engine.name} does not read; resume it with "
            "engine ddp or fsdp2, save, and go on from there"
        )
    accelerator = engine.accelerator
    process = accelerator.process_index
    try:
        if is_earlier_format(path):
            load_earlier(path, accelerator.unwrap_model(model), optimizer, process)
        else:
            engine.load_tensors(path / TENSORS, model, optimizer, average)
            if (file := random_state_file(path, process)).exists():
                load_random_state(file, accelerator.device)
    except (pickle.UnpicklingError, SafetensorError, RuntimeError, ValueError, LookupError) as error:
        reason = refusal_of(error) if isinstance(error, pickle.UnpicklingError) else first_line(error)
        raise UserError(f"cannot load the checkpoint {path}: {reason}; resume from another one") from error
    memory.load(path, accelerator)
    return TrainingProgress(**read_state(path)["progress"])


def complete(final: Path, state: dict[str, Any], keep: int) -> None:
    """Writes `state.json` as the last file of a checkpoint, gives it its name `final`, and deletes older checkpoints.

    Args:
        keep: how many of the newest checkpoints are kept; 0 keeps all.
    """
    partial = partial_path(final)
    write_json(partial / STATE_FILE, {**state, "checksum": _state_checksum(state)})
    put_in_place(partial, final)
    for old in list_checkpoints(final.parent)[: -keep if keep else 0]:
        _delete(old)


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [path for path in folder.iterdir() if CHECKPOINT_NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=step_of)


def verify(path: Path) -> None:
    """Compares every file with the size and checksum that were stored with it.

    Raises:
        UserError: there is no checkpoint, or a file is missing, truncated or changed; the message names the file and
            the newest intact older checkpoint.
    """
    if not path.is_dir():
        raise UserError(f"there is no checkpoint {path}; give the path of a step-NNNNNN folder, auto, intact or never")
    if CHECKPOINT_NAME.fullmatch(path.resolve().name) is None:
        found = list_checkpoints(path) or list_checkpoints(path / "checkpoints")
        newest = f"; the newest of this run is {found[-1]}" if found else ", whose name is step-NNNNNN"
        raise UserError(f"{path} is no checkpoint{newest}")
    if damage := find_damage(path):
        older = [other for other in list_checkpoints(path.parent) if step_of(other) < step_of(path)]
        intact = next((other for other in reversed(older) if find_damage(other) is None), None)
        fix = (
            f"take {intact} instead, as dynattn pretrain does with --resume intact"
            if intact
            else "no older checkpoint is intact, so start anew"
        )
        raise UserError(f"the checkpoint {path} is damaged: {damage}; {fix}")


def newest_intact(folder: Path) -> Path | None:
    """The newest checkpoint that is undamaged, or None if there is no checkpoint. Warns of each one that it skips.

    Raises:
        UserError: there are checkpoints, and all are damaged.
    """
    found = list_checkpoints(folder)
    for path in reversed(found):
        damage = find_damage(path)
        if damage is None:
            return path
        logger.warning("skipping the checkpoint %s, which is damaged: %s", path, damage)
    if found:
        raise UserError(f"none of the {len(found)} checkpoints in {folder} is intact; --overwrite starts anew")
    return None


def find_damage(path: Path) -> str | None:
    """Says what is wrong with a checkpoint, or None."""
    try:
        state = read_state(path)
        checksum = state.pop("checksum", None)  # earlier versions wrote none
        files = state["files"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return f"{STATE_FILE} is missing or cannot be read"
    if checksum not in (None, _state_checksum(state)):
        return f"{STATE_FILE} does not have the contents that were saved"
    names = {file.relative_to(path).as_posix() for file in path.rglob("*") if not file.is_dir() or file.is_symlink()}
    names = {name for name in names if not name.startswith(".")}
    if unknown := sorted(names - files.keys() - {STATE_FILE}):
        return f"{unknown[0]} was not saved with it"
    return checksums.find_damage(path, files)


def remove_leftovers(folder: Path) -> None:
    """Deletes checkpoints that were not completely written, or not completely deleted."""
    for pattern in (".step-*.partial", DELETED):
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover)


def _delete(path: Path) -> None:
    """Renames a checkpoint before it deletes it, so that no incomplete one is ever found."""
    doomed = path.with_name(DELETED)
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


def read_state(path: Path) -> dict[str, Any]:
    """The content of `state.json` of a checkpoint."""
    return json.loads((path / STATE_FILE).read_text())


def _state_checksum(state: dict[str, Any]) -> int:
    """CRC-32 of the content of `state.json` without its checksum, as JSON with sorted keys."""
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


def step_of(path: Path) -> int:
    """The update after which a checkpoint was saved; 0 for a folder of another name."""
    match = CHECKPOINT_NAME.fullmatch(path.name)
    return int(match.group(1)) if match else 0
