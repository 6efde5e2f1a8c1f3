"""How the ops meet Transformers: attention functions, their masks, and which implementation serves a call."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.utils import logging
from transformers.utils.import_utils import is_tracing

from ..ops.dcmha.composition import Composition

logger = logging.get_logger(__name__)


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


for _name in ("chunked", "triton"):
    AttentionMaskInterface.register(_name, chunked_mask)


def attention_function(attend: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    """Puts an op behind Transformers' attention interface."""

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        sliding_window: int | None = None,
        pre: Composition | None = None,
        post: Composition | None = None,
        first_keys: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        seen = what_is_seen(attention_mask, sliding_window)
        return attend(query, key, value, pre=pre, post=post, scaling=scaling, first_keys=first_keys, **seen)

    return forward


def what_is_seen(attention_mask: Tensor | None, sliding_window: int | None) -> dict[str, Any]:
    """The ops' arguments for a mask from Transformers: one of four dimensions is complete, one of two is padding."""
    if attention_mask is not None and attention_mask.ndim == 4:
        return {"attention_mask": attention_mask, "is_causal": False, "sliding_window": None}
    visible = None if attention_mask is None else attention_mask[:, None, None, :]
    return {"attention_mask": visible, "is_causal": True, "sliding_window": sliding_window}


def implementation_for(config: Any, options: dict[str, Any]) -> str:
    """The attention implementation of a call: the configuration's, or `eager` where attention maps are asked for."""
    if not options.get("output_attentions") or config._attn_implementation == "eager":
        return config._attn_implementation
    logger.warning_once(
        f"attn_implementation={config._attn_implementation!r} has no attention maps; 'eager' makes them"
    )
    return "eager"
