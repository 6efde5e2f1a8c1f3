"""Estimates the memory of an update by running it on fake tensors, which have shapes but no contents."""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedConfig, PreTrainedModel

from dynattn.modeling.common.decoder_heads import CausalLMHead
from dynattn.modeling.ops.chunked_loss import CHUNK_TOKENS, chunked_causal_loss
from dynattn.modeling.parallel.context_parallel import ContextParallel

from ..engines.interface import BUCKET_ELEMENTS
from ..model import embedding_modules

FLOAT32, BFLOAT16 = 4, 2


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of all tensors that operators return while it is active.

    Temporary tensors inside an operator are not seen. Those in the backward pass of this package's attention ops are
    added as `workspace`.

    Attributes:
        live, peak: bytes held now, and the most so far.
    """

    def __init__(self, known: Iterable[Tensor], workspace: int) -> None:
        """Prepares the counts.

        Args:
            known: tensors that exist before; they are not counted.
            workspace: bytes of temporary tensors in the backward pass of an attention op of this package.
        """
        super().__init__()
        self.workspace = workspace
        self.live = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator and counts the storages that it has made."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        if str(func).startswith("dynattn.") and "_backward" in str(func):
            self.peak = max(self.peak, self.live + self.workspace)
        return result

    def _count(self, storage: Any) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, size)

    def _release(self, size: int) -> None:
        self.live -= size


class ImaginedGroup(ContextParallel):
    """A group of processes that share sequences, of which only the first exists and the others have the same part."""

    def __init__(self, processes: int) -> None:
        self.processes, self.process, self._checked = processes, 0, weakref.WeakSet()
        self._has_compared = True  # there is nothing to compare with

    def gather(self, part: Tensor, dim: int = 1) -> Tensor:
        """As many copies of `part` as there are processes."""
        return torch.cat([part] * self.processes, dim)


class Peaks(NamedTuple):
    """Peaks of memory in three phases of a pass, in bytes."""

    layers: int  # during the forward and backward passes of the layers
    ends: int  # after the backward pass of the first layer, which is the last to run backward
    loss: int  # while the loss is computed


class Rehearsal(NamedTuple):
    """Bytes that two forward and backward passes need: one that creates the gradients, and one that adds to them.

    The second is as with gradient accumulation. Each number grows linearly with the number of layers, or stays.

    Attributes:
        weights: weights of the model in float32.
        largest_layer: weights of the largest block that an engine gathers at once.
        casts: bf16 copies of the layers' weights that autocast keeps until the loss is computed.
        first: the peaks of the first pass above the weights, gradients included.
        second: the peaks of the second pass above weights and gradients.
    """

    weights: int
    largest_layer: int
    casts: int
    first: Peaks
    second: Peaks

    @property
    def peak(self) -> int:
        """The peak of the first pass."""
        return max(self.first.layers, self.first.ends, self.first.loss + self.casts)

    @property
    def activations(self) -> int:
        """The peak of the second pass."""
        return max(self.second.layers, self.second.ends, self.second.loss + self.casts)

    @property
    def activations_in_shards(self) -> int:
        """`activations` for engines that gather weights in bf16, so that autocast keeps no copies."""
        return max(self.second)


def rehearse(
    build: Callable[[int], PreTrainedModel],
    layers: int,
    batch_size: int,
    length: int,
    *,
    bf16: bool,
    workspace: int = 0,
    period: int | None = None,
    context: ContextParallel | None = None,
) -> Rehearsal:
    """Runs two passes of a model, with a batch `[batch_size, length]`, on fake tensors.

    Args:
        build: makes a model with the given number of layers.
        layers: number of layers of the model.
        bf16: whether to run under autocast.
        workspace: bytes of temporary tensors in the backward pass of the attention op.
        period: after how many layers their kinds repeat. If it is given, models of one and of two periods are run, and
            the result is extrapolated; otherwise the whole model is run.
        context: the processes that share sequences; the model then gets a part of the batch.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        ids = torch.zeros(batch_size, length, dtype=torch.long)
        if period is None or layers <= 2 * period:
            return _rehearse(build(layers), ids, bf16, workspace, context)
        one, two = (_rehearse(build(n * period), ids, bf16, workspace, context) for n in (1, 2))
    more_periods = layers / period - 1
    return tree_map(lambda once, twice: once + round(more_periods * (twice - once)), one, two)


def _rehearse(
    model: PreTrainedModel, ids: Tensor, bf16: bool, workspace: int, context: ContextParallel | None
) -> Rehearsal:
    """Two passes over `ids` `[B, T]`: one that creates the gradients, and one that adds to them."""
    model.train()
    given = {"input_ids": ids, "use_cache": False} if context is None else context.part(model, input_ids=ids)
    known = [*model.parameters(), *model.buffers(), *(part for part in given.values() if isinstance(part, Tensor))]
    first = _pass_peaks(model, given, StorageTracker(known, workspace), bf16)
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    second = _pass_peaks(model, given, StorageTracker([*known, *gradients], workspace), bf16)
    weights = sum(weight.untyped_storage().nbytes() for weight in set(model.parameters()))
    largest = max(sum(w.numel() * FLOAT32 for w in layer.parameters()) for layer in _blocks(model))
    # Autocast keeps bf16 copies of weights. Without recomputation they are counted already, as the backward pass needs
    # them. Modules are asked because the name of the model's property depends on the version of Transformers.
    recomputes = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    matrices = [weight for layer in _layers(model) for weight in layer.parameters() if weight.ndim >= 2]
    casts = BFLOAT16 * sum(weight.numel() for weight in matrices) if bf16 and recomputes else 0
    return Rehearsal(weights, largest, casts, first, second)


def _pass_peaks(model: PreTrainedModel, given: dict[str, Any], tracker: StorageTracker, bf16: bool) -> Peaks:
    """The peaks of a forward and backward pass with the arguments `given`, as `tracker` counts them."""
    in_layers: list[int] = []

    def end_layers(_: Tensor) -> None:
        in_layers.append(tracker.peak)
        tracker.peak = tracker.live

    # The gradient of the embedding's output is computed right after the backward passes of all layers.
    hook = model.get_input_embeddings().register_forward_hook(lambda *call: call[-1].register_hook(end_layers) and None)
    with tracker:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = _loss(model, given)
        in_loss = tracker.live + loss_bytes(model.config, given["input_ids"].numel(), bf16=bf16)
        loss.backward()
    hook.remove()
    return Peaks(in_layers[0], tracker.peak, in_loss)


def loss_bytes(config: PreTrainedConfig, tokens: int, *, bf16: bool) -> int:
    """Bytes of temporary tensors in the loss: for a chunk of tokens the logits and their log-softmax, in float32.

    With `bf16`, the logits and the weight of the head exist in bf16 as well.
    """
    logits = min(CHUNK_TOKENS, tokens) * config.vocab_size
    return 2 * FLOAT32 * logits + (BFLOAT16 * (logits + config.vocab_size * config.hidden_size) if bf16 else 0)


def _loss(model: PreTrainedModel, given: dict[str, Any]) -> Tensor:
    """The loss `[]` of a model with the arguments `given`, computed in chunks of tokens.

    A head of this package does so by itself only for plain tensors, and not for fake ones, so it is bypassed here.
    """
    ids = given["input_ids"]
    if not isinstance(model, CausalLMHead):
        return model(**given, labels=ids).loss
    hidden = model.model(**given).last_hidden_state
    return chunked_causal_loss(hidden, model.lm_head.weight, model.lm_head.bias, ids)


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    return [layer for part in model.modules() if isinstance(part, nn.ModuleList) for layer in part]


def _blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The layers that sharding engines gather one at a time, embeddings and head included."""
    return [*_layers(model), *embedding_modules(model)]


@dataclass(frozen=True)
class EngineMemory:
    """Bytes that one process of an engine needs.

    Attributes:
        weights, gradients, optimizer: its part of each; averages of weights are counted with the optimizer.
        buffers: copies that the engine makes, for gradients that are exchanged and for layers that are gathered.
        activations: activations of a forward and backward pass, with the maps that composition works on.
    """

    weights: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.buffers + self.activations


def engine_memory(
    name: str, rehearsal: Rehearsal, gpus: int, group: int, *, bf16: bool, optimizer: int
) -> EngineMemory:
    """What one process of the engine `name` needs on `gpus` GPUs.

    Weights are float32 in all engines, even if computation is in bfloat16.

    Args:
        group: how many GPUs share the weights of a replica in HSDP.
        optimizer: bytes of the optimizer's state for all weights, and of their moving averages, if they are kept.
    """
    whole = rehearsal.weights
    if gpus == 1:  # a single process of any engine shares nothing, and trains as `ddp` does
        return EngineMemory(whole, whole, optimizer, 0, rehearsal.activations)
    if name == "ddp":
        return EngineMemory(whole, whole, optimizer, whole, rehearsal.activations)
    if name.startswith("zero"):
        return _zero_memory(int(name[-1]), rehearsal, gpus, optimizer)
    share = min(gpus, group) if name == "hsdp" else gpus
    # Three times a layer: the weights of the layer that runs, of the next one, which is fetched, and one's gradients.
    pieces = 3 * rehearsal.largest_layer * (BFLOAT16 if bf16 else FLOAT32) // FLOAT32
    return EngineMemory(whole // share, whole // share, optimizer // share, pieces, rehearsal.activations_in_shards)


def _zero_memory(stage: int, rehearsal: Rehearsal, gpus: int, optimizer: int) -> EngineMemory:
    """What one process of DeepSpeed's ZeRO needs, with float32 weights.

    The optimizer updates a copy of the process's share of the weights, and gradients are exchanged through a buffer.
    """
    whole, share = rehearsal.weights, rehearsal.weights // gpus
    buffers = min(BUCKET_ELEMENTS * FLOAT32, whole) + (3 * rehearsal.largest_layer if stage == 3 else 0)
    weights, gradients = share if stage == 3 else whole, whole if stage == 1 else share
    return EngineMemory(weights, gradients, optimizer // gpus + share, buffers, rehearsal.activations)
