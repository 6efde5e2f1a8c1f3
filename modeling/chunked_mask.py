"""The masks that Transformers makes for `attn_implementation="chunked"`: one function for all models."""

from typing import Any

from torch import Tensor
from transformers.masking_utils import sdpa_mask
from transformers.utils.import_utils import is_tracing


def chunked_mask(
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
    """Says what a query may see with as little as possible, for models with composed heads; else as SDPA wants it.

    Returns:
        Where the causal and the window structure, aligned to the last key, are all there is: None, or the visible keys
        `[B, S]` where some are padding. Everything else (packed documents, static caches) is a complete boolean mask
        `[B, 1, T, S]`, which replaces the structure.
    """
    end = kv_offset + kv_length
    kwargs |= {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset}
    kwargs |= {"attention_mask": attention_mask, "allow_is_causal_skip": allow_is_causal_skip}
    if not hasattr(config, "composes"):
        return sdpa_mask(**kwargs)
    aligned = isinstance(q_offset, int) and q_offset + q_length == end
    covered = attention_mask is None or attention_mask.shape[1] >= end
    if not (allow_is_causal_skip and aligned and covered):
        return sdpa_mask(**{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    if attention_mask is None:
        return None
    visible = attention_mask[:, kv_offset:end]
    return visible if is_tracing(visible) or not bool(visible.all()) else None
