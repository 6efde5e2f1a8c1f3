"""Writes and reads the tensors of a checkpoint with torch.distributed.checkpoint (DCP), as safetensors files.

Each process writes the shards that it holds; what several processes hold is written by one of them. The files say where
a shard belongs in the whole tensor, so any number of processes can read what they need, with any engine.
"""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from ..weight_average import WeightAverage

WEIGHTS, OPTIMIZER, AVERAGE = "model.", "optimizer.", "average."
# A file is assembled in memory before it is written, so files are not larger than about this.
FILE_BYTES = 4 << 30


def training_tensors(model: nn.Module, optimizer: Optimizer, average: WeightAverage | None) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name: those that training changes, whole or as shards (`DTensor`).

    Weights and buffers are `model.NAME`, the optimizer's states of a weight are `optimizer.NAME.STATE`, and averages of
    weights, if they are kept, are `average.NAME`. Tied weights appear once.
    """
    names: dict[Tensor, str] = {weight: name for name, weight in model.named_parameters()}
    tensors = weights_of(model)
    for weight, state in optimizer.state.items():
        tensors |= {f"{OPTIMIZER}{names[weight]}.{what}": tensor for what, tensor in state.items()}
    return tensors | averages_of(average)


def storage_writer(folder: Path, sizes: Mapping[str, int], processes: int) -> HuggingFaceStorageWriter:
    """DCP's writer into `folder`, with files of at most about `FILE_BYTES` for each process.

    Args:
        sizes: bytes of each tensor in one piece, of the tensors of all processes.
    """
    files, written = {}, 0
    for name, size in sizes.items():
        files[name] = 1 + written // (FILE_BYTES * processes)
        written += size
    return HuggingFaceStorageWriter(str(folder), files, save_distributed=True)


def whole_sizes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The bytes of each tensor in one piece, for `storage_writer`."""
    return {name: math.prod(tensor.shape) * tensor.element_size() for name, tensor in tensors.items()}


def files_of(process: int, folder: Path) -> list[Path]:
    """The files that `storage_writer` has made in `folder` on one process."""
    return sorted(folder.glob(f"shard-{process + 1:05d}-*.safetensors"))


def load_tensors(
    folder: Path, model: nn.Module, optimizer: Optimizer, average: WeightAverage | None, *, alone: bool
) -> None:
    """Reads the `training_tensors` in `folder` into model, optimizer and average, however these are sharded now.

    Args:
        alone: whether this is the only process.

    Raises:
        SafetensorError, RuntimeError: a file holds something else.
    """
    reader = HuggingFaceStorageReader(str(folder))
    stored = stored_sizes(reader)
    weights = dict(model.named_parameters())
    states: dict[str, dict[str, Tensor]] = {}
    for name, size in stored.items():
        if name.startswith(OPTIMIZER):
            owner, _, what = name.removeprefix(OPTIMIZER).rpartition(".")
            weight = weights[owner].detach()
            # A state of the weight's shape is sharded like it; others, such as a count of updates, are in one piece.
            states.setdefault(owner, {})[what] = torch.zeros_like(weight) if size == weight.shape else torch.zeros(size)
    tensors = weights_of(model)
    tensors |= {f"{OPTIMIZER}{name}.{what}": state[what] for name, state in states.items() for what in state}
    tensors |= averages_of(average)
    with failures_as_raised():
        dcp.load(tensors, storage_reader=reader, no_dist=alone)
    give_states(optimizer, {weights[name]: state for name, state in states.items()})


def stored_sizes(reader: HuggingFaceStorageReader) -> dict[str, torch.Size]:
    """The shapes of the whole tensors in a folder, by name."""
    entries = cast("dict[str, TensorStorageMetadata]", reader.read_metadata().state_dict_metadata)
    return {name: entry.size for name, entry in entries.items()}


def hide_warning_of_one_process() -> None:
    """Hides what torch.distributed.checkpoint warns of in a single process, although `no_dist` is set.

    The filter is one of the whole process, because checkpoints are also written by a thread.
    """
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def load_weights(folder: Path, model: nn.Module, *, averaged: bool = False) -> None:
    """Reads the weights and buffers of a checkpoint into a model that is not sharded, in a single process.

    Args:
        averaged: read the averages of the weights; buffers, which have none, are read as they are.
    """
    tensors = weights_of(model)
    if averaged:
        for name, weight in model.named_parameters():
            tensors[AVERAGE + name] = tensors.pop(WEIGHTS + name, weight.detach())
    with failures_as_raised():
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Weights and saved buffers as `model.NAME`; those that are tied appear once."""
    kept = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return {WEIGHTS + name: tensor for name, tensor in model.state_dict().items() if name in kept}


def averages_of(average: WeightAverage | None) -> dict[str, Tensor]:
    """The averages of weights as `average.NAME`; none if they are not kept."""
    return {} if average is None else {AVERAGE + name: tensor for name, tensor in average.tensors.items()}


def give_states(optimizer: Optimizer, states: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
    """Sets the optimizer's states of the weights in `states`; its settings, such as learning rates, stay."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    groups = optimizer.state_dict()["param_groups"]
    numbered = {index: dict(states[weight]) for index, weight in enumerate(weights) if weight in states}
    optimizer.load_state_dict({"state": numbered, "param_groups": groups})


@contextmanager
def failures_as_raised() -> Iterator[None]:
    """In the block, raises the first error of a process instead of DCP's exception, which collects those of all."""
    try:
        yield
    except CheckpointException as collected:
        raise next(error for error, _ in collected.failures.values()) from None
