"""The interface of engines to the training loop, and the engine of processes that all hold the whole model (DDP)."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from ..outputs.training_state import load_tensors, training_tensors
from ..weight_average import WeightAverage
from .sequence_groups import SequenceGroups

OptimizerBuilder = Callable[[nn.Module], Optimizer]

# Elements of gradients, in float32, that DeepSpeed exchanges at once. It stands here because the estimate of a run's
# memory needs it on machines without DeepSpeed, too.
BUCKET_ELEMENTS = 100_000_000


class Engine:
    """Every process holds all weights, and gradients are averaged over processes (DDP), or there is only one process.

    Other engines override what they do differently.

    Attributes:
        name: the engine's value of `--engine`.
        groups: the processes that share sequences.
        cuda_graphs: whether a compiled model replays CUDA graphs.
        is_collective: whether a forward pass needs all processes at the same time.
        takes_weights_of_first: whether `prepare` copies the first process's weights to all others, which may then build
            their models on the meta device.
        reads_earlier_format: whether checkpoints of earlier versions can be resumed.
    """

    is_collective = False
    takes_weights_of_first = False
    reads_earlier_format = True

    def __init__(self, name: str, accelerator: Accelerator, *, cuda_graphs: bool = False) -> None:
        self.name, self.accelerator, self.cuda_graphs = name, accelerator, cuda_graphs
        self.groups = SequenceGroups(accelerator)

    def prepare(
        self, model: PreTrainedModel, build: OptimizerBuilder, *, compiled: bool
    ) -> tuple[nn.Module, Optimizer]:
        """Places the model on the devices, compiled if asked for, and its optimizer, which `build` makes."""
        model = model.to(self.accelerator.device)
        if compiled:
            model.compile(mode="reduce-overhead" if self.cuda_graphs else None)
        return self.accelerator.prepare(model, build(model))

    def begin_update(self, model: nn.Module) -> None:
        """Called before the first forward pass of an update, when no weight has a gradient."""
        if self.cuda_graphs:
            # A graph writes gradients to the same memory in each replay. A weight without a gradient would keep that
            # memory as its gradient, which the next pass of the update would then overwrite instead of adding to it.
            for weight in model.parameters():
                if weight.requires_grad:
                    weight.grad = torch.zeros_like(weight)

    def accumulating(self, model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
        """The context of a forward and backward pass; gradients are exchanged in the last one of an update."""
        return nullcontext() if is_last else self.accelerator.no_sync(model)

    def backward(self, loss: Tensor) -> None:
        """The backward pass of this process's share `[]` of the update's loss."""
        # Gradients are averaged over processes, while each loss is already a share of the sum over them.
        self.accelerator.backward(loss * self.accelerator.num_processes)

    def scorer(self, model: nn.Module) -> nn.Module:
        """The module that scores batches without gradients: the model without DDP's wrapper."""
        return self.accelerator.unwrap_model(model)

    def end_scoring(self, model: nn.Module) -> None:
        """Frees what forward passes keep for backward passes; called after forward passes that had no backward pass."""

    def clip(self, model: nn.Module, limit: float) -> Tensor:
        """Scales the gradient down to the norm `limit`; returns its norm `[]` before, over all weights."""
        weights = [weight for weight in model.parameters() if weight.grad is not None]
        norm = nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])
        # A norm that is not finite would make every gradient NaN, and the guard could not find where the fault began.
        # With a norm of zero nothing is scaled.
        nn.utils.clip_grads_with_norm_(weights, limit, norm.nan_to_num(nan=0.0, posinf=0.0))
        return norm

    def gradient(self, weight: nn.Parameter) -> Tensor | None:
        """The gradient of a weight after the last backward pass of an update, whole or a shard; None if it has none."""
        return weight.grad

    def training_tensors(
        self, model: nn.Module, optimizer: Optimizer, average: WeightAverage | None
    ) -> dict[str, Tensor]:
        """The tensors that this process writes into a checkpoint, under the names of `outputs.training_state`."""
        return training_tensors(self.accelerator.unwrap_model(model), optimizer, average)

    def load_tensors(self, folder: Path, model: nn.Module, optimizer: Optimizer, average: WeightAverage | None) -> None:
        """Restores the `training_tensors` that were written into `folder`, by whichever engine."""
        alone = self.accelerator.num_processes == 1
        load_tensors(folder, self.accelerator.unwrap_model(model), optimizer, average, alone=alone)

    def full_weights(self, model: nn.Module) -> dict[str, Tensor]:
        """All weights in one piece, on the CPU or on the device; only the main process has to get all of them."""
        return self.accelerator.get_state_dict(model)

    def sharding(self) -> str:
        """What a process holds, in words for the terminal."""
        return "every process holds all weights" if self.accelerator.num_processes > 1 else "all weights in one piece"

    def describe(self) -> str:
        """Processes, engine and sharding in one line."""
        accelerator = self.accelerator
        processes = f"{accelerator.num_processes} process{'es' if accelerator.num_processes > 1 else ''}"
        parts = f", sequences in {self.groups.size} parts" if self.groups.size > 1 else ""
        return f"engine: {self.name}, {processes} on {accelerator.device.type}, {self.sharding()}{parts}"
