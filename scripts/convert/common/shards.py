"""Writing a checkpoint in files of limited size, with never more than one of them in memory."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from ...common.atomic_file import write_json
from ...common.errors import UserError
from ...common.weight_files import WEIGHTS, WEIGHTS_INDEX
from .arguments import parse_size
from .tensor_source import TensorSource, count_elements
from .weight_map import Step, written_shapes

DEFAULT_SHARD = 5 * 10**9


def write_shards(
    folder: Path, source: TensorSource, steps: Sequence[Step], dtype: torch.dtype, max_shard_size: str | None
) -> None:
    """Runs the steps and writes what they give as safetensors, with an index if there are several files.

    Args:
        folder: where to write.
        source: what the steps read.
        steps: in the order in which they should be read.
        dtype: of all tensors that will be written.
        max_shard_size: of a file, such as "5GB"; by default as `shard_limit` says.

    Raises:
        UserError: the disk is full or not writable, or a value is too large for `dtype`.
    """
    shapes = written_shapes(steps, source.shapes)
    shards = list(pack(steps, shapes, dtype.itemsize, shard_limit(source, max_shard_size)))
    places: dict[str, str] = {}
    with tqdm(total=len(steps), unit="step", leave=False, disable=None) as progress:  # only on a terminal
        for number, shard in enumerate(shards, start=1):
            name = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            tensors: dict[str, Tensor] = {}
            for step in shard:
                results = step.run([source.read(key) for key in step.reads])
                tensors |= {key: cast(key, tensor, dtype) for key, tensor in zip(step.writes, results, strict=True)}
                progress.update()
            _save(tensors, folder / name)
            places |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        total = count_elements(shapes[key] for key in places) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        write_json(folder / WEIGHTS_INDEX, index)


def shard_limit(source: TensorSource, asked: str | None) -> int:
    """Bytes of one file: what is asked for, else as many as the largest file of a source that has several."""
    if asked is not None:
        return parse_size(asked)
    sizes = [path.stat().st_size for path in source.files]
    return max(sizes) if len(sizes) > 1 else DEFAULT_SHARD


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
