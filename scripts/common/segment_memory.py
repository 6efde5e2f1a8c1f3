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

from dynattn.modeling.caches.segment_memory import carry_memory

from .errors import UserError


class NoMemory:
    """Reads every batch by itself; what a model without memory is trained and scored with."""

    def begin(self, step: int) -> None:
        """Called before update `step`, counted from 0."""

    def read(self, model: nn.Module, batch: dict[str, Tensor], place: int = 0) -> Tensor:
        """The loss of a batch; `place` is its number among the forward passes of an update."""
        return model(**batch, use_cache=False).loss

    def fresh(self) -> "NoMemory":
        """One for reading another text meanwhile."""
        return self

    def save(self, folder: Path, accelerator: Accelerator) -> None:
        """Stores what this process carries."""

    def load(self, folder: Path, accelerator: Accelerator) -> None:
        """Puts back what was stored."""


class StreamMemory(NoMemory):
    """Carries memory along streams, of which each forward pass of an update reads the next segment of some rows.

    What it holds is detached, so that gradients stay in a segment. It starts anew with every pass over the streams.

    Args:
        config: of a model whose cache is a memory.
        passes: forward passes of an update in this process, each of which has rows of its own.
        segments: of a stream.
    """

    def __init__(self, config: PreTrainedConfig, passes: int, segments: int) -> None:
        self.config, self.segments = config, segments
        self.caches: list[Cache | None] = [None] * passes

    def begin(self, step: int) -> None:
        """Forgets everything where `step` reads the first segments."""
        if step % self.segments == 0:
            self.caches = [None] * len(self.caches)

    def read(self, model: nn.Module, batch: dict[str, Tensor], place: int = 0) -> Tensor:
        """The loss of the segments that follow what `place` has read so far."""
        output = model(**batch, past_key_values=self.caches[place], use_cache=True)
        self.caches[place] = output.past_key_values
        return output.loss

    def fresh(self) -> "StreamMemory":
        """An empty memory for one forward pass at a time."""
        return StreamMemory(self.config, 1, self.segments)

    def save(self, folder: Path, accelerator: Accelerator) -> None:
        """Writes this process's tensors `[passes, rows, ...]` and the number of tokens seen."""
        caches = [cache for cache in self.caches if cache is not None]
        states = [memory_tensors(cache) for cache in caches]
        tensors = {name: torch.stack([state[name] for state in states]) for name in states[0]}
        tokens = {"tokens": str(caches[0].get_seq_length())}
        save_file(tensors, folder / f"memory-{accelerator.process_index:05d}.safetensors", tokens)

    def load(self, folder: Path, accelerator: Accelerator) -> None:
        """Reads what all processes wrote; the same streams may now be divided otherwise over processes and passes."""
        files = sorted(folder.glob("memory-*.safetensors"))
        states = [load_file(file) for file in files]
        with safe_open(files[0], framework="pt") as file:
            tokens = int(file.metadata()["tokens"])
        division = len(self.caches), accelerator.num_processes, -1
        mine = {}
        for name in states[0]:
            streams = torch.stack([state[name] for state in states], dim=1).flatten(0, 2)
            mine[name] = streams.unflatten(0, division)[:, accelerator.process_index].to(accelerator.device)
        for place in range(len(self.caches)):
            rows = {name: tensor[place] for name, tensor in mine.items()}
            self.caches[place] = memory_from_tensors(self.config, rows, tokens)


def check_memory(config: PreTrainedConfig, segment: int = 1) -> None:
    """Whether a model can read a text of any length in segments of `segment` tokens.

    Raises:
        UserError: it has no memory, or one that would outgrow its positions.
    """
    if not hasattr(config, "memory_type"):
        raise UserError(
            f"carry_memory is for models whose cache is a memory, like rcmha, and {config.model_type} is none of them; "
            "leave it out"
        )
    if config.mem_len is None:
        raise UserError("carry_memory needs a memory that has an end, and mem_len=None keeps everything; set mem_len")
    if config.position_scheme == "learned":
        raise UserError(
            f"carry_memory reads on beyond the {config.max_position_embeddings} tokens that have learned positions; "
            "choose another position_scheme, or leave carry_memory out"
        )
    if segment > (longest := longest_segment(config)):
        raise UserError(
            f"a segment of {segment} tokens and its memory of mem_len={config.mem_len} exceed max_position_embeddings="
            f"{config.max_position_embeddings}; use segments of up to {longest} tokens"
        )


def longest_segment(config: PreTrainedConfig) -> int:
    """Tokens that a model can read at once after others; positions of segment memory span the memory too."""
    spans_memory = config.memory_type == "segment" and config.is_relative
    return config.max_position_embeddings - (config.mem_len if spans_memory else 0)


def memory_tensors(cache: Cache) -> dict[str, Tensor]:
    """All that the layers of a cache hold, each tensor `[B, ...]`."""
    tensors = {}
    layers: list[Any] = cache.layers
    for index, layer in enumerate(layers):
        contexts = getattr(layer, "contexts", {})
        for name, tensor in {"keys": layer.keys, "values": layer.values, **contexts}.items():
            tensors[f"{index}.{name}"] = tensor
    return tensors


def memory_from_tensors(config: PreTrainedConfig, tensors: dict[str, Tensor], tokens: int) -> Cache:
    """The cache that `memory_tensors` described, after `tokens` tokens."""
    cache = DynamicCache(config=config)
    carry_memory(cache, config)
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
