"""The entry point of relative attention (RCMHA, arXiv 2308.03429).

It is the attention of Transformer-XL (arXiv 1901.02860) with learned tables instead of sinusoids:

    score[t, s] = ((q_t + u) . k_s + q_t . r[d] + b[d]) * scaling,   d = distance from key s to query t
    output      = softmax(score over the visible keys) V                             [B, T, H, D]

`r` and `b` are learned tables, position embeddings and a position bias, with one row for each distance. Distances are
negative for later keys, which attention without causality sees too. `u` is a content bias. Each of the three may be
absent; without all three the op is plain multi-head attention. Dimension letters are those of
`modeling/ops/README.md`; `L` is the length of the tables.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .chunked import relative_chunked
from .eager import PositionTerms, relative_eager
from .sdpa import relative_sdpa
from .validation import check_relative_call

Attention = Callable[..., tuple[Tensor, Tensor | None]]


def _checked(attend: Attention) -> Attention:
    """Returns `attend` with its arguments checked; it returns `[B, T, H, D]` and maps `[B, H, T, S]` or None."""

    @functools.wraps(attend)
    def checked(
        query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, **arguments: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Shapes and the default of `scaling` as in `relative_attention`."""
        check_relative_call(query, key, value, scaling=scaling, **arguments)
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend(query, key, value, scaling=scaling, **arguments)

    return checked


# Layers call these directly and not through `relative_attention`, so their arguments are checked here.
RELATIVE_IMPLEMENTATIONS: dict[str, Attention] = {
    "eager": _checked(relative_eager),
    "sdpa": _checked(relative_sdpa),
    "chunked": _checked(relative_chunked),
}


def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    position_embeddings: Tensor | None = None,
    position_bias: Tensor | None = None,
    content_bias: Tensor | None = None,
    scaling: float | None = None,
    attention_mask: Tensor | None = None,
    is_causal: bool = True,
    sliding_window: int | None = None,
    offset: int | Tensor | None = None,
    dropout: float = 0.0,
    later_rows: int = 0,
    implementation: str | None = None,
) -> Tensor:
    """Multi-head attention, causal by default, whose scores depend on the distance between query and key.

    Args:
        query: `[B, H, T, D]`, floating point.
        key, value: `[B, H, S, D]`, same dtype as `query`.
        position_embeddings: `[L, H, D]`, row `d + later_rows` for the key `d` tokens before the query; dtype of
            `query`.
        position_bias: `[L, H]`, dtype of `query` or float32, which keeps distances apart that half precision would not.
        content_bias: `[H, D]`, added to the queries for their products with keys, not for those with positions.
        scaling: factor on the whole score, position terms included; default `D ** -0.5`.
        attention_mask: broadcastable to `[B, H, T, S]`; boolean (True = visible) or additive. It is combined with the
            causal and the window mask.
        is_causal: a query sees no later key.
        sliding_window: a query sees only keys that are fewer places away than this; with causality this many, itself
            included.
        offset: position of the first query among the keys, default `S - T`. Another one is needed for a preallocated
            cache, in which `is_causal` hides the keys after the last query. The checks do not read one in a
            tensor, and then want tables with a row for each of the `S` keys, or for those of the window.
        dropout: probability of dropping an attention probability, from 0 to 1.
        later_rows: how many rows of the tables, from the first on, belong to later keys. Without causality tables need
            them.
        implementation: `eager`, `sdpa` or `chunked`; by default `chunked`, or `sdpa` without any of the three terms.

    Returns:
        `[B, T, H, D]`. A row with no visible key gives zeros.

    Raises:
        ValueError: shapes, dtypes or values do not fit, tables lack rows for distances that queries reach, or the
            implementation is unknown.
    """
    terms = PositionTerms(position_embeddings, position_bias, content_bias, offset, later_rows)
    options: dict[str, Any] = {
        "scaling": scaling,
        "is_causal": is_causal,
        "sliding_window": sliding_window,
        "dropout": dropout,
        "terms": terms,
    }
    if attention_mask is not None:
        # Implementations check the lengths of tables only without a mask, because a layer's mask may hide the keys
        # beyond its tables. Here they are checked always.
        check_relative_call(query, key, value, **options, attention_mask=None)
    relative = bool(terms.tables) or content_bias is not None
    attend = RELATIVE_IMPLEMENTATIONS[resolve_relative(implementation, relative=relative)]
    output, _ = attend(query, key, value, **options, attention_mask=attention_mask)
    return output


def resolve_relative(name: str | None, *, relative: bool) -> str:
    """Returns the name of the implementation to use: `name` or, for None, the fastest one.

    Args:
        name: one of `RELATIVE_IMPLEMENTATIONS`, or None.
        relative: whether the call has any of the three position terms.

    Raises:
        ValueError: the name is unknown.
    """
    if name is None:
        return "chunked" if relative else "sdpa"
    if name not in RELATIVE_IMPLEMENTATIONS:
        known = sorted(RELATIVE_IMPLEMENTATIONS)
        raise ValueError(f"implementation {name!r} does not exist for relative attention; choose from {known}")
    return name
