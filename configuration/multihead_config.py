"""The options of an attention layer with composed heads that stands alone, outside a model of this package."""

from typing import TypedDict

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError

from .composition_config import CompositionConfig


class ComposeOptions(TypedDict, total=False):
    """The fields of `CompositionConfig` that say how heads are composed; their meaning and defaults are given there."""

    compose_pre: bool
    compose_post: bool
    compose_query_wise: bool
    compose_key_wise: bool
    compose_low_rank: bool
    compose_gate: bool
    compose_static: bool
    compose_rank: int
    compose_groups: int
    compose_hidden_size: int | None
    compose_act: str
    compose_norm_eps: float
    compose_init_scale: float
    compose_dropout: float
    differential_heads: bool
    head_norm_eps: float


@strict
class MultiheadConfig(CompositionConfig):
    """What `DynamicComposition` reads of a configuration, for an attention layer that stands alone."""

    hidden_size: int = 0
    num_attention_heads: int = 0
    num_hidden_layers: int = 1


def make_config(
    embed_dim: int,
    num_heads: int,
    num_key_value_heads: int | None,
    compose: ComposeOptions,
    head_dim: int | None = None,
) -> MultiheadConfig:
    """Returns the configuration of a single layer.

    Args:
        embed_dim, num_heads: width of the layer's inputs, and number of query heads.
        num_key_value_heads: number of key and value heads; None for as many.
        compose: the options of composition that differ from their defaults.
        head_dim: width of a head; None if the heads divide `embed_dim` among them.

    Raises:
        TypeError: `compose` has an option that does not exist.
        ValueError: a value is out of range, or values do not fit each other.
    """
    if unknown := sorted(compose.keys() - ComposeOptions.__annotations__.keys()):
        known = sorted(ComposeOptions.__annotations__)
        raise TypeError(f"no options {unknown} exist here; those of composition are {known}")
    if embed_dim < 1 or num_heads < 1 or (head_dim is None and embed_dim % num_heads):
        raise ValueError(f"embed_dim ({embed_dim}) must be a positive multiple of num_heads ({num_heads})")
    try:
        return MultiheadConfig(
            hidden_size=embed_dim,
            num_attention_heads=num_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=head_dim,
            **compose,
        )
    except StrictDataclassError as error:
        raise ValueError(str(error.__cause__ or error)) from error
