"""The memory of an update, from a rehearsal with tensors that have shapes and no contents."""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig, PreTrainedModel

from dynattn.modeling.common.heads import CausalLMHead
from dynattn.modeling.ops.chunked_loss import CHUNK_TOKENS, chunked_causal_loss

from ..engines.interface import BUCKET_ELEMENTS

FLOAT32, BFLOAT16 = 4, 2


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of all tensors that operators make while it is active.

    What an operator holds inside itself is not seen, but for the backward passes of attention ops.

    Attributes:
        live, peak: bytes held now, and at most so far.
    """

    def __init__(self, known: Iterable[Tensor], workspace: int) -> None:
        """Leaves out the storages of `known`, which are there already.

        Args:
            workspace: bytes that an attention op of this package holds inside its backward pass.
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


@dataclass(frozen=True)
class Rehearsal:
    """Bytes of one forward and backward pass.

    Attributes:
        weights: of the model in float32.
        largest_layer: of the weights of the largest block that an engine gathers as one.
        peak: above the weights at the worst moment, gradients included.
        activations: above weights and gradients at the worst moment, if all gradients are there already, as with
            gradient accumulation.
        activations_in_shards: the same where weights are gathered in bf16, so that autocast keeps no copies.
    """

    weights: int
    largest_layer: int
    peak: int
    activations: int
    activations_in_shards: int


class Peaks(NamedTuple):
    """Bytes above what is known, at the worst moments of a pass. Each grows linearly with the number of layers."""

    layers: float  # while layers run forward and backward
    ends: float  # behind the last layer's backward pass, which is the first layer's
    loss: float

    def extended(self, doubled: "Peaks", ratio: float) -> "Peaks":
        """Those of `ratio` times as many layers, from these and those of twice as many."""
        pairs = zip(self, doubled, strict=True)
        return Peaks(*(one + (ratio - 1) * (two - one) for one, two in pairs))


def rehearse(
    build: Callable[[int], PreTrainedModel],
    layers: int,
    batch_size: int,
    length: int,
    *,
    bf16: bool,
    workspace: int = 0,
    period: int | None = None,
) -> Rehearsal:
    """Runs two passes of a model, with a batch `[batch_size, length]`, on nothing but shapes.

    Args:
        build: makes a model of so many layers.
        workspace: bytes that the attention op holds inside itself in a backward pass.
        period: layers repeat after so many. Then models of one and of two periods are run, and all else is
            arithmetic; if it is not given, all layers are.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        ids = torch.zeros(batch_size, length, dtype=torch.long)
        if period is None or layers <= 2 * period:
            return _rehearse(build(layers), ids, bf16, workspace).summary()
        one, two = (_rehearse(build(n * period), ids, bf16, workspace) for n in (1, 2))
    return one.extended(two, layers / period).summary()


def _rehearse(model: PreTrainedModel, ids: Tensor, bf16: bool, workspace: int) -> "Passes":
    """A first and an accumulating pass over `ids` `[B, T]`."""
    model.train()
    known = [*model.parameters(), *model.buffers(), ids]
    first = _pass_peaks(model, ids, StorageTracker(known, workspace), bf16)
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    second = _pass_peaks(model, ids, StorageTracker([*known, *gradients], workspace), bf16)
    weights = sum(weight.untyped_storage().nbytes() for weight in set(model.parameters()))
    largest = max(sum(w.numel() * FLOAT32 for w in layer.parameters()) for layer in _blocks(model))
    # Without recomputation, the backward pass needs these copies anyway. Transformers warns of the older name of its
    # property for this, and its older versions lack the newer name.
    recomputes = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    casts = _cast_bytes(model) if bf16 and recomputes else 0
    return Passes(weights, largest, casts, first, second)


class Passes(NamedTuple):
    """What two passes of a model have needed, in bytes."""

    weights: float
    largest_layer: float
    casts: float  # of weights of layers that autocast keeps in bf16 until the loss is there
    first: Peaks
    second: Peaks

    def extended(self, doubled: "Passes", ratio: float) -> "Passes":
        """Those of a model of `ratio` times as many layers, from this one and one of twice as many."""
        weights, casts = (
            one + (ratio - 1) * (two - one) for one, two in ((self[0], doubled[0]), (self[2], doubled[2]))
        )
        peaks = (one.extended(two, ratio) for one, two in ((self.first, doubled.first), (self.second, doubled.second)))
        return Passes(weights, self.largest_layer, casts, *peaks)

    def summary(self) -> Rehearsal:
        """The worst moments."""
        first, second = (round(max((*found[:2], found.loss + self.casts))) for found in (self.first, self.second))
        return Rehearsal(round(self.weights), round(self.largest_layer), first, second, round(max(self.second)))


def _cast_bytes(model: PreTrainedModel) -> int:
    """The matrices of all layers in bf16."""
    layers = [block for part in model.modules() if isinstance(part, nn.ModuleList) for block in part]
    return BFLOAT16 * sum(w.numel() for layer in layers for w in layer.parameters() if w.ndim >= 2)


def _pass_peaks(model: PreTrainedModel, ids: Tensor, tracker: StorageTracker, bf16: bool) -> Peaks:
    """The worst moments of a forward and backward pass over `ids` `[B, T]`, as `tracker` counts them."""
    in_layers: list[int] = []

    def end_layers(_: Tensor) -> None:
        in_layers.append(tracker.peak)
        tracker.peak = tracker.live

    # Its gradient is there when all layers have had their backward pass.
    hook = model.get_input_embeddings().register_forward_hook(lambda *call: call[-1].register_hook(end_layers) and None)
    with tracker:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = _loss(model, ids)
        in_loss = tracker.live + loss_bytes(model.config, ids.numel(), bf16=bf16)
        loss.backward()
    hook.remove()
    return Peaks(in_layers[0], tracker.peak, in_loss)


def loss_bytes(config: PreTrainedConfig, tokens: int, *, bf16: bool) -> int:
    """What the loss holds inside itself: two chunks in float32, logits and the logarithms of their softmax.

    In bf16 there are the logits in bf16 besides, and the weight of the head.
    """
    logits = min(CHUNK_TOKENS, tokens) * config.vocab_size
    return 2 * FLOAT32 * logits + (BFLOAT16 * (logits + config.vocab_size * config.hidden_size) if bf16 else 0)


def _loss(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The loss `[]` of `ids` `[B, T]` without all logits at once.

    The model's head does this with plain weights alone, and weights without contents are none.
    """
    if not isinstance(model, CausalLMHead):
        return model(input_ids=ids, labels=ids, use_cache=False).loss
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return chunked_causal_loss(hidden, model.lm_head.weight, model.lm_head.bias, ids)


def _blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The layers that sharding engines gather one at a time, embeddings and head included."""
    layers = [block for part in model.modules() if isinstance(part, nn.ModuleList) for block in part]
    ends = [part for part in model.modules() if isinstance(part, nn.Embedding)]
    head = model.get_output_embeddings()
    return [*layers, *ends, *([head] if head is not None else [])]


@dataclass(frozen=True)
class EngineMemory:
    """Bytes that one process of an engine needs.

    Attributes:
        weights, gradients, optimizer: what it holds of each; averages of weights count as the optimizer's.
        buffers: copies that the engine makes: gradients on their way, layers in one piece.
        activations: of a forward and backward pass, with the maps that composition works on.
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
    name: str, rehearsal: Rehearsal, gpus: int, node: int, *, bf16: bool, moments: int, averages: int = 0
) -> EngineMemory:
    """What a process of the engine `name` needs on `gpus` GPUs, `node` of them in a machine.

    Weights are float32 in all of them, also beside computation in bfloat16. HSDP shares them inside a machine.

    Args:
        moments: bytes that the optimizer keeps of all weights.
        averages: bytes of their moving averages, if they are kept.
    """
    whole = rehearsal.weights
    share = {"ddp": 1, "hsdp": min(gpus, node)}.get(name, gpus)
    if name.startswith("zero"):
        return _zero_memory(int(name[-1]), rehearsal, gpus, moments + averages)
    if name == "ddp":
        copies = whole if gpus > 1 else 0
        return EngineMemory(whole, whole, moments + averages, copies, rehearsal.activations)
    # Two layers are in one piece at a time, the second being fetched; gradients of one, too.
    pieces = 3 * rehearsal.largest_layer * (BFLOAT16 if bf16 else FLOAT32) // FLOAT32
    return EngineMemory(
        whole // share, whole // share, (moments + averages) // share, pieces, rehearsal.activations_in_shards
    )


def _zero_memory(stage: int, rehearsal: Rehearsal, gpus: int, moments: int) -> EngineMemory:
    """What a process of DeepSpeed's ZeRO needs, which computes in bf16 by autocast, and has weights in float32.

    Its optimizer updates a copy of the process's share of the weights, and gradients are exchanged by way of a buffer.
    """
    whole, share = rehearsal.weights, rehearsal.weights // gpus
    buffers = min(BUCKET_ELEMENTS * FLOAT32, whole) + (3 * rehearsal.largest_layer if stage == 3 else 0)
    weights, gradients = share if stage == 3 else whole, whole if stage == 1 else share
    return EngineMemory(weights, gradients, moments // gpus + share, buffers, rehearsal.activations)
