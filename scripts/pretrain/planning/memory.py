"""The memory of an update, from a rehearsal with tensors that have shapes and no contents."""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from dynattn.modeling.common.heads import CausalLMHead
from dynattn.modeling.ops.chunked_loss import CHUNK_TOKENS, chunked_causal_loss

FLOAT32, BFLOAT16 = 4, 2
# AdamW keeps two moments of each weight.
MOMENTS = 2


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of all tensors that operators make while it is active.

    What an operator holds inside itself is not seen.

    Attributes:
        live, peak: bytes held now, and at most so far.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        """Leaves out the storages of `known`, which are there already."""
        super().__init__()
        self.live = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator and counts the storages that it has made."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
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
    """

    weights: int
    largest_layer: int
    peak: int
    activations: int


def rehearse(
    build: Callable[[], PreTrainedModel], batch_size: int, length: int, *, bf16: bool, workspace: int = 0
) -> Rehearsal:
    """Runs two passes of the model that `build` makes, with a batch `[batch_size, length]`, on nothing but shapes.

    Args:
        workspace: bytes that the attention op holds inside itself in a backward pass.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build().train()
        ids = torch.zeros(batch_size, length, dtype=torch.long)
        known = [*model.parameters(), *model.buffers(), ids]
        first = _pass_peak(model, ids, known, bf16, workspace)
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        second = _pass_peak(model, ids, [*known, *gradients], bf16, workspace)
        weights = sum(weight.untyped_storage().nbytes() for weight in set(model.parameters()))
        largest = max(sum(w.numel() * FLOAT32 for w in layer.parameters()) for layer in _blocks(model))
    return Rehearsal(weights, largest, first, second)


def _pass_peak(model: PreTrainedModel, ids: Tensor, known: Iterable[Tensor], bf16: bool, workspace: int) -> int:
    """Bytes at the worst moment of a forward and backward pass over `ids` `[B, T]`, without what is `known`."""
    tracker = StorageTracker(known)
    with tracker:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = _loss(model, ids)
        # Two chunks of logits in float32: the logits, and the logarithms of their softmax.
        in_loss = tracker.live + 2 * FLOAT32 * min(CHUNK_TOKENS, ids.numel()) * model.config.vocab_size
        loss.backward()
    return max(tracker.peak + workspace, in_loss)


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
        weights, gradients, optimizer: what it holds of each.
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


def engine_memory(name: str, rehearsal: Rehearsal, gpus: int, node: int, *, bf16: bool) -> EngineMemory:
    """What a process of the engine `name` needs on `gpus` GPUs, `node` of them in a machine.

    Weights are float32 in all of them, also beside computation in bfloat16. HSDP shares them inside a machine.
    """
    whole, moments = rehearsal.weights, MOMENTS * rehearsal.weights
    share = {"ddp": 1, "zero1": 1, "zero2": 1, "hsdp": min(gpus, node)}.get(name, gpus)
    activations = rehearsal.activations
    if name in ("fsdp2", "hsdp", "zero3"):
        # Two layers are in one piece at a time, the second being fetched; gradients of one, too.
        pieces = 3 * rehearsal.largest_layer * (BFLOAT16 if bf16 else FLOAT32) // FLOAT32
        return EngineMemory(whole // share, whole // share, moments // share, pieces, activations)
    optimizer = moments if name == "ddp" else moments // gpus
    gradients = whole // gpus if name == "zero2" else whole
    return EngineMemory(whole, gradients, optimizer, whole if gpus > 1 else 0, activations)
