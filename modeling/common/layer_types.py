"""The type of each layer: whether its tokens see all others or a window."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig


def layer_types_of(config: PreTrainedConfig) -> list[str]:
    """The type of each layer; families without windows have no `layer_types`, and all their layers see everything."""
    return getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers


def typed_layers(layers: nn.ModuleList, config: PreTrainedConfig) -> Iterator[tuple[nn.Module, str]]:
    """The layers that run, each with its type.

    `generate(assistant_early_exit=n)` drafts with the first layers: it changes `num_hidden_layers` for a while.

    Raises:
        ValueError: layers were added, and `layer_types` does not tell their types.
    """
    layer_types, count = layer_types_of(config), min(len(layers), config.num_hidden_layers)
    if len(layer_types) < count:
        raise ValueError(
            f"layer_types in the configuration has {len(layer_types)} entries for {count} layers; add those of the new "
            "layers"
        )
    for layer, layer_type in zip(layers, layer_types[:count], strict=False):
        _set_type(layer, layer_type)
    return zip(layers, layer_types[:count], strict=False)


def _set_type(layer: nn.Module, layer_type: str) -> None:
    """Lets the attention of a layer slide if its type, which may have changed since it was made, says so.

    It is done here, because layers that are compiled by themselves would be compiled once for each index.
    """
    attention: Any = getattr(layer, "self_attn", None)
    slides = layer_type == "sliding_attention"
    if getattr(attention, "slides", slides) != slides:
        attention.slides = slides
