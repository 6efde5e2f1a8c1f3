"""The entry point of dynamically composable multi-head attention (DCMHA, arXiv 2405.08553).

    scores = Q K^T * scaling            [B, H, T, S]
    scores = compose(scores, pre)       mixes the heads of every (query, key) pair on its own
    probs  = softmax(scores over the visible keys)
    probs  = compose(probs, post)
    output = probs V                    [B, T, H, D]

Dimension letters: `B` batch, `T` queries, `S` keys, `H` heads, `H_kv` heads of keys and values, `D` head width, `R`
rank, `L` rows of a table by distance. Those of all ops are listed in `modeling/ops/README.md`.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor

from ..distance_tables import DistanceTables
from ..sdpa import plain_attention
from .chunked.attention import dcmha_chunked
from .composition import Composition
from .eager import AttentionMaps, dcmha_eager
from .triton.attention import dcmha_triton, why_unsupported
from .validation import check_composed_call

Attention = Callable[..., tuple[Tensor, Tensor | None]]

COMPOSING_IMPLEMENTATIONS: dict[str, Attention] = {
    "eager": dcmha_eager,
    "chunked": dcmha_chunked,
    "triton": dcmha_triton,
}
IMPLEMENTATIONS: dict[str, Attention] = {**COMPOSING_IMPLEMENTATIONS, "sdpa": plain_attention}
# Compute capabilities of CUDA devices on which `triton` is the default: those of which a record in
# `model_cards/records/benchmark-gpu` shows that it is faster than `chunked`. (9, 0) is Hopper.
TRITON_CAPABILITIES: frozenset[tuple[int, int]] = frozenset({(9, 0)})
HAS_TRITON = find_spec("triton") is not None


class AttentionOptions(TypedDict, total=False):
    """The keywords of `dcmha_attention` that do not change the type of its result, for type checkers."""

    pre: Composition | None
    post: Composition | None
    scaling: float | None
    attention_mask: Tensor | None
    is_causal: bool
    sliding_window: int | None
    first_keys: Tensor | None
    position_bias: Tensor | None
    position_gain: Tensor | None
    offset: int | Tensor | None
    compose_position_bias: bool
    implementation: str | None


@overload
def dcmha_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_maps: None = None, **options: Unpack[AttentionOptions]
) -> Tensor: ...
@overload
def dcmha_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_maps: Sequence[str], **options: Unpack[AttentionOptions]
) -> tuple[Tensor, AttentionMaps]: ...
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
    position_bias: Tensor | None = None,
    position_gain: Tensor | None = None,
    offset: int | Tensor | None = None,
    compose_position_bias: bool = False,
    implementation: str | None = None,
    return_maps: Sequence[str] | None = None,
) -> Tensor | tuple[Tensor, AttentionMaps]:
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
        sliding_window: a query sees only keys that are fewer places away than this; with causality this many, itself
            included.
        first_keys: `[B, T]`, integers: the first key that each query sees. Together with causality it keeps documents
            apart that are packed into one row. `chunked` and `triton` build no `[T, S]` mask for it; if it is on the
            CPU, they skip the keys that it hides.
        position_bias: `[L, H]`, added to the scores: row `d` for the key `d` places before the query. In the dtype of
            `query` or in float32, which tells the distances of long sequences apart where half precision does not.
            There must be a row for each distance from a query to a key that it may see; a later key, which a mask may
            leave visible without causality, reads row 0.
        position_gain: `[L, H]`, multiplies the probabilities before `post` mixes them; row `d` as in `position_bias`.
            Probabilities of a query then need not sum to one.
        offset: position of the first query among the keys, an integer or `[]`, default `S - T`. Another one is needed
            for a preallocated cache, in which `is_causal` or the mask hides the keys after the last query.
        compose_position_bias: add `position_bias` before `pre` mixes the scores, instead of after.
        implementation: `eager`, `chunked`, `triton`, `sdpa`, or one of `register_implementation`. `None` takes `sdpa`
            for calls without composition and tables. For others it takes `triton` on GPUs on which a record shows that
            `triton` is faster, and `chunked` elsewhere.
        return_maps: names of fields of `AttentionMaps`, to return these maps too. It needs `eager`, which has all maps
            in memory.

    Returns:
        `[B, T, H, D]`, and with `return_maps` these maps. Composed probabilities can be negative and need not sum to
        one.

    Raises:
        ValueError: shapes, dtypes or values do not fit, or the implementation is unknown or cannot do what is asked.

    PyTorch's FlexAttention cannot express this: its `score_mod` changes the score of one head without knowing the
    others, and nothing can change probabilities before they multiply the values. Composition is a function of all heads
    of one query and one key, once before and once after the softmax, as `post_mod` is here:

    ```python
    >>> query, key, value = torch.randn(3, 1, 4, 6, 8).unbind()  # [B, H, T, D]
    >>> post = dynattn.Composition(query_down=torch.randn(1, 6, 2, 4), query_up=torch.randn(1, 6, 2, 4))
    >>> output, maps = dynattn.dcmha_attention(query, key, value, post=post, return_maps=("probs",))
    >>> def post_mod(probs, b, q_idx, kv_idx):  # [H] to [H]
    ...     return probs + post.query_down[b, q_idx] @ probs @ post.query_up[b, q_idx]
    >>> mixed = torch.zeros_like(maps.probs)
    >>> for b, q_idx, kv_idx in itertools.product(range(1), range(6), range(6)):
    ...     mixed[b, :, q_idx, kv_idx] = post_mod(maps.probs[b, :, q_idx, kv_idx], b, q_idx, kv_idx)
    >>> torch.testing.assert_close((mixed @ value).transpose(1, 2), output)

    ```
    """
    tables = DistanceTables(position_bias, position_gain, offset, compose_position_bias)
    options: dict[str, Any] = {
        "pre": pre,
        "post": post,
        "scaling": scaling,
        "attention_mask": attention_mask,
        "sliding_window": sliding_window,
        "first_keys": first_keys,
        "tables": tables,
    }
    check_composed_call(query, key, value, **options)
    options |= {"scaling": query.shape[-1] ** -0.5 if scaling is None else scaling, "is_causal": is_causal}
    if return_maps is not None:
        check_maps(return_maps, implementation)
        maps: dict[str, Tensor] = {}
        output, _ = dcmha_eager(query, key, value, **options, hook=maps.setdefault)
        return output, AttentionMaps(**{name: maps[name] for name in return_maps})
    composed = pre is not None or post is not None
    name = choose_implementation(implementation, query, attention_mask, tables, composed=composed)
    output, _ = IMPLEMENTATIONS[name](query, key, value, **options)
    return output


def choose_implementation(
    name: str | None, query: Tensor, attention_mask: Tensor | None, tables: DistanceTables, *, composed: bool
) -> str:
    """`name`, or for None the default implementation that supports the tables, the dtype and the mask of this call."""
    if name is not None:
        return resolve_implementation(name, composed=composed, device=query.device)
    # Tables count as composition: for SDPA they would have to become a mask with an element for every pair.
    chosen = resolve_implementation(None, composed=composed or tables.has_any, device=query.device)
    if chosen == "triton" and why_unsupported(query, attention_mask) is not None:
        return "chunked"
    return chosen


def check_maps(names: Sequence[str], implementation: str | None) -> None:
    """Raises ValueError unless `names` are fields of `AttentionMaps`, and `implementation` is `eager` or not given."""
    if isinstance(names, str) or (unknown := sorted(set(names) - set(AttentionMaps._fields))):
        wrong = names if isinstance(names, str) else unknown
        raise ValueError(f"return_maps has {wrong!r}; it must be a tuple with some of {AttentionMaps._fields}")
    if implementation not in (None, "eager"):
        raise ValueError(f"implementation={implementation!r} keeps no maps to return; use 'eager', or None")


class DefaultImplementation(NamedTuple):
    """The implementation that composes heads where none is asked for."""

    name: str
    reason: str


def default_implementation(device: torch.device) -> DefaultImplementation:
    """Returns the implementation that composes heads on a device by default, and the reason for it."""
    if device.type != "cuda":
        return DefaultImplementation("chunked", f"'triton' needs a CUDA device, not {device.type!r}")
    if not HAS_TRITON:
        return DefaultImplementation("chunked", "'triton' needs Triton: pip install 'dynattn[gpu]'")
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) not in TRITON_CAPABILITIES:
        unmeasured = f"no record shows that 'triton' is faster on compute capability {major}.{minor}"
        return DefaultImplementation("chunked", f"{unmeasured}; attn_implementation='triton' chooses it")
    return DefaultImplementation("triton", f"the fastest on record on compute capability {major}.{minor}")


def resolve_implementation(name: str | None, *, composed: bool, device: torch.device | None = None) -> str:
    """Returns `name` after checking it or, for None, the default of a device, whatever else the call has.

    Without composition the op is plain attention, and the default is PyTorch's SDPA, as in other models.

    Args:
        name: one of `IMPLEMENTATIONS`, or None.
        composed: whether the call composes heads.
        device: where the call runs; None if that is not known yet, as when a model is made.

    Raises:
        ValueError: the name is unknown, or it cannot compose heads.
    """
    if name is None:
        if not composed:
            return "sdpa"
        return "chunked" if device is None else default_implementation(device).name
    if composed and name not in COMPOSING_IMPLEMENTATIONS:
        usable = " or ".join(map(repr, COMPOSING_IMPLEMENTATIONS))
        raise ValueError(f"implementation {name!r} cannot compose heads; use {usable}, or switch composition off")
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {name!r} does not exist; choose from {sorted(IMPLEMENTATIONS)}")
    return name
