"""What the small training loops of studies share: optimizer, schedule, updates, and what a forward pass costs."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedConfig, PreTrainedModel

WARMUP, WEIGHT_DECAY, MAX_GRAD_NORM = 60, 0.05, 1.0


def begin_alike(model: nn.Module, other: nn.Module) -> None:
    """Copies the weights of `other` that `model` has in the same shape, so that runs of a seed can be paired."""
    own = model.state_dict()
    shared = {name: weight for name, weight in other.state_dict().items() if name in own}
    model.load_state_dict({**own, **{name: w for name, w in shared.items() if w.shape == own[name].shape}})


def matched_width(make: Callable[[Any], PreTrainedModel], full: PreTrainedConfig, plain: PreTrainedConfig) -> int:
    """The width of MLPs with which the model of `plain` has about as many parameters as that of `full`."""
    wider = deepcopy(plain)
    wider.intermediate_size += 1
    with torch.device("meta"):
        most, least, next_more = (make(config).num_parameters() for config in (full, plain, wider))
    return plain.intermediate_size + round((most - least) / (next_more - least))


def train_steps(model: nn.Module, learning_rate: float, steps: int, loss_of: Callable[[int], Tensor]) -> float:
    """Makes `steps` updates of a model, each on the scalar that `loss_of(step)` returns; returns the last loss."""
    optimizer = make_optimizer(model, learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    model.train()
    for step in range(steps):
        loss = loss_of(step)
        update(model, optimizer, loss)
        schedule.step()
    return float(loss.detach())


def update(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One step of the optimizer on the clipped gradients of a loss `[]`."""
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()


def make_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """AdamW, which decays all weights of two or more dimensions but `nn.Embedding`s, so also the tables of RCMHA."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for weight in model.parameters():
        groups[weight.ndim >= 2 and weight not in embeddings].append(weight)
    options = [{"params": groups[decays], "weight_decay": WEIGHT_DECAY * decays} for decays in (True, False)]
    return torch.optim.AdamW(options, lr=learning_rate, betas=(0.9, 0.95))


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then a straight line to zero."""
    warmup = min(WARMUP, steps // 2)
    return min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))


def forward_flops(model: PreTrainedModel, *inputs: Tensor, **options: Any) -> int:
    """Floating point operations of all products of matrices, and of convolutions, in a forward pass on these inputs.

    They are counted on the reference implementation, whose products PyTorch counts.
    """
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*inputs, **options)
    return counter.get_total_flops()
