"""The arguments of the chunked op, as autograd and compilers see them."""

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """All tensors; rows are packed as in `Stage`."""

    query: Tensor  # [B, H, T, D]
    key: Tensor  # [B, H_kv, S, D]
    value: Tensor  # [B, H_kv, S, D]
    pre_query: Tensor | None  # [B, T, rows, H]
    pre_key: Tensor | None  # [B, S, rows, H]
    pre_static: Tensor | None  # [H, H]
    post_query: Tensor | None
    post_key: Tensor | None
    post_static: Tensor | None
    mask: Tensor | None  # four dimensions that broadcast to [B, H, T, S]
    first_keys: Tensor | None  # [B, T], integers; this has no gradient


class Settings(NamedTuple):
    """All else."""

    scaling: float
    is_causal: bool
    sliding_window: int | None
    pre_groups: int
    post_groups: int
