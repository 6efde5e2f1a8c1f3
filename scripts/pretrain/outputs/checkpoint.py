"""Checkpoints that are whole or absent, and that resume only the run that made them.

A checkpoint is what `Accelerator.save_state` writes (weights as safetensors, optimizer and random states), the memory
of each process, if it carries one, and `state.json` with the progress, the fingerprint of the run, and size and
checksum of every file. It is written under another name and renamed, so a run that is killed while saving leaves no
half checkpoint.
"""

import json
import re
import shutil
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ...common.atomic_file import write_json
from ...common.errors import UserError
from ...common.segment_memory import CarriedMemory

STATE_FILE = "state.json"
CHECKPOINT_NAME = re.compile(r"step-(\d{6,})")
CHUNK_BYTES = 1 << 24

Fingerprint = dict[str, Any]


@dataclass
class TrainingProgress:
    """How far a run has come.

    Attributes:
        step: updates made.
        tokens: tokens read by all processes.
        seconds: time spent on updates, without validation and saving.
        loss_sum, loss_count: the losses since the last line of training metrics.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0
    loss_count: int = 0

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
    """Writes `folder/step-NNNNNN`, deletes all but the newest `keep` checkpoints (0 deletes none); returns its path."""
    final = folder / f"step-{progress.step:06d}"
    partial = folder / f".{final.name}.partial"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial))
    memory.save(partial, accelerator)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        _write_state(partial, progress, fingerprint)
        _replace(final, partial)
        for old in list_checkpoints(folder)[: -keep if keep else 0]:
            _delete(old)
    accelerator.wait_for_everyone()
    return final


def load(accelerator: Accelerator, path: Path, memory: CarriedMemory) -> TrainingProgress:
    """Puts weights, optimizer, random states and memory of a verified checkpoint back and returns the progress."""
    accelerator.load_state(str(path))
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
        files = _read_state(path)["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{STATE_FILE} is missing or cannot be read"
    for name, (size, checksum) in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
        if _measure(file)[1] != checksum:
            return f"{name} does not have the contents that were saved"
    return None


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
    files = {file.name: _measure(file) for file in sorted(path.iterdir())}
    write_json(path / STATE_FILE, {"progress": asdict(progress), "fingerprint": fingerprint, "files": files})


def _replace(final: Path, partial: Path) -> None:
    """Gives a complete checkpoint its name, in place of an earlier one."""
    if final.exists():
        _delete(final)
    partial.rename(final)


def _delete(path: Path) -> None:
    """Deletes a checkpoint under another name, so that no half of it is ever found."""
    doomed = path.with_name(".deleted")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


def _read_state(path: Path) -> dict[str, Any]:
    return json.loads((path / STATE_FILE).read_text())


def _measure(path: Path) -> tuple[int, int]:
    """Size in bytes and CRC-32."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return path.stat().st_size, checksum


def _step(path: Path) -> int:
    """The update after which a checkpoint was saved; 0 for a folder of another name."""
    match = CHECKPOINT_NAME.fullmatch(path.name)
    return int(match.group(1)) if match else 0
