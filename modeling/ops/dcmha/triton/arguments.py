"""What `dcmha_triton` and its kernels are called with. Kernels take these tuples as they are."""

from typing import NamedTuple

from torch import Tensor


class MapInputs(NamedTuple):
    """What the op is called with; rows are packed: `R` down, `R` up and, if they are odd, a gate.

    `B` counts items: each row of the batch is as many of them as there are head groups, with `H` heads of one group.
    """

    query: Tensor  # [B, H, T, D]
    key: Tensor  # [B, H_kv, S, D]
    value: Tensor  # [B, H_kv, S, D]
    pre_query: Tensor | None  # [B, T, terms, H]
    pre_key: Tensor | None  # [B, S, terms, H]
    post_query: Tensor | None
    post_key: Tensor | None
    pre_static: Tensor | None  # [heads, heads] of all groups
    post_static: Tensor | None
    mask: Tensor | None  # boolean or additive, four dimensions that broadcast to [rows of the batch, 1, T, S]
    first_keys: Tensor | None  # [rows of the batch, T], integers

    @property
    def terms(self) -> list[Tensor | None]:
        return [self.pre_query, self.pre_key, self.post_query, self.post_key]


class MapSettings(NamedTuple):
    """All else."""

    scaling: float
    is_causal: bool
    sliding_window: int | None
    groups: int


class Factors(NamedTuple):
    """Packed rows of one chunk: `R` down, `R` up and, if they are odd, a gate; None where a side has none.

    They lie in panels of a few positions each, float32.
    """

    pre_query: Tensor | None  # [items, H, panels of c of T, terms, PANEL]
    pre_key: Tensor | None  # [items, H, panels of n of S, terms, PANEL]
    post_query: Tensor | None
    post_key: Tensor | None


class Sizes(NamedTuple):
    """Lengths, all of them of whole patches."""

    queries: int  # c
    keys: int  # n
    all_queries: int
    all_keys: int


class Visibility(NamedTuple):
    """Which key a column is, and which keys are visible.

    Column `s` of row `t` is key `s + t // step * step` from `start` on (`dcmha_triton_cut`). Keys from `-ahead` to
    `behind` positions back are visible, if they are real and nothing else here hides them. A row of the batch is
    `groups` items.

    Triton compiles a kernel again for numbers that are 1 or multiples of 16. Those that depend on lengths are
    `unspecialized`.
    """

    position: int  # of the chunk's first query among the keys, unspecialized
    start: int  # the chunk's first key, unspecialized; below zero if padding comes before the real ones
    behind: int
    ahead: int
    step: int | None  # queries of each block of a band; None where a chunk is none
    real_queries: int  # from the chunk's first one on, unspecialized
    real_keys: int  # S, unspecialized
    first_real_key: int | None  # 0 where padding comes before it; None otherwise
    groups: int
    mask: Tensor | None  # [rows of the batch, c, S], 8 bits
    mask_of_row: int  # strides, one by one: Triton 3.6 may lose constants in nested tuples
    mask_of_query: int
    mask_of_key: int
    bias: Tensor | None  # [rows of the batch, c, S]
    bias_of_row: int
    bias_of_query: int
    bias_of_key: int
    first_keys: Tensor | None  # [rows of the batch, c of T]
    row_of_first_keys: int  # T


def unspecialized(number: int) -> int:
    """Returns a number that is neither 1 nor a multiple of 16; `dcmha_triton_tiles.original` is the way back."""
    return 4 * number + 2


class Matrices(NamedTuple):
    """What composes the heads, one matrix [out, in] for each position of one chunk; None where a side composes nothing.

    Heads are filled up with zeros to 16 or 32. The identity and a static matrix are in those of a stage's queries.
    """

    pre_query: Tensor | None  # [items, c of T, padded, padded]
    pre_key: Tensor | None  # [items, n of S, padded, padded]
    post_query: Tensor | None
    post_key: Tensor | None


class StageTerms(NamedTuple):
    """Packed rows of one stage of a chunk; None where a side has none."""

    query: Tensor | None  # [items, c of T, terms, H]
    key: Tensor | None  # [items, n of S, terms, H]


class TermGradients(NamedTuple):
    """What programs add to the gradients of one stage's rows and static matrix; None where nothing is."""

    query: Tensor | None  # [items, blocks of n, c, terms, H]
    key: Tensor | None  # [items, programs along c, n, terms, H], float32
    static: Tensor | None  # [patches, padded, padded], float32; zero before


class Statics(NamedTuple):
    """Maps `[items, H, c, n]` between the kernels and the products with static matrices; None without a matrix."""

    scores: Tensor | None = None  # mixed already
    grads: Tensor | None = None  # mixed already: gradients of the composed probabilities
    plain: Tensor | None = None  # to be mixed: probabilities, or gradients of the composed scores


class MapChunk(NamedTuple):
    """Some items of the batch, some of their queries, and the keys in their reach."""

    items: slice
    queries: slice
    keys: slice
    counts: tuple[int, int, int]  # of items, queries and keys
    sizes: Sizes
    where: Visibility
