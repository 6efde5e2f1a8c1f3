"""The arguments of the chunked op, as autograd and compilers see them."""

from typing import NamedTuple

from torch import Tensor


class ChunkedInputs(NamedTuple):
    """The arguments that are tensors; `pack_factors` packs the factors."""

    query: Tensor  # [B, H, T, D]
    key: Tensor  # [B, H_kv, S, D]
    value: Tensor  # [B, H_kv, S, D]
    pre_query: Tensor | None  # [B, T, terms, H]
    pre_key: Tensor | None  # [B, S, terms, H]
    pre_static: Tensor | None  # [H, H], indexed [in, out]
    post_query: Tensor | None  # [B, T, terms, H]
    post_key: Tensor | None  # [B, S, terms, H]
    post_static: Tensor | None  # [H, H], indexed [in, out]
    mask: Tensor | None  # four dimensions that broadcast to [B, H, T, S]
    first_keys: Tensor | None  # [B, T], integers
    position_bias: Tensor | None = None  # [L, H]
    position_gain: Tensor | None = None  # [L, H]
    offset: Tensor | None = None  # [], an integer: position of the first query; None: the last query is at the last key


# Fields that are tables by distance, and fields that have no gradient.
TABLES = ("position_bias", "position_gain")
INTEGERS = ("first_keys", "offset")


class ChunkedSettings(NamedTuple):
    """The arguments that are not tensors."""

    scaling: float
    is_causal: bool
    sliding_window: int | None
    pre_groups: int
    post_groups: int
    compose_bias: bool = False  # whether the bias is added before the first composition
