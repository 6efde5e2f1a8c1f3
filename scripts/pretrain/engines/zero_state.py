"""Gathers DeepSpeed's shards of weights and optimizer state into whole tensors, and splits such tensors into shards.

Tensors have the names of `outputs/training_state.py`, so that checkpoints of all engines have one format. DeepSpeed's
own checkpoints are pickled, and tied to the number of processes.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

from ...common.errors import UserError
from ..outputs.training_state import OPTIMIZER, WEIGHTS, failures_as_raised, stored_sizes, weights_of

# The optimizer's state of a weight that is a single number, shared by all weights of a group.
COUNT = "step"


class Piece(NamedTuple):
    """The part of a weight that this process holds.

    Attributes:
        flat: the float32 tensor `[n]` that the optimizer updates; it also has pieces of other weights, and padding.
        place: where the piece begins in `flat`.
        start: where the piece begins in the flattened weight.
        length: number of elements; zero if other processes hold all of the weight.
    """

    flat: Tensor
    place: int
    start: int
    length: int

    def of(self, held: Tensor) -> Tensor:
        """The weight's part `[length]` of `held`, which is `flat` or has its layout, as the optimizer's state has."""
        return held.detach()[self.place : self.place + self.length]


class Entry(NamedTuple):
    """A tensor of a checkpoint: a weight or a buffer, or the optimizer's state of a weight with the name `kept`."""

    tensor: Tensor
    kept: str | None = None


class ZeroState:
    """Weights and optimizer state of a model that DeepSpeed has sharded; all processes have to call its methods."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.module: nn.Module = engine.module
        self.zero: Any = engine.optimizer
        self.state: dict[Tensor, dict[str, Tensor]] = self.zero.optimizer.state
        self.shards_weights: bool = engine.zero_optimization_partition_weights()
        self.process, self.processes = dist.get_rank(), dist.get_world_size()
        self.pieces = dict(self._sharded_pieces() if self.shards_weights else self._flat_pieces())

    def collect(self, prefix: str = "", *, owners: int | None = None) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix`, in one piece on the CPU; each process gets some of them.

        Args:
            owners: how many processes get tensors, in turn; all by default.
        """
        collected: dict[str, Tensor] = {}
        entries = {name: entry for name, entry in self._entries().items() if name.startswith(prefix)}
        for number, (name, entry) in enumerate(entries.items()):
            owner = number % (owners or self.processes)
            whole = self._gather(entry, owner)
            if owner == self.process:
                collected[name] = whole.to("cpu", copy=True)
        return collected

    def restore(self, folder: Path) -> None:
        """Restores the tensors of a checkpoint; one process reads each of them and sends it to the others.

        Raises:
            UserError: weights that DeepSpeed updates together have been updated a different number of times.
        """
        reader = HuggingFaceStorageReader(str(folder))
        sizes = stored_sizes(reader)
        self._begin_states(sizes)
        entries = self._entries()
        owners = {name: number % self.processes for number, name in enumerate(entries)}
        read = {
            name: torch.empty(sizes[name], dtype=entry.tensor.dtype)
            for name, entry in entries.items()
            if owners[name] == self.process
        }
        with failures_as_raised():
            dcp.load(dict(read), storage_reader=reader, no_dist=True)
        for name, entry in entries.items():
            whole = read.pop(name, torch.empty(sizes[name], dtype=entry.tensor.dtype)).to(self.zero.device)
            dist.broadcast(whole, owners[name])
            self._put(name, entry, whole)
        self._use_weights()

    def _flat_pieces(self) -> Iterator[tuple[Tensor, Piece]]:
        """Stages 1 and 2: all weights of a group end to end are cut into one equal part for each process."""
        for flat, weights in zip(self.zero.single_partition_of_fp32_groups, self.zero.bit16_groups, strict=True):
            for weight in weights:
                found = weight._hp_mapping
                if found is None:
                    yield weight, Piece(flat, 0, 0, 0)
                else:
                    here, there = found.hp_fragment_address, found.lp_fragment_address
                    yield weight, Piece(flat, here.start, there.start, here.numel)

    def _sharded_pieces(self) -> Iterator[tuple[Tensor, Piece]]:
        """Stage 3: each weight is cut into one equal part for each process; the last may be padded."""
        for flat, weights in zip(self.zero.fp32_partitioned_groups_flat, self.zero.fp16_groups, strict=True):
            for weight in weights:
                _, place, size = self.zero.grad_position[self.zero.get_param_id(weight)]
                start = min(self.process * size, weight.ds_numel)
                yield weight, Piece(flat, place, start, min(size, weight.ds_numel - start))

    def _entries(self) -> dict[str, Entry]:
        """All tensors of a checkpoint by name."""
        weights = dict(self.module.named_parameters())
        entries = {name: Entry(held) for name, held in weights_of(self.module).items()}
        # `weights_of` returns detached tensors, but the keys of `pieces` are the parameters themselves.
        entries |= {WEIGHTS + name: Entry(weight) for name, weight in weights.items()}
        for name, weight in weights.items():
            if weight in self.pieces:
                kept = self.state.get(self.pieces[weight].flat, {})
                entries |= {f"{OPTIMIZER}{name}.{what}": Entry(weight, what) for what in kept}
        return entries

    def _gather(self, entry: Entry, owner: int) -> Tensor:
        """The whole tensor on the process `owner`; on other processes the content of the result is undefined."""
        if entry.tensor not in self.pieces:
            return entry.tensor.detach()
        piece = self.pieces[entry.tensor]
        if entry.kept == COUNT:
            return self.state[piece.flat][COUNT]
        held = piece.flat if entry.kept is None else self.state[piece.flat][entry.kept]
        whole = held.new_zeros(math.prod(shape_of(entry.tensor)))
        whole[piece.start : piece.start + piece.length] = piece.of(held)
        # Each element is summed from one process's value and zeros. Sums of integers keep its bits, even of -0.0.
        dist.reduce(whole.view(torch.int32), owner)
        return whole.view(shape_of(entry.tensor))

    def _put(self, name: str, entry: Entry, whole: Tensor) -> None:
        """Copies this process's piece of the tensor `whole` into the weight, the buffer or the optimizer's state."""
        if entry.tensor not in self.pieces:
            entry.tensor.detach().copy_(whole)
            return
        piece = self.pieces[entry.tensor]
        if entry.kept == COUNT:
            self._put_count(name, self.state[piece.flat], whole)
            return
        held = piece.flat if entry.kept is None else self.state[piece.flat][entry.kept]
        piece.of(held).copy_(whole.flatten()[piece.start : piece.start + piece.length])

    def _put_count(self, name: str, state: dict[str, Tensor], count: Tensor) -> None:
        """Sets how often a group has been updated; DeepSpeed has one count for all weights of a group."""
        if int(state[COUNT]) not in (0, int(count)):
            raise UserError(
                f"{name} of the checkpoint is {int(count)}, and {int(state[COUNT])} for another weight that DeepSpeed "
                "updates together with it; resume with engine fsdp2 or ddp"
            )
        state[COUNT].copy_(count)

    def _begin_states(self, names: Iterable[str]) -> None:
        """Creates the optimizer's states that the checkpoint's `names` list, as zeros."""
        weights = dict(self.module.named_parameters())
        is_fused = any(group.get("fused") for group in self.zero.param_groups)
        for stored in names:
            if stored.startswith(OPTIMIZER):
                name, _, what = stored.removeprefix(OPTIMIZER).rpartition(".")
                flat = self.pieces[weights[name]].flat
                # A fused optimizer expects the count of updates `[]` on the device of the weights.
                count = torch.zeros((), device=flat.device if is_fused else "cpu")
                self.state[flat][what] = count if what == COUNT else torch.zeros_like(flat.detach())

    def _use_weights(self) -> None:
        """Copies the optimizer's float32 weights into those that the model computes with."""
        if not self.shards_weights:
            self.zero.update_lp_params()
            return
        self.zero._partition_all_parameters()
        for index in range(len(self.zero.fp16_groups)):
            self.zero._reassign_or_swap_out_partitioned_parameters(index)
        self.zero._post_step([])


def shape_of(tensor: Tensor) -> torch.Size:
    """The shape that a tensor has in one piece; `ds_shape` is DeepSpeed's record of it for a sharded weight."""
    return getattr(tensor, "ds_shape", tensor.shape)
