"""FSDP2 and HSDP: each process holds a shard of every weight, its gradient and its optimizer state."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from .interface import Engine, OptimizerBuilder


class FSDPEngine(Engine):
    """PyTorch's `fully_shard` over decoder layers and the rest of the model.

    The weights of a layer are in one piece only during its forward and its backward pass. With bf16, they are gathered
    and used in bf16; the shards that the optimizer updates, and the sums of gradients over processes, are float32.

    Args:
        shards: how many processes share the weights of a replica; HSDP has several replicas.
    """

    is_collective = True
    takes_weights_of_first = True

    def __init__(self, name: str, accelerator: Accelerator, shards: int) -> None:
        super().__init__(name, accelerator)
        self.shards = shards

    def prepare(
        self, model: PreTrainedModel, build: OptimizerBuilder, *, compiled: bool
    ) -> tuple[nn.Module, Optimizer]:
        """Sends the first process's weights to all others, layer by layer, and shards each layer right after that.

        So only the first process ever holds more than one layer, and the weights outside of layers, in one piece.
        """
        processes, device = self.accelerator.num_processes, self.accelerator.device
        shape = (processes,) if self.name == "fsdp2" else (processes // self.shards, self.shards)
        # `[shards]` (FSDP2), or `[replicas, shards]` (HSDP).
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
        precision = MixedPrecisionPolicy()
        if self.accelerator.mixed_precision == "bf16":  # gradients are summed over processes in float32 in any case
            precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        layers = layers_of(model)
        for layer in layers:
            share_weights(list(layer.modules()), device)
            if compiled:
                layer.compile()
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        inside = {module for layer in layers for module in layer.modules()}
        share_weights([module for module in model.modules() if module not in inside], device)
        model.tie_weights()
        fully_shard(model, mesh=mesh, mp_policy=precision)
        return model, build(model)

    def accumulating(self, model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
        """The context of a forward and backward pass; until the last one of an update, gradients add up unsharded."""
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(is_last)
        return nullcontext()

    def end_scoring(self, model: nn.Module) -> None:
        """Frees the gathered weights outside of layers; those of a layer are freed right after its forward pass."""
        assert isinstance(model, FSDPModule)
        model.reshard()

    def clip(self, model: nn.Module, limit: float) -> Tensor:
        """Scales all shards of the gradient; returns the norm `[]` before, over all shards."""
        norm = super().clip(model, limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def full_weights(self, model: nn.Module) -> dict[str, Tensor]:
        """All weights gathered into the memory of the main process's CPU; empty on the others."""
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = cast("dict[str, Tensor]", get_model_state_dict(model, options=whole))
        # Gathered weights that are tied are copies of each other, of which a checkpoint would hold both.
        once, each = (dict(model.named_parameters(remove_duplicate=remove)) for remove in (True, False))
        return {name: tensor for name, tensor in weights.items() if name in once or name not in each}

    def sharding(self) -> str:
        replicas = self.accelerator.num_processes // self.shards
        copies = f", {replicas} replicas" if replicas > 1 else ""
        return f"weights, gradients and optimizer state in {self.shards} shard{'s' * (self.shards > 1)}{copies}"


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that are sharded one by one: those of `_no_split_modules`, but for the token embeddings.

    BERT's kin name their embeddings there, too. But the weight may be tied to the head's, and so belongs to both.
    """
    kinds, embeddings = set(model._no_split_modules or ()), model.get_input_embeddings()
    named = [module for module in model.modules() if type(module).__name__ in kinds]
    return [module for module in named if embeddings not in set(module.modules())]


@torch.no_grad()
def share_weights(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Sends the first process's own parameters and buffers of each of `modules`, not of children, to all others."""
    for module in modules:
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in tensors):
            module.to_empty(device=device, recurse=False)
        else:
            module._apply(lambda tensor: tensor.to(device), recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            dist.broadcast(tensor, 0)
