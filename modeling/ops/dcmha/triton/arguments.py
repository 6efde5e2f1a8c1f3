"""The arguments of the op for several queries, and of its kernels, which get these tuples as arguments.

An item is one head group of one row of the batch: the kernels see it as a batch entry of its own, with `H` heads. In
the shapes below `B` counts items, `c` the queries and `n` the keys of a chunk.
"""

from typing import NamedTuple

from torch import Tensor

# The number of positions of a panel: their factors are contiguous, so that a kernel loads them as vectors.
PANEL = 8


class MapInputs(NamedTuple):
    """All tensors of the op. Terms are packed: `R` down, `R` up and, exactly if their number is odd, a gate."""

    query: Tensor  # [B, H, T, D]
    key: Tensor  # [B, H_kv, S, D]
    value: Tensor  # [B, H_kv, S, D]
    pre_query: Tensor | None  # [B, T, terms, H]
    pre_key: Tensor | None  # [B, S, terms, H]
    post_query: Tensor | None  # [B, T, terms, H]
    post_key: Tensor | None  # [B, S, terms, H]
    pre_static: Tensor | None  # [heads, heads] of all groups, indexed [in, out]
    post_static: Tensor | None  # [heads, heads] of all groups, indexed [in, out]
    composed_bias: Tensor | None  # [L, heads] of all groups, added to the scores before the first composition
    position_bias: Tensor | None  # [L, heads] of all groups, added after it
    position_gain: Tensor | None  # [L, heads] of all groups, multiplies the probabilities
    mask: Tensor | None  # boolean or additive, four dimensions that broadcast to [rows of the batch, 1, T, S]
    first_keys: Tensor | None  # [rows of the batch, T], integers
    offset: Tensor | None  # [], integer: the position of the first query among the keys; None for S - T

    @property
    def terms(self) -> list[Tensor | None]:
        """The packed terms `[B, T or S, terms, H]` of queries and keys before the softmax, then those after it."""
        return [self.pre_query, self.pre_key, self.post_query, self.post_key]


# The fields of `MapInputs` that are tables by distance.
TABLES = ("composed_bias", "position_bias", "position_gain")


class MapSettings(NamedTuple):
    """All arguments of the op that are not tensors."""

    scaling: float
    is_causal: bool
    sliding_window: int | None
    groups: int  # items per row of the batch


class Factors(NamedTuple):
    """The packed terms of one chunk in float32, in panels of `PANEL` positions; None where a side has none."""

    pre_query: Tensor | None  # [items, H, panels of c of T, terms, PANEL]
    pre_key: Tensor | None  # [items, H, panels of n of S, terms, PANEL]
    post_query: Tensor | None  # [items, H, panels of c of T, terms, PANEL]
    post_key: Tensor | None  # [items, H, panels of n of S, terms, PANEL]


class Sizes(NamedTuple):
    """Lengths with padding, all of them multiples of a patch's side: those of the chunk, and those of the call."""

    queries: int  # c
    keys: int  # n
    all_queries: int
    all_keys: int


class Visibility(NamedTuple):
    """Which key each column of a chunk's maps is, and which keys are visible.

    Column `s` of row `t` is key `start + s + t // step * step`, or `start + s` without `step`. A real key is visible if
    it is at most `behind` positions before the query and at most `ahead` after it, and neither the mask nor
    `first_keys` hides it. The strides of masks are separate fields because Triton 3.6 may lose constants in nested
    tuples.
    """

    position: int  # of the chunk's first query among the keys, `unspecialized`
    start: int  # the chunk's first key, `unspecialized`; negative if padding comes before the real keys
    behind: int
    ahead: int
    step: int | None  # queries of each block of a window's chunk; None in other chunks
    real_queries: int  # the number of real queries from the chunk's first one on, `unspecialized`
    real_keys: int  # S, `unspecialized`
    first_real_key: int | None  # 0 where padding comes before it; None otherwise
    groups: int  # items per row of the batch
    mask: Tensor | None  # [rows of the batch, c, S], 8 bits
    mask_of_row: int
    mask_of_query: int
    mask_of_key: int
    bias: Tensor | None  # [rows of the batch, c, S]
    bias_of_row: int
    bias_of_query: int
    bias_of_key: int
    first_keys: Tensor | None  # [rows of the batch, c of T]
    row_of_first_keys: int  # T with padding, the stride between rows of the batch


def unspecialized(number: int) -> int:
    """Returns `4 * number + 2`, which is neither 1 nor a multiple of 16; `kernels.tiles.original` is the inverse.

    Triton compiles a variant of a kernel for integers that are 1, and another for multiples of 16. As sequences grow,
    their lengths would keep switching between these variants, and the first call of each would wait for a compiler.
    """
    return 4 * number + 2


class Mixing(NamedTuple):
    """How a chunk's heads are mixed: by a matrix [in, out] of each query, and by packed terms of each key.

    None where a side has no terms. Matrices are padded with zeros to `padded` heads, 16 or 32, and include the identity
    and the static matrix; a stage with a static matrix has matrices of queries in any case.
    """

    pre_query: Tensor | None  # [items, c of T, padded, padded]
    pre_key: Tensor | None  # [items, n of S, terms, H]
    post_query: Tensor | None  # [items, c of T, padded, padded]
    post_key: Tensor | None  # [items, n of S, terms, H]


class TermGradients(NamedTuple):
    """What each program adds to the gradients of a stage's terms and static matrix; None where there are none."""

    query: Tensor | None  # [items, blocks of n, c, terms, H]
    key: Tensor | None  # [items, slots, n of S, terms, H], float32: the kernel adds to it
    static: Tensor | None  # [items, programs along c, blocks of n, padded, padded], float32
    slots: int  # programs along c that may have the same keys, `unspecialized`


class Statics(NamedTuple):
    """Maps `[items, H, c, n]` before or after their product with a static matrix; None without a matrix."""

    scores: Tensor | None = None  # read: scores plus their product
    grads: Tensor | None = None  # read: gradients of the composed probabilities plus their product
    plain: Tensor | None = None  # written, to be multiplied later: probabilities, or gradients of the composed scores


class ColumnTables(NamedTuple):
    """Tables by distance for a chunk's kernels, in float32; all fields are None in a call without tables.

    The element of a pair is in column `first + s + shift - t` of its head's row: neighbouring keys are neighbours, and
    columns beyond the rows of a table repeat the nearest one, so that kernels need no bounds.
    """

    composed_bias: Tensor | None = None  # [heads of all groups, X]
    mixed_bias: Tensor | None = None  # `composed_bias` plus its product with a static matrix; None without one
    bias: Tensor | None = None  # [heads of all groups, X]
    gain: Tensor | None = None  # [heads of all groups, X]
    columns: int | None = None  # X, `unspecialized`
    first: int | None = None  # the column of the chunk's first query and key, `unspecialized`
    pairs: Tensor | None = None  # [items, H, c, n], written: the map that is summed by distance for a table's gradient


class MapChunk(NamedTuple):
    """Some items, some of their queries, and the keys in their reach."""

    items: slice
    queries: slice
    keys: slice
    sizes: Sizes
    where: Visibility

    @property
    def counts(self) -> tuple[int, int, int]:
        """The numbers of items, queries and columns: the shape of maps without heads."""
        return self.items.stop - self.items.start, self.sizes.queries, self.sizes.keys
