"""The masks that models get from Transformers, and as which arguments the ops get them."""

from typing import Any

from torch import Tensor
from transformers.masking_utils import sdpa_mask

from ..ops.readable import is_readable


def compact_mask(
    *,
    config: Any,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """The mask function of our implementations of attention, called by Transformers with the sizes of queries and keys.

    A model of a DCMHA family gets the smallest mask that suffices, because its ops apply causality and the sliding
    window by themselves, on the assumption that the last query is at the last key. Any other model gets SDPA's mask.

    Args:
        attention_mask: `[B, S]`, True for real tokens.
        allow_is_causal_skip: whether causality and window are all that hides keys besides padding. For a bidirectional
            mask it is False, and `allow_is_bidirectional_skip` says whether padding is all that hides keys.

    Returns:
        None if the ops hide all that has to be hidden; `[B, S]`, True for real tokens, if there is padding too; else
        (packed documents, static caches) a complete boolean mask `[B, 1, T, S]`, which includes causality and window.
    """
    kwargs |= {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset}
    kwargs |= {"attention_mask": attention_mask, "allow_is_causal_skip": allow_is_causal_skip}
    if not hasattr(config, "composes"):
        return _mask_for_sdpa(**kwargs)
    end = kv_offset + kv_length
    covered = attention_mask is None or attention_mask.shape[1] >= end
    if not (covered and _ops_hide_all_but_padding(**kwargs)):
        return sdpa_mask(**{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    if attention_mask is None:
        return None
    visible = attention_mask[:, kv_offset:end]
    return visible if not is_readable(visible) or not bool(visible.all()) else None


def _mask_for_sdpa(*, allow_is_causal_skip: bool, **kwargs: Any) -> Tensor | None:
    """The mask for a model whose attention is called as SDPA is, with the arguments of `compact_mask`."""
    # SDPA puts the first query at the first key, and so needs no mask for the first tokens in a static cache.
    allow_is_causal_skip = allow_is_causal_skip and kwargs["q_length"] in (1, kwargs["kv_length"])
    attention_mask = kwargs["attention_mask"]
    if attention_mask is not None and not is_readable(attention_mask):  # Transformers would look for padding in it
        allow_is_causal_skip = kwargs["allow_is_bidirectional_skip"] = False
    return sdpa_mask(allow_is_causal_skip=allow_is_causal_skip, **kwargs)


def _ops_hide_all_but_padding(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    allow_is_causal_skip: bool,
    allow_is_bidirectional_skip: bool = False,
    local_size: int | None = None,
    **kwargs: Any,
) -> bool:
    """Whether the ops need no mask but for padding, with the arguments of `compact_mask`.

    They need none in a bidirectional layer without a window. Otherwise they do causality and windows by themselves, if
    nothing else hides keys and the last query is at the last key.
    """
    if allow_is_bidirectional_skip and not allow_is_causal_skip and local_size is None:
        return True
    last_at_last = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    return last_at_last and (allow_is_causal_skip or allow_is_bidirectional_skip)


def mask_arguments(attention_mask: Tensor | None, sliding_window: int | None, is_causal: bool) -> dict[str, Any]:
    """The ops' arguments for a mask from `compact_mask`.

    A mask `[B, 1, T, S]` includes causality and window, which the op then must not apply again; a mask `[B, S]` or None
    leaves both to the op.
    """
    if attention_mask is not None and attention_mask.ndim == 4:
        return {"attention_mask": attention_mask, "is_causal": False, "sliding_window": None}
    visible = None if attention_mask is None else attention_mask[:, None, None, :]
    return {"attention_mask": visible, "is_causal": is_causal, "sliding_window": sliding_window}
