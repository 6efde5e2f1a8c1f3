"""What a plain model lacks to become one of ours: composition parameters, and a query-key norm if one is added."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dynattn.modeling.layers.head_composition import DynamicComposition, init_composition

from ..common.weight_map import Step

ATTENTION = "model.layers.{layer}.self_attn."
COMPOSITION = ".self_attn.composition."


def new_steps(config: Any, existing: Iterable[str], seed: int) -> Iterator[Step]:
    """Steps that read nothing and make what `config` asks for beyond the tensors `existing`, one for each layer."""
    present = set(existing)
    norms = ("q_norm.weight", "k_norm.weight") if config.use_qk_norm else ()
    with torch.device("meta"):
        parts = tuple(DynamicComposition(config).state_dict()) if config.composes else ()
    for layer in range(config.num_hidden_layers):
        prefix = ATTENTION.replace("{layer}", str(layer))
        if parts:
            names = tuple(f"{prefix}composition.{part}" for part in parts)
            yield Step((), names, partial(_compose, config, seed, layer))
        if added := tuple(prefix + name for name in norms if prefix + name not in present):
            yield Step((), added, partial(_scales, config.head_dim, len(added)))


def _compose(config: Any, seed: int, layer: int, _: Sequence[Tensor]) -> list[Tensor]:
    """Fresh composition parameters of one layer, `[...]` in the order of the module's state dict."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed * config.num_hidden_layers + layer)
        module = DynamicComposition(config)
        init_composition(module, config.compose_init_scale)
    return list(module.state_dict().values())


def _scales(width: int, count: int, _: Sequence[Tensor]) -> list[Tensor]:
    """Scales of `count` new norms, `[width]` each: ones."""
    return [torch.ones(width) for _ in range(count)]
