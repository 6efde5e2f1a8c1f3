"""Writes checkpoints, with all processes, at once or in the background, under another name until they are complete."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from ...common.atomic_file import flush, partial_path
from ...common.carried_memory import CarriedMemory
from ..processes import on_all, on_main
from . import checkpoint, checksums
from .checksums import Checksums
from .random_state import random_state_file, save_random_state
from .training_state import failures_as_raised, files_of, storage_writer, whole_sizes


@dataclass
class PendingCheckpoint:
    """A checkpoint that is not complete yet.

    Attributes:
        final: the name that it will get.
        state: the content of its `state.json`, without the list of files.
        files: waits until this process has written its files, and returns their checksums.
        is_written: whether `files` would return at once.
    """

    final: Path
    state: dict[str, Any]
    files: Callable[[], Checksums]
    is_written: Callable[[], bool]


class CheckpointWriter:
    """Writes `folder/step-NNNNNN` and deletes all but the newest `keep` checkpoints (0 deletes none).

    In the background, the tensors are copied into the memory of the CPU, and a thread writes the copies while training
    goes on. The checkpoint gets its name in `finish`, which all processes have to call together.
    """

    def __init__(self, accelerator: Accelerator, folder: Path, keep: int, in_background: bool) -> None:
        self.accelerator, self.folder, self.keep = accelerator, folder, keep
        self._thread = ThreadPoolExecutor(1) if in_background else None
        # The thread writes while training exchanges gradients, so it needs a process group of its own.
        self._group = dist.new_group(backend="gloo") if accelerator.num_processes > 1 else None
        self._pending: PendingCheckpoint | None = None

    @property
    def is_written(self) -> bool:
        """Whether this process has written its share of a checkpoint that `finish` has not named yet."""
        return self._pending is not None and self._pending.is_written()

    def write(self, step: int, state: dict[str, Any], tensors: Mapping[str, Tensor], memory: CarriedMemory) -> None:
        """Writes the checkpoint of `step`, or begins to in the background, after an earlier one has been completed.

        Raises:
            UserError: the disk is full or cannot be written; the earlier checkpoints are as they were.
        """
        self.finish()
        final = self.folder / f"step-{step:06d}"
        partial = partial_path(final)

        def begin() -> None:
            checkpoint.remove_leftovers(self.folder)
            (partial / checkpoint.TENSORS).mkdir(parents=True)

        def write_share() -> None:
            save_random_state(random_state_file(partial, self.accelerator.process_index), self.accelerator.device)
            memory.save(partial, self.accelerator)

        on_main(self.folder, begin)
        on_all(self.folder, write_share)
        self._pending = self._begin_tensors(final, state, tensors)
        if self._thread is None:
            self.finish()

    def finish(self) -> None:
        """Completes the checkpoint that is being written: waits for all processes, and gives it its name.

        Raises:
            UserError: the disk is full or cannot be written; the earlier checkpoints are as they were.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        mine = on_all(self.folder, pending.files)
        files = {name: measured for share in gather_object([mine]) for name, measured in share.items()}
        state = {**pending.state, "files": files}
        on_main(self.folder, lambda: checkpoint.complete(pending.final, state, self.keep))

    def close(self) -> None:
        """Waits for the thread. A checkpoint that was not finished stays incomplete, and is removed as a leftover."""
        if self._thread is not None:
            self._thread.shutdown()

    def _begin_tensors(self, final: Path, state: dict[str, Any], tensors: Mapping[str, Tensor]) -> PendingCheckpoint:
        """Hands the tensors to the thread, or plans to write them when the checkpoint is finished."""
        partial = partial_path(final)
        # Some tensors may be on one process only, so the sizes are collected from all.
        shares = gather_object([whole_sizes(tensors)])
        sizes = {name: size for share in shares for name, size in share.items()}
        options: dict[str, Any] = {
            "storage_writer": storage_writer(partial / checkpoint.TENSORS, sizes, self.accelerator.num_processes),
            "process_group": self._group,
            "no_dist": self._group is None,
        }
        if self._thread is None:
            return PendingCheckpoint(
                final, state, lambda: self._seal(partial, lambda: dcp.save(dict(tensors), **options)), lambda: False
            )
        written = cast("Future[Any]", dcp.async_save(dict(tensors), **options))
        sealed = self._thread.submit(self._seal, partial, written.result)
        return PendingCheckpoint(final, state, sealed.result, sealed.done)

    def _seal(self, partial: Path, write: Callable[[], Any]) -> Checksums:
        """Calls `write`, waits until this process's files are on disk, and returns their sizes and checksums."""
        with failures_as_raised():
            write()
        process = self.accelerator.process_index
        files = [*files_of(process, partial / checkpoint.TENSORS), *partial.glob(f"*-{process:05d}.safetensors")]
        for file in files:
            flush(file)
        return checksums.measure_files(partial, files)
