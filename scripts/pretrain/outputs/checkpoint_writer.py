"""Writes checkpoints, with all processes, at once or in the background, under another name until they are complete."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from ...common.atomic_file import flush, partial_path
from ..carried_memory import CarriedMemory
from ..processes import on_all, on_main
from . import checkpoint, checksums
from .checksums import Checksums
from .random_state import random_state_file, save_random_state
from .training_state import failures_as_raised, files_of, storage_writer, whole_sizes


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
        # The checkpoint that the thread writes: its name, its state without the list of files, and the checksums of the
        # files of this process, which are ready once these are written.
        self._pending: tuple[Path, dict[str, Any], Future[Checksums]] | None = None

    @property
    def is_written(self) -> bool:
        """Whether this process has written its share of a checkpoint that `finish` has not named yet."""
        return self._pending is not None and self._pending[-1].done()

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
        options = self._options_of(partial, tensors)
        if self._thread is None:
            self._complete(final, state, lambda: self._seal(partial, lambda: dcp.save(dict(tensors), **options)))
        else:
            written = cast("Future[Any]", dcp.async_save(dict(tensors), **options))
            self._pending = final, state, self._thread.submit(self._seal, partial, written.result)

    def finish(self) -> None:
        """Completes the checkpoint that is being written: waits for all processes, and gives it its name.

        Raises:
            UserError: the disk is full or cannot be written; the earlier checkpoints are as they were.
        """
        if self._pending is not None:
            (final, state, sealed), self._pending = self._pending, None
            self._complete(final, state, sealed.result)

    def close(self) -> None:
        """Waits for the thread. A checkpoint that was not finished stays incomplete, and is removed as a leftover."""
        if self._thread is not None:
            self._thread.shutdown()

    def _options_of(self, partial: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """How DCP writes the tensors of a checkpoint."""
        # Some tensors may be on one process only, so the sizes are collected from all.
        shares = gather_object([whole_sizes(tensors)])
        sizes = {name: size for share in shares for name, size in share.items()}
        return {
            "storage_writer": storage_writer(partial / checkpoint.TENSORS, sizes, self.accelerator.num_processes),
            "process_group": self._group,
            "no_dist": self._group is None,
        }

    def _complete(self, final: Path, state: dict[str, Any], write: Callable[[], Checksums]) -> None:
        """Names a checkpoint once all processes have called `write`, which returns the checksums of their files."""
        mine = on_all(self.folder, write)
        files = {name: measured for share in gather_object([mine]) for name, measured in share.items()}
        on_main(self.folder, lambda: checkpoint.complete(final, {**state, "files": files}, self.keep))

    def _seal(self, partial: Path, write: Callable[[], Any]) -> Checksums:
        """Calls `write`, waits until this process's files are on disk, and returns their sizes and checksums."""
        with failures_as_raised():
            write()
        process = self.accelerator.process_index
        files = [*files_of(process, partial / checkpoint.TENSORS), *partial.glob(f"*-{process:05d}.safetensors")]
        for file in files:
            flush(file)
        return checksums.measure_files(partial, files)
