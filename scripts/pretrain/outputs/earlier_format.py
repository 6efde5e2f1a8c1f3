"""Checkpoints of earlier versions: `Accelerator.save_state` wrote them, weights in one piece and the rest pickled."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils.other import load as load_without_code
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from ..optimizer import embedding_weights
from .training_state import give_states

OPTIMIZER_FILE = "optimizer.bin"


def is_earlier_format(folder: Path) -> bool:
    """Whether an earlier version wrote this checkpoint."""
    return (folder / OPTIMIZER_FILE).exists()


def load_earlier(folder: Path, model: nn.Module, optimizer: Optimizer, process: int) -> None:
    """Restores weights, optimizer and the random states of a process, without running code in the files.

    Raises:
        UnpicklingError, SafetensorError: a file holds something else than tensors and plain values.
        ValueError: the optimizer had numbered the weights differently.
    """
    saved = torch.load(folder / OPTIMIZER_FILE, map_location="cpu", weights_only=True)
    random_states = folder / f"random_states_{process}.pkl"
    # A process that did not exist when the checkpoint was saved keeps its own.
    states = load_without_code(random_states) if random_states.exists() else {}
    load_earlier_weights(folder, model)
    weights = numbered_weights(model, optimizer)
    give_states(
        optimizer,
        {
            weights[number]: {what: _placed_like(weights[number], tensor) for what, tensor in state.items()}
            for number, state in saved["state"].items()
        },
    )
    if states:
        random.setstate(states["random_state"])
        np.random.set_state(states["numpy_random_seed"])
        torch.set_rng_state(states["torch_manual_seed"])
        if "torch_cuda_manual_seed" in states:
            torch.cuda.set_rng_state_all(states["torch_cuda_manual_seed"])


def numbered_weights(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """The weights that learn, in the order in which these versions numbered them.

    Their groups were: matrices, among them tables of positions and biases of heads, which no longer decay; the rest;
    and, if it was treated apart, the composition.
    """
    groups = {weight: group for group in optimizer.param_groups for weight in group["params"]}
    embeddings = embedding_weights(model)
    learning = [weight for weight in model.parameters() if weight in groups]
    return sorted(learning, key=lambda weight: (groups[weight]["composes"], weight.ndim < 2 or weight in embeddings))


def load_earlier_weights(folder: Path, model: nn.Module) -> None:
    """Puts the weights of a checkpoint into a model, whole or in shards."""
    # Not strict, because the file has only one of several tied weights.
    whole = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, dict[str, Any](load_file(folder / "model.safetensors")), options=whole)


def _placed_like(weight: Tensor, tensor: Tensor) -> Tensor:
    """Shards a moment of a weight as the weight is sharded; a count of updates `[]` is returned as it is."""
    if tensor.ndim and tensor.shape != weight.shape:
        raise ValueError(f"it has a moment {list(tensor.shape)} for a weight {list(weight.shape)}")
    if isinstance(weight, DTensor) and tensor.shape == weight.shape:
        whole = tensor.to(weight.device)
        return distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)
    return tensor
