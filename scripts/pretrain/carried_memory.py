"""Memory that a model carries from one segment of a text to the next, as in Transformer-XL."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache

from dynattn.modeling.caches.memory_cache import upgrade_to_memory_cache
from dynattn.modeling.caches.names import cache_in, named_cache


class CarriedMemory:
    """What a model remembers of earlier batches while it is trained or scored. In this base class it is nothing.

    Every batch is read by itself. `StreamMemory` overrides that for models with a memory.

    An update consists of micro-batches, one for each of its forward passes. Micro-batch `i` of an update continues the
    memory of micro-batch `i` of the update before.
    """

    def begin_update(self, data_step: int) -> None:
        """Prepares for an update that reads the batches of update `data_step` of the data, counted from 0."""

    def forget(self) -> None:
        """Empties the memory."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor], micro_batch: int = 0) -> Tensor:
        """The loss `[]` of a batch of tensors `[B, T]`, the micro-batch number `micro_batch` of the update."""
        return model(**{**batch, "use_cache": False}).loss

    def empty_copy(self) -> "CarriedMemory":
        """An empty memory of the same kind, to read another text with one micro-batch at a time."""
        return self

    def save(self, folder: Path, accelerator: Accelerator) -> None:
        """Writes what this process remembers into the folder of a checkpoint."""

    def load(self, folder: Path, accelerator: Accelerator) -> None:
        """Restores what `save` wrote."""


class StreamMemory(CarriedMemory):
    """Carries the memory of a model along streams of text: each update reads the next segment of every stream.

    The memory is detached, so that gradients stay within a segment. Each pass over the streams begins with an empty
    memory.

    Args:
        config: configuration of a model whose cache is a memory.
        micro_batches: forward passes that this process makes in an update; each reads streams of its own.
        segments: number of segments in a stream.
    """

    def __init__(self, config: PreTrainedConfig, micro_batches: int, segments: int) -> None:
        self.config, self.segments = config, segments
        self.caches: list[Cache | None] = [None] * micro_batches

    def begin_update(self, data_step: int) -> None:
        """Empties the memory if update `data_step` of the data reads the first segments of the streams."""
        if data_step % self.segments == 0:
            self.forget()

    def forget(self) -> None:
        self.caches = [None] * len(self.caches)

    def loss(self, model: nn.Module, batch: dict[str, Tensor], micro_batch: int = 0) -> Tensor:
        """The loss `[]` of segments `[B, T]` that continue those which `micro_batch` read in the update before."""
        output = model(**batch, use_cache=True, **named_cache(self.caches[micro_batch]))
        self.caches[micro_batch] = cache_in(output)
        return output.loss

    def empty_copy(self) -> "StreamMemory":
        return StreamMemory(self.config, micro_batches=1, segments=self.segments)

    def save(self, folder: Path, accelerator: Accelerator) -> None:
        """Writes this process's tensors `[micro-batches, B, ...]` and the number of tokens read; nothing if empty."""
        caches = [cache for cache in self.caches if cache is not None]
        if not caches:
            return
        states = [memory_tensors(cache) for cache in caches]
        tensors = {name: torch.stack([state[name] for state in states]) for name in states[0]}
        tokens = {"tokens": str(caches[0].get_seq_length())}
        save_file(tensors, folder / f"memory-{accelerator.process_index:05d}.safetensors", tokens)

    def load(self, folder: Path, accelerator: Accelerator) -> None:
        """Reads what all processes wrote. The numbers of processes and of micro-batches may have changed since."""
        files = sorted(folder.glob("memory-*.safetensors"))
        if not files:
            self.forget()
            return
        states = [load_file(file) for file in files]
        with safe_open(files[0], framework="pt") as file:
            tokens = int(file.metadata()["tokens"])
        division = len(self.caches), accelerator.num_processes, -1
        mine = {}
        for name in states[0]:
            streams = torch.stack([state[name] for state in states], dim=1).flatten(0, 2)
            mine[name] = streams.unflatten(0, division)[:, accelerator.process_index].to(accelerator.device)
        for index in range(len(self.caches)):
            rows = {name: tensor[index] for name, tensor in mine.items()}
            self.caches[index] = memory_from_tensors(self.config, rows, tokens)


def memory_tensors(cache: Cache) -> dict[str, Tensor]:
    """The tensors `[B, ...]` of a cache: `LAYER.keys`, `LAYER.values` and `LAYER.NAME` for each context of a layer."""
    tensors = {}
    layers: list[Any] = cache.layers
    for index, layer in enumerate(layers):
        contexts = getattr(layer, "contexts", {})
        for name, tensor in {"keys": layer.keys, "values": layer.values, **contexts}.items():
            tensors[f"{index}.{name}"] = tensor
    return tensors


def memory_from_tensors(config: PreTrainedConfig, tensors: dict[str, Tensor], tokens: int) -> Cache:
    """The inverse of `memory_tensors`: the cache that holds these tensors `[B, ...]` after reading `tokens` tokens."""
    cache = DynamicCache(config=config)
    upgrade_to_memory_cache(cache, config)
    layers: list[Any] = cache.layers
    for index, layer in enumerate(layers):
        held = {name.split(".")[1]: tensor for name, tensor in tensors.items() if name.startswith(f"{index}.")}
        keys, values = held.pop("keys"), held.pop("values")
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        layer.cumulative_length = tokens
        if held:
            layer.contexts = held
    return cache
