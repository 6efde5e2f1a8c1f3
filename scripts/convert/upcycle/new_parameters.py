"""The parameters that a plain model lacks: those of the composition, and a query-key norm if one is added."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dynattn.families import FAMILIES
from dynattn.modeling.layers.head_composition import DynamicComposition, init_composition

from ..common.planning import meta_model
from ..common.weight_map import Step

NORMS = ("q_norm.weight", "k_norm.weight")


def generators_of(model: PreTrainedModel) -> dict[str, DynamicComposition]:
    """The generators of composition factors by their names, in the order of the layers."""
    return {name: module for name, module in model.named_modules() if isinstance(module, DynamicComposition)}


def new_steps(config: Any, existing: Iterable[str], seed: int) -> Iterator[Step]:
    """Steps that read nothing and make what `config` asks for beyond the tensors `existing`, module by module."""
    present = set(existing)
    model = meta_model(config, FAMILIES[config.model_type].main_auto_class)
    generators = generators_of(model)
    for index, (name, module) in enumerate(generators.items()):
        names = tuple(f"{name}.{part}" for part in module.state_dict())
        yield Step((), names, partial(_compose, module, config.compose_init_scale, seed * len(generators) + index))
    for key in model.state_dict():
        if key.endswith(NORMS) and key not in present:
            yield Step((), (key,), lambda _: [torch.ones(config.head_dim)])


def _compose(module: DynamicComposition, scale: float, seed: int, _: Sequence[Tensor]) -> list[Tensor]:
    """Fresh parameters of one generator, `[...]` in the order of its state dict."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = copy.deepcopy(module).to_empty(device="cpu")
        init_composition(made, scale)
    return list(made.state_dict().values())
