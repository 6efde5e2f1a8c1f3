"""The inputs of `torch.nn.MultiheadAttention`: their checks, and its masks as one mask of the attention op."""

import torch
from torch import Tensor


def check_shapes(query: Tensor, key: Tensor, value: Tensor, widths: tuple[int, int, int], batch_first: bool) -> None:
    """Raises ValueError unless query `[T, B, E]`, key `[S, B, kdim]` and value `[S, B, vdim]` fit each other.

    With `batch_first` they are `[B, T, E]` and so on; all may also lack the batch dimension.

    Args:
        widths: E, kdim and vdim.
    """
    found = [tuple(x.shape) for x in (query, key, value)]
    layout = "[B, T, {}]" if batch_first else "[T, B, {}]"
    batch = slice(0, 1) if batch_first else slice(1, 2)
    fits = len(set(map(len, found))) == 1 and query.dim() in (2, 3)
    fits = fits and tuple(shape[-1] for shape in found) == widths and found[1][:-1] == found[2][:-1]
    if not fits or (query.dim() == 3 and found[0][batch] != found[1][batch]):
        lengths = zip(widths, "TSS", strict=True)
        expected = ", ".join(layout.format(width).replace("T", length) for width, length in lengths)
        raise ValueError(
            f"query, key and value are {found[0]}, {found[1]} and {found[2]}; with batch_first={batch_first} they must "
            f"be {expected}, or all without B"
        )


def check_masks_fit(
    query: Tensor,
    key: Tensor,
    num_heads: int,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_batched: bool,
) -> None:
    """Raises ValueError unless the masks fit query `[B, T, E]` and key `[B, S, kdim]`.

    Args:
        attn_mask: `[T, S]` or `[B * H, T, S]`.
        key_padding_mask: `[B, S]`, or `[S]` if the inputs came without a batch.
    """
    (batch, queries), keys = query.shape[:2], key.shape[1]
    _check_mask("attn_mask", attn_mask, (queries, keys), (batch * num_heads, queries, keys))
    _check_mask("key_padding_mask", key_padding_mask, (batch, keys) if is_batched else (keys,))


def _check_mask(name: str, mask: Tensor | None, *shapes: tuple[int, ...]) -> None:
    """Raises ValueError unless `mask` is boolean or floating point and has one of `shapes`, such as `[T, S]`."""
    if mask is None:
        return
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"{name} is {mask.dtype}; it must be boolean (True = hidden) or floating point (added)")
    if tuple(mask.shape) not in shapes:
        raise ValueError(f"{name} is {tuple(mask.shape)}; it must be {' or '.join(map(str, shapes))}")


def merge_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, num_heads: int, dtype: torch.dtype
) -> Tensor | None:
    """Returns the masks of PyTorch's module as one mask of `dcmha_attention`, broadcastable to `[B, H, T, S]`.

    Args:
        attn_mask: `[T, S]` or `[B * H, T, S]`, boolean (True = hidden) or additive.
        key_padding_mask: `[B, S]`, boolean (True = hidden) or additive.
        dtype: of the result, if any of the masks is additive.
    """
    masks = []
    if attn_mask is not None:
        masks.append(attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask.unflatten(0, (-1, num_heads)))
    if key_padding_mask is not None:
        masks.append(key_padding_mask[:, None, None, :])
    if not masks:
        return None
    if all(mask.dtype == torch.bool for mask in masks):
        return ~masks[0] if len(masks) == 1 else ~(masks[0] | masks[1])
    added = [_additive(mask, dtype) for mask in masks]
    return added[0] if len(added) == 1 else added[0] + added[1]


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask `[..., T, S]` in additive form: minus infinity where a boolean mask is True (hidden)."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, float("-inf"))
