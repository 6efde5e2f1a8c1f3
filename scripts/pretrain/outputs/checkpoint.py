"""Checkpoints that are whole or absent, and that resume only the run that made them.

A checkpoint is what `Accelerator.save_state` writes (weights as safetensors, optimizer and random states), the memory
of each process, if it carries one, and `state.json` with the progress, the fingerprint of the run, size and checksum
of every other file, and a checksum of all this. It is written under another name and renamed, so a run that is killed
while saving leaves no half checkpoint.
"""

import json
import pickle
import re
import shutil
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils.other import load as load_without_code
from safetensors import SafetensorError

from ...common.atomic_file import partial_path, put_in_place, write_json
from ...common.errors import UserError, first_line
from ...common.segment_memory import CarriedMemory
from ..processes import on_all, on_main
from . import checksums

STATE_FILE = "state.json"
CHECKPOINT_NAME = re.compile(r"step-(\d{6,})")
# What a checkpoint is called while it is deleted.
DELETED = ".deleted"

Fingerprint = dict[str, Any]


@dataclass
class TrainingProgress:
    """How far a run has come.

    Attributes:
        step: updates made.
        tokens: tokens read by all processes.
        seconds: time spent on updates, without validation and saving.
        loss_sum, loss_count: the losses since the last line of training metrics.
        validated: the update after which the last validation was made.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0
    loss_count: int = 0
    validated: int = 0

    def add(self, loss: float, tokens: int, seconds: float) -> None:
        """Counts an update."""
        self.step += 1
        self.tokens += tokens
        self.seconds += seconds
        self.loss_sum += loss
        self.loss_count += 1


def save(
    accelerator: Accelerator,
    folder: Path,
    progress: TrainingProgress,
    memory: CarriedMemory,
    fingerprint: Fingerprint,
    keep: int,
) -> Path:
    """Writes `folder/step-NNNNNN`, deletes all but the newest `keep` checkpoints (0 deletes none); returns its path.

    Raises:
        UserError: the disk is full or cannot be written; the earlier checkpoints are as they were.
    """
    final = folder / f"step-{progress.step:06d}"
    partial = partial_path(final)

    def begin() -> None:
        remove_leftovers(folder)
        partial.mkdir(parents=True)

    def write_share() -> None:
        accelerator.save_state(str(partial))
        memory.save(partial, accelerator)

    def complete() -> None:
        _write_state(partial, progress, fingerprint)
        _replace(final, partial)
        for old in list_checkpoints(folder)[: -keep if keep else 0]:
            _delete(old)

    on_main(accelerator, folder, begin)
    on_all(folder, write_share)
    on_main(accelerator, folder, complete)
    return final


def load(accelerator: Accelerator, path: Path, memory: CarriedMemory) -> TrainingProgress:
    """Puts weights, optimizer, random states and memory of a verified checkpoint back and returns the progress.

    Raises:
        UserError: a file holds something else than tensors and plain values; nothing in it is run.
    """
    random_states = path / f"random_states_{accelerator.process_index}.pkl"
    try:
        accelerator.load_state(str(path))
        if random_states.exists():
            load_without_code(random_states)  # `load_state` is silent about random states that it cannot read
    except (pickle.UnpicklingError, SafetensorError) as error:
        raise UserError(f"cannot load the checkpoint {path}: {first_line(error)}; resume from another one") from error
    memory.load(path, accelerator)
    return TrainingProgress(**_read_state(path)["progress"])


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [path for path in folder.iterdir() if CHECKPOINT_NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=_step)


def verify(path: Path) -> None:
    """Compares every file with the size and checksum that were stored with it.

    Raises:
        UserError: there is no checkpoint, or a file is missing, truncated or changed; the message names the file and
            the newest intact older checkpoint.
    """
    if not path.is_dir():
        raise UserError(f"there is no checkpoint {path}; give the path of a step-NNNNNN folder, auto or never")
    if damage := find_damage(path):
        older = [other for other in list_checkpoints(path.parent) if _step(other) < _step(path)]
        intact = next((other for other in reversed(older) if find_damage(other) is None), None)
        fix = f"resume from {intact} instead" if intact else "no older checkpoint is intact, so start anew"
        raise UserError(f"the checkpoint {path} is damaged: {damage}; {fix}")


def find_damage(path: Path) -> str | None:
    """Says what is wrong with a checkpoint, or None."""
    try:
        state = _read_state(path)
        checksum = state.pop("checksum", None)  # earlier versions wrote none
        files = state["files"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return f"{STATE_FILE} is missing or cannot be read"
    if checksum not in (None, _state_checksum(state)):
        return f"{STATE_FILE} does not have the contents that were saved"
    names = {file.name for file in path.iterdir() if not file.name.startswith(".")}
    if unknown := sorted(names - files.keys() - {STATE_FILE}):
        return f"{unknown[0]} was not saved with it"
    return checksums.find_damage(path, files)


def check_same_run(path: Path, fingerprint: Fingerprint) -> None:
    """Compares a checkpoint's fingerprint with this one.

    Fields that only one of them has are ignored: they come from another version of a library.

    Raises:
        UserError: they differ; the message names every field with both values.
    """
    stored = _read_state(path)["fingerprint"]
    names = sorted(name for name in stored.keys() & fingerprint.keys() if stored[name] != fingerprint[name])
    if names:
        changes = ", ".join(f"{name} (was {stored[name]}, is {fingerprint[name]})" for name in names)
        raise UserError(
            f"cannot resume from {path} because this changed: {changes}; change it back, or start a new run in another "
            "output folder (init_from takes over trained weights)"
        )


def _write_state(path: Path, progress: TrainingProgress, fingerprint: Fingerprint) -> None:
    """Adds `state.json` to a folder that holds everything else."""
    files = checksums.measure_files(path, path.iterdir())
    state = {"progress": asdict(progress), "fingerprint": fingerprint, "files": files}
    write_json(path / STATE_FILE, {**state, "checksum": _state_checksum(state)})


def remove_leftovers(folder: Path) -> None:
    """Deletes what is left of checkpoints that were not completely written or deleted."""
    for pattern in (".step-*.partial", DELETED):
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover)


def _replace(final: Path, partial: Path) -> None:
    """Gives a complete checkpoint its name, in place of an earlier one."""
    if final.exists():
        _delete(final)
    put_in_place(partial, final)


def _delete(path: Path) -> None:
    """Deletes a checkpoint under another name, so that no half of it is ever found."""
    doomed = path.with_name(DELETED)
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


def _read_state(path: Path) -> dict[str, Any]:
    return json.loads((path / STATE_FILE).read_text())


def _state_checksum(state: dict[str, Any]) -> int:
    """CRC-32 of the other content of `state.json`, which is the same before it is written and after it is read."""
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


def _step(path: Path) -> int:
    """The update after which a checkpoint was saved; 0 for a folder of another name."""
    match = CHECKPOINT_NAME.fullmatch(path.name)
    return int(match.group(1)) if match else 0
