"""Named modules in the attention layers of a model, where tools can read and change the maps of all heads."""

from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..layers.attention_interface import attention_function
from ..layers.composed_attention import ComposedAttention
from ..layers.head_composition import DynamicComposition
from ..ops.dcmha.eager import AttentionMaps, dcmha_eager


class MapHooks(nn.Module):
    """One `nn.Identity` for each field of `AttentionMaps`; the maps `[B, H, T, S]` of a layer pass through them."""

    def __init__(self) -> None:
        super().__init__()
        for name in AttentionMaps._fields:
            self.add_module(name, nn.Identity())

    def forward(self, name: str, maps: Tensor) -> Tensor:
        """Passes maps `[B, H, T, S]` through the module `name`, whose hooks may read or replace them."""
        return self.get_submodule(name)(maps)

    def attend(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """The reference implementation, whose maps pass through these hooks; arguments as in `attention_function`."""
        return attention_function(partial(dcmha_eager, hook=self))(*args, **kwargs)


def add_map_hooks(model: PreTrainedModel) -> None:
    """Gives every composed attention layer a module `map_hooks` that its maps pass through.

    It has the submodules `scores`, `composed_scores`, `probs` and `composed_probs`, whose outputs are these maps
    `[B, H, T, S]`. PyTorch's forward hooks, and tools that trace modules by name, read them there; the model goes on
    with whatever a hook returns. These layers run with the reference implementation until `remove_map_hooks`, whatever
    `attn_implementation` is. Weights and their names do not change.

    Raises:
        ValueError: the model has no composed attention layers of this package's own, or has hooks already.
    """
    layers = _attention_layers(model)
    if not layers and any(isinstance(module, DynamicComposition) for module in model.modules()):
        raise ValueError(
            f"the heads of {type(model).__name__} were composed in place, and have no map hooks; after "
            "set_attn_implementation('eager'), output_attentions=True returns their composed maps"
        )
    if not layers:
        raise ValueError(f"{type(model).__name__} has no composed attention layers to hook")
    if any(layer.map_hooks is not None for layer in layers):
        raise ValueError(f"{type(model).__name__} has map hooks already; remove_map_hooks takes them away")
    for layer in layers:
        layer.map_hooks = MapHooks()


def remove_map_hooks(model: PreTrainedModel) -> None:
    """Undoes `add_map_hooks`; a model without such hooks stays as it is."""
    for layer in _attention_layers(model):
        del layer.map_hooks  # else None would take the module's place among those that the layer lists
        layer.map_hooks = None


def _attention_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, ComposedAttention)]
