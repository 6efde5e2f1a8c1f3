"""Which keys a query sees, as one boolean tensor."""

import torch
from torch import Tensor


def visible_keys(
    queries: int, keys: int, *, is_causal: bool, sliding_window: int | None, device: torch.device
) -> Tensor | None:
    """Returns `[T, S]`, True where query `t` sees key `s`, or None where every query sees every key.

    Queries are aligned to the end of the keys: query `t` stands at position `t + S - T`, sees no later key when
    `is_causal`, and only the nearest `sliding_window` keys, itself included.
    """
    if not is_causal and sliding_window is None:
        return None
    position = torch.arange(keys - queries, keys, device=device)
    distance = position[:, None] - torch.arange(keys, device=device)  # [T, S]
    visible = torch.ones_like(distance, dtype=torch.bool)
    if is_causal:
        visible &= distance >= 0
    if sliding_window is not None:
        visible &= distance.abs() < sliding_window
    return visible


def split_mask(attention_mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Returns a mask as (visible, bias): a boolean one as it is, an additive one as what it hides and what it adds.

    Additive masks mark hidden keys by the lowest finite value of their dtype or by minus infinity.
    """
    if attention_mask is None or attention_mask.dtype == torch.bool:
        return attention_mask, None
    visible = attention_mask > torch.finfo(attention_mask.dtype).min
    return visible, attention_mask


def both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """The conjunction of two optional boolean masks; None means that nothing is hidden."""
    if first is None or second is None:
        return second if first is None else first
    return first & second
