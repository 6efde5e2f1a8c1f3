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

from torch import Tensor

from ..sdpa import plain_attention
from .chunked.attention import dcmha_chunked
from .composition import Composition
from .eager import dcmha_eager
from .triton.attention import dcmha_triton
from .validation import check_composed_call

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
        pre, post: the composition of the scores and of the probabilities; `None` leaves the heads independent. Factors
            are in the dtype of `query` or in float32.
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
        ValueError: shapes, dtypes or numbers do not fit, or the implementation is unknown or cannot compose heads.
    """
    check_composed_call(
        query,
        key,
        value,
        pre=pre,
        post=post,
        scaling=scaling,
        attention_mask=attention_mask,
        sliding_window=sliding_window,
        first_keys=first_keys,
    )
    name = resolve_implementation(implementation, composed=pre is not None or post is not None)
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
