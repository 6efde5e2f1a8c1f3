"""The folder of a run: where its files are, and the checks that nothing in it is lost by accident."""

import logging
import os
import shutil
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from shlex import join
from typing import Any

from ...common.atomic_file import partial_path, put_in_place, read_json_if_whole, write_json
from ...common.atomic_folder import check_nothing_else
from ...common.checkpoint_files import WRITTEN_PATTERNS
from ...common.errors import UserError
from ..arguments import PretrainArguments
from . import checkpoint

logger = logging.getLogger(__name__)

# Options that may name a part of an earlier run.
SOURCES = ("init_from", "tokenizer", "dataset", "validation_dataset", "chat_template")


class RunFolder:
    """Paths in the output folder. `run.json` marks it as the folder of a run; `model` exists once it is finished."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.marker = path / "run.json"  # the arguments of the run
        self.lock = path / ".lock"  # names the process that uses the folder
        # One folder for each checkpoint. A start from one that is not the newest moves the later ones, with a copy of
        # the metrics, into a folder `abandoned-N`; a rollback goes back to the newest, and so leaves none behind.
        self.checkpoints = path / "checkpoints"
        self.tokenizer = path / "tokenizer"
        self.data = path / "data"  # the tokenized documents
        self.stream = self.data / "stream"  # blocks of tokens that are read ahead, for runs with `streaming`
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.incidents = path / "incidents"  # a folder for each bad update, with its batch
        self.model = path / "model"  # the final model with its tokenizer and card
        self.average = path / "model_average"  # the same with averaged weights, if they are kept
        self.result = path / "result.json"  # arguments and final measurements
        # Tokenizer and data of a run that is being prepared, while an earlier run may still be in the folder.
        self.prepared = path / ".prepared"

    def current(self, path: Path) -> Path:
        """Where the tokenizer or the data are now: among what was prepared, until that has been moved into place."""
        return self.prepared / path.name if self.prepared.exists() else path

    @property
    def is_marked(self) -> bool:
        """Whether a run has begun in this folder: `run.json` has arguments of a run, and is not just any file."""
        return {"output", "dataset"} <= read_json_if_whole(self.marker).keys()

    def start_point(self, arguments: PretrainArguments) -> Path | None:
        """The checkpoint to resume from, whose files have been verified, or None to start anew.

        Raises:
            UserError: the folder holds something that starting would destroy, or the checkpoint is missing or damaged.
        """
        overwrite, chosen = arguments.overwrite, self._choose(arguments.resume, arguments.overwrite)
        in_place = chosen is not None and self._holds(chosen)
        if overwrite and in_place:
            raise UserError(
                f"--overwrite would delete the checkpoint {chosen}; leave it out, or copy the checkpoint first"
            )
        if overwrite:
            self._check_kept(arguments)
        if chosen is not None and not in_place and _is_inside(chosen, self.path):
            raise UserError(
                f"a run in {self.path} that resumes from {chosen} would delete it with the run that is there; give "
                f"another output, or copy the checkpoint into {self.checkpoints}"
            )
        if not overwrite and not (in_place and self._is_shorter(arguments.max_steps)):
            self._check_free(checkpoints_too=not in_place)
        if self.model.is_dir() and not self.model.is_symlink():
            check_nothing_else(self.model, WRITTEN_PATTERNS)
        if chosen is not None:
            checkpoint.verify(chosen)
        return chosen

    def begin(self, arguments: Mapping[str, Any], resume_from: Path | None) -> None:
        """Moves the prepared tokenizer and data into place, and deletes an older run unless it is the one to resume.

        The marker is written first. Without it, the files of a process that was killed would look like somebody else's,
        and the next run would refuse the folder.
        """
        write_json(self.marker, dict(arguments), default=str)
        if resume_from is None or not self._holds(resume_from):
            self._delete_run(is_stream=bool(arguments.get("streaming")))
        if self.prepared.exists():
            for name in (self.tokenizer.name, self.data.name):
                remove(self.path / name)
                put_in_place(self.prepared / name, self.path / name)
            self.prepared.rmdir()

    def leave_later_checkpoints(self, step: int) -> None:
        """Moves the checkpoints after update `step`, with a copy of the metrics, into a folder beside the others.

        Otherwise a rollback or the next start, which choose the newest checkpoint, would find one of the updates that
        this run is going to make again.
        """
        later = [path for path in checkpoint.list_checkpoints(self.checkpoints) if checkpoint.step_of(path) > step]
        if not later:
            return
        names = (f"abandoned-{number}" for number in count(1))
        place = next(path for name in names if not (path := self.checkpoints / name).exists())
        place.mkdir()
        if self.metrics.exists():
            shutil.copyfile(self.metrics, place / self.metrics.name)
        for path in reversed(later):
            path.rename(place / path.name)
        logger.warning(
            "going on from update %d; moved to %s, with a copy of the metrics: %s; delete it if it is not needed",
            step,
            place,
            ", ".join(path.name for path in later),
        )

    def remove_leftovers(self) -> None:
        """Removes files and folders that an earlier process has not completed."""
        for path in self._partial_paths():
            remove(path)
        checkpoint.remove_leftovers(self.checkpoints)

    def _delete_run(self, *, is_stream: bool) -> None:
        """Deletes an earlier run.

        Its tokenizer and data are kept if `prepare` has made no others, because the new run uses them.
        """
        kept = () if self.prepared.exists() else (self.tokenizer, self.data)
        for path in self._own_paths():
            if path not in kept:
                remove(path)
        if is_stream:
            # The blocks also depend on settings, such as the sequence length, that `prepare` does not compare.
            remove(self.stream)

    def _choose(self, resume: str, overwrite: bool) -> Path | None:
        """The checkpoint that the arguments ask for, if any."""
        if resume not in ("auto", "intact", "never"):
            return Path(resume)
        if resume == "never" or overwrite:
            return None
        if resume == "intact":
            return checkpoint.newest_intact(self.checkpoints)
        found = checkpoint.list_checkpoints(self.checkpoints)
        return found[-1] if found else None

    def _is_shorter(self, max_steps: int | None) -> bool:
        """Whether the folder holds a finished run of fewer than `max_steps` updates."""
        steps = read_json_if_whole(self.result).get("steps")
        return max_steps is not None and isinstance(steps, int) and steps < max_steps

    def _holds(self, chosen: Path) -> bool:
        """Whether the checkpoint `chosen` lies in this folder."""
        return _real_path(chosen.parent) == _real_path(self.checkpoints)

    def _own_paths(self) -> tuple[Path, ...]:
        """All files and folders of a run, except for the marker."""
        return (
            self.checkpoints,
            self.tokenizer,
            self.data,
            self.metrics,
            self.tensorboard,
            self.incidents,
            self.model,
            self.average,
            self.result,
        )

    def _partial_paths(self) -> tuple[Path, ...]:
        """The names under which files and folders are written before they are complete."""
        return self.prepared, *(partial_path(path) for path in (self.marker, *self._own_paths()))

    def check_ours(self, token_cache: str | None = None) -> None:
        """Refuses an output that is a file, or a folder with content that is not a run's.

        Args:
            token_cache: the option, which may name a folder in this one.

        Raises:
            UserError: it is one of these.
        """
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"output={self.path} is a file; give a folder")
        if self.path.is_dir() and not self.is_marked:
            ours = (self.lock, *self._partial_paths())
            entries = [entry for entry in self.path.iterdir() if entry not in ours]
            foreign = sorted(
                entry.name for entry in entries if token_cache is None or not _is_inside(Path(token_cache), entry)
            )
            if self.marker.exists() and (found := checkpoint.list_checkpoints(self.checkpoints)):
                raise UserError(
                    f"{self.marker} is damaged; to go on, give another output folder and "
                    f"{join(['--resume', str(found[-1])])}"
                )
            if foreign:
                raise UserError(
                    f"output={self.path} holds {foreign[0]} and no run of dynattn pretrain; give a new or empty folder"
                )

    def _check_kept(self, arguments: PretrainArguments) -> None:
        """Refuses to delete what the run starts from, except for the earlier run's tokenizer, which is copied first."""
        deleted = [path for path in self._own_paths() if path != self.tokenizer]
        for name in SOURCES:
            source = getattr(arguments, name)
            if source is not None and any(_is_inside(Path(source), path) for path in deleted):
                raise UserError(
                    f"--overwrite would delete {name}={source} with the run that it belongs to; give another output, "
                    "or copy it first"
                )

    def _check_free(self, *, checkpoints_too: bool) -> None:
        """Refuses a folder that holds a finished model or, with `checkpoints_too`, a checkpoint."""
        if self.model.exists():
            raise UserError(
                f"output={self.path} already holds a finished model; give another folder, more --max_steps to "
                "extend it, or --overwrite to replace it"
            )
        found = checkpoint.list_checkpoints(self.checkpoints)
        if checkpoints_too and found:
            raise UserError(
                f"output={self.path} already holds a run with {found[-1].name}; give another folder, --resume auto to "
                "continue it, or --overwrite to replace it"
            )


def _real_path(path: Path) -> Path:
    """Where links lead. Unlike `Path.resolve` it does not raise for links in a circle; `verify` refuses these later."""
    return Path(os.path.realpath(path))


def _is_inside(path: Path, folder: Path) -> bool:
    return _real_path(path).is_relative_to(_real_path(folder))


def remove(path: Path) -> None:
    """Deletes a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
