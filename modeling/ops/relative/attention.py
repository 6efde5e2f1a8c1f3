"""The entry point of relative attention (RCMHA, arXiv 2308.03429).

It is the attention of Transformer-XL (arXiv 1901.02860) with learned tables instead of sinusoids:

    score[t, s] = ((q_t + u) . k_s + q_t . r[d] + b[d]) * scaling,   d = distance from key s to query t
    output      = softmax(score over the visible keys) V                             [B, T, H, D]

`r` and `b` are learned tables, position embeddings and a position bias with one row for each distance; `u` is a content
bias. Each of the three may be absent; without all three the op is plain multi-head attention. Dimension letters are
those of the package, and `L` is the length of the tables.
"""

from collections.abc import Callable

from torch import Tensor

from .chunked import relative_chunked
from .eager import relative_eager
from .sdpa import relative_sdpa

RELATIVE: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "eager": relative_eager,
    "sdpa": relative_sdpa,
    "chunked": relative_chunked,
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
    implementation: str | None = None,
) -> Tensor:
    """Causal multi-head attention whose scores depend on the distance between query and key.

    Args:
        query: `[B, H, T, D]`, floating point.
        key, value: `[B, H, S, D]`, same dtype as `query`.
        position_embeddings: `[L, H, D]`, row `d` for the key `d` tokens before the query.
        position_bias: `[L, H]`.
        content_bias: `[H, D]`, added to the queries for their products with keys, not for those with positions.
        scaling: factor on the whole score, position terms included; default `D ** -0.5`.
        attention_mask: broadcastable to `[B, H, T, S]`; boolean (True = visible) or additive. It is combined with the
            causal and the window mask.
        is_causal: a query sees no later key.
        sliding_window: a query sees this many keys, itself included.
        offset: position of the first query among the keys, default `S - T`. It differs in a preallocated cache, whose
            keys after the last query are hidden by `is_causal`.
        dropout: probability of dropping an attention probability.
        implementation: a name in `RELATIVE`; by default `chunked`, or `sdpa` without any of the three terms.

    Returns:
        `[B, T, H, D]`. A row with no visible key gives zeros.

    Raises:
        ValueError: shapes that do not fit, or tables that are shorter than the distances that queries reach.
    """
    check_relative_shapes(query, key, value, position_embeddings, position_bias, content_bias, sliding_window)
    relative = any(term is not None for term in (position_embeddings, position_bias, content_bias))
    attend = RELATIVE[resolve_relative(implementation, relative=relative)]
    output, _ = attend(
        query,
        key,
        value,
        position_embeddings=position_embeddings,
        position_bias=position_bias,
        content_bias=content_bias,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        attention_mask=attention_mask,
        is_causal=is_causal,
        sliding_window=sliding_window,
        offset=offset,
        dropout=dropout,
    )
    return output


def resolve_relative(name: str | None, *, relative: bool) -> str:
    """Returns the implementation to use: `name` if it exists; for `None` the fastest, with or without position terms.

    Raises:
        ValueError: the name is unknown.
    """
    if name is None:
        return "chunked" if relative else "sdpa"
    if name not in RELATIVE:
        raise ValueError(f"attn_implementation={name!r} does not exist for this family; choose from {sorted(RELATIVE)}")
    return name


def check_relative_shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position_embeddings: Tensor | None,
    position_bias: Tensor | None,
    content_bias: Tensor | None,
    sliding_window: int | None,
) -> None:
    """Raises ValueError if shapes do not fit `query` `[B, H, T, D]` as `relative_attention` says."""
    if query.ndim != 4 or key.shape != value.shape or key.ndim != 4:
        raise ValueError(
            "query must be [B, H, T, D] and key and value [B, H, S, D], not "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if key.shape[:2] != query.shape[:2] or key.shape[3] != query.shape[3]:
        raise ValueError(f"key {tuple(key.shape)} does not fit query {tuple(query.shape)} in batch, heads or width")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1 (the query itself), not {sliding_window}")
    heads, width = query.shape[1], query.shape[3]
    reach = key.shape[2] if sliding_window is None else min(key.shape[2], sliding_window)
    for name, table, row_shape in (
        ("position_embeddings", position_embeddings, (heads, width)),
        ("position_bias", position_bias, (heads,)),
    ):
        if table is None:
            continue
        if table.shape[1:] != row_shape:
            raise ValueError(f"{name} of shape {tuple(table.shape)} must be [L, {', '.join(map(str, row_shape))}]")
        if table.shape[0] < reach:
            raise ValueError(
                f"{name} has {table.shape[0]} rows, but queries reach over {reach} keys; use fewer keys, a sliding "
                "window or a longer table"
            )
    if content_bias is not None and content_bias.shape != (heads, width):
        raise ValueError(f"content_bias of shape {tuple(content_bias.shape)} must be [{heads}, {width}]")
