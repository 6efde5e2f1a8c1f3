"""Writing a checkpoint in files of limited size, with never more than one of them in memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from ...common.atomic_file import write_json
from ...common.checkpoint_files import WEIGHTS, WEIGHTS_INDEX
from ...common.errors import UserError
from .tensor_source import count_elements
from .weight_map import Step


def write_shards(
    folder: Path,
    steps: Sequence[Step],
    read: Callable[[str], Tensor],
    shapes: Mapping[str, torch.Size],
    *,
    dtype: torch.dtype,
    limit: int,
) -> None:
    """Runs the steps and writes what they give as safetensors, with an index if there are several files.

    Args:
        folder: where to write.
        steps: in the order in which they should be read.
        read: gives one tensor of the source, `[...]`, by its name.
        shapes: of all tensors that will be written.
        dtype: of all tensors that will be written.
        limit: bytes of one file; exceeded only by a step that gives more than that on its own.

    Raises:
        UserError: the disk is full or not writable, or a value is too large for `dtype`.
    """
    shards = list(pack(steps, shapes, dtype.itemsize, limit))
    places: dict[str, str] = {}
    with tqdm(total=len(steps), unit="step", leave=False, disable=None) as progress:  # only on a terminal
        for number, shard in enumerate(shards, start=1):
            name = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            tensors: dict[str, Tensor] = {}
            for step in shard:
                results = step.run([read(key) for key in step.reads])
                tensors |= {key: cast(key, tensor, dtype) for key, tensor in zip(step.writes, results, strict=True)}
                progress.update()
            _save(tensors, folder / name)
            places |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        total = count_elements(shapes[key] for key in places) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        write_json(folder / WEIGHTS_INDEX, index)


def pack(steps: Sequence[Step], shapes: Mapping[str, torch.Size], itemsize: int, limit: int) -> Iterator[list[Step]]:
    """Groups consecutive steps that write at most `limit` bytes together; a larger step stands alone."""
    shard: list[Step] = []
    used = 0
    for step in steps:
        size = count_elements(shapes[key] for key in step.writes) * itemsize
        if shard and used + size > limit:
            yield shard
            shard, used = [], 0
        shard.append(step)
        used += size
    yield shard


def cast(key: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a copy of `tensor` `[...]` in `dtype` that shares memory with nothing.

    Raises:
        UserError: a finite value became infinite.
    """
    result = tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)
    is_narrower = torch.finfo(dtype).max < torch.finfo(tensor.dtype).max
    if is_narrower and not torch.equal(result.isfinite(), tensor.isfinite()):
        raise UserError(f"{key} has numbers that are too large for {dtype}; choose another --dtype")
    return result


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes tensors `[...]` by name to a file, in a folder that appears when it is complete."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot write {path.name}: {error}; is the disk full?") from error
