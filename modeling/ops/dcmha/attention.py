"""The entry point of dynamically composable multi-head attention (DCMHA, arXiv 2405.08553).

    scores = Q K^T * scaling            [B, H, T, S]
    scores = compose(scores, pre)       mixes the heads of every (query, key) pair on its own
    probs  = softmax(scores over the visible keys)
    probs  = compose(probs, post)
    output = probs V                    [B, T, H, D]

Dimension letters, here and in the whole package: `B` batch, `T` queries, `S` keys, `H` heads, `D` head width, `R` rank,
`E` hidden size, `K` hidden width of the composition generator, `G` head groups, `P` stages (pre, post).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..sdpa import plain_attention
from .chunked.attention import dcmha_chunked
from .composition import SIDES, Composition
from .eager import dcmha_eager
from .triton.attention import dcmha_triton

Attention = Callable[..., tuple[Tensor, Tensor | None]]

COMPOSING: dict[str, Attention] = {"eager": dcmha_eager, "chunked": dcmha_chunked, "triton": dcmha_triton}
IMPLEMENTATIONS: dict[str, Attention] = {**COMPOSING, "sdpa": plain_attention}


def dcmha_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pre: Composition | None = None,
    post: Composition | None = None,
    scaling: float | None = None,
    attention_mask: Tensor | None = None,
    is_causal: bool = True,
    sliding_window: int | None = None,
    first_keys: Tensor | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Multi-head attention whose heads are composed before and after the softmax.

    Queries are aligned to the end of the keys. Keys and values with fewer heads are repeated (grouped-query attention);
    composition is over the query's heads. A row with no visible key gives zeros.

    Args:
        query: `[B, H, T, D]`, floating point.
        key, value: `[B, H_kv, S, D]` with `H` a multiple of `H_kv`, same dtype as `query`.
        pre, post: the composition of the scores and of the probabilities; `None` leaves the heads independent.
        scaling: factor on the scores, default `D ** -0.5`.
        attention_mask: broadcastable to `[B, H, T, S]`; boolean (True = visible) or additive. It is combined with the
            causal and the window mask.
        is_causal: a query sees no later key.
        sliding_window: a query sees this many keys, itself included.
        first_keys: `[B, T]`, integers: the first key that each query sees. With causality it keeps documents apart that
            are packed into one row. `chunked` and `triton` build no mask of all pairs for it and, if it is on the CPU,
            skip the keys that it hides.
        implementation: one of `IMPLEMENTATIONS`; `None` takes the fastest one that supports the call.

    Returns:
        `[B, T, H, D]`.

    Raises:
        ValueError: shapes do not fit, or the implementation is unknown or cannot compose heads.
    """
    _check_shapes(query, key, value, pre, post, sliding_window)
    name = resolve_implementation(implementation, composed=pre is not None or post is not None)
    if first_keys is not None:
        _check_first_keys(first_keys, query)
    output, _ = IMPLEMENTATIONS[name](
        query,
        key,
        value,
        pre=pre,
        post=post,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        attention_mask=attention_mask,
        is_causal=is_causal,
        sliding_window=sliding_window,
        first_keys=first_keys,
    )
    return output


def resolve_implementation(name: str | None, *, composed: bool) -> str:
    """Returns the implementation that serves a call: `name` or, for `None`, the fastest one that supports it.

    Without composition the op is plain attention and goes to PyTorch's SDPA, so that a baseline is never handicapped.

    Raises:
        ValueError: the name is unknown, or it cannot compose heads.
    """
    if name is None:
        return "chunked" if composed else "sdpa"
    if composed and name not in COMPOSING:
        usable = " or ".join(map(repr, COMPOSING))
        raise ValueError(f"attn_implementation={name!r} cannot compose heads; use {usable}, or switch composition off")
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"attn_implementation={name!r} does not exist; choose from {sorted(IMPLEMENTATIONS)}")
    return name


def _check_shapes(
    query: Tensor, key: Tensor, value: Tensor, pre: Composition | None, post: Composition | None, window: int | None
) -> None:
    """Raises ValueError unless query is `[B, H, T, D]`, key and value `[B, H_kv, S, D]`, and the rest fits them."""
    if query.ndim != 4 or key.shape != value.shape or key.ndim != 4:
        raise ValueError(
            "query must be [B, H, T, D] and key and value [B, H_kv, S, D], not "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    batch, heads, queries, width = query.shape
    if key.shape[0] != batch or key.shape[3] != width or heads % key.shape[1]:
        raise ValueError(f"key {tuple(key.shape)} does not fit query {tuple(query.shape)} in batch, heads or width")
    if window is not None and window < 1:
        raise ValueError(f"sliding_window must be at least 1 (the query itself), not {window}")
    for stage, composition in (("pre", pre), ("post", post)):
        if composition is not None:
            _check_composition(stage, composition, batch, queries, key.shape[2], heads)


def _check_first_keys(first_keys: Tensor, query: Tensor) -> None:
    """Raises ValueError unless `first_keys` are integers `[B, T]`."""
    expected = (query.shape[0], query.shape[2])
    if first_keys.shape != expected or first_keys.is_floating_point() or first_keys.dtype == torch.bool:
        raise ValueError(f"first_keys must be integers {expected}, not {first_keys.dtype} {tuple(first_keys.shape)}")


def _check_composition(stage: str, composition: Composition, batch: int, queries: int, keys: int, heads: int) -> None:
    for side in SIDES:
        down, up, _ = composition.side(side)
        if (down is None) != (up is None):
            raise ValueError(f"{stage}: {side}_down and {side}_up come together or not at all")
    for name, factor in composition.tensors().items():
        length = queries if name.startswith("query") else keys
        leading = (heads,) if name == "static" else (batch, length)
        if factor.shape[: len(leading)] != leading or factor.shape[-1] != heads:
            raise ValueError(
                f"{stage}.{name} has shape {tuple(factor.shape)}; expected {leading} first and {heads} heads last"
            )
