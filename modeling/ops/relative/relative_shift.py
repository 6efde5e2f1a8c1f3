"""The relative shift of Transformer-XL (arXiv 1901.02860, appendix B): scores by distance as scores by key, uncopied.

Each row has the scores of a query by distance, from the farthest that any query of the chunk has to the nearest. The
score of query `t` and key `j` (both counted in the chunk, which has `c` queries) is in row `t` and column
`c - 1 - t + j`. So scores by key are a view of the same memory, whose row stride is shorter by one. For three queries
and four keys, of which the last is that of the last query, memory has the scores of these distances, and the view takes
these:

    memory             3 2 1 0 | 3 2 1 0 | 3 2 1 0
    view of query 0        1 0   3 2
    view of query 1                2 1 0   3
    view of query 2                        3 2 1 0

What the view of a query has of the next one belongs to later keys, which causality hides.
"""

from torch import Tensor


def shifted(by_distance: Tensor, queries: int, keys: int) -> Tensor:
    """The view `[.., c, keys]`, of the first keys, of new memory that holds `[.., x]` for `c` queries, one by one."""
    columns = by_distance.shape[-1]
    size = (by_distance.numel() // (queries * columns), queries, keys)
    return by_distance.as_strided(size, (queries * columns, columns - 1, 1), storage_offset=queries - 1)


def unshifted(scores: Tensor, columns: int, *, is_causal: bool) -> Tensor:
    """Undoes the shift of scores `[H, B, c, n]`: by distance, `[H, B, c, x]`, `x` columns, with zeros elsewhere."""
    queries, keys = scores.shape[-2:]
    by_distance = scores.new_zeros(*scores.shape[:-1], columns)
    flat, source = by_distance.flatten(0, 1), scores.flatten(0, 1)
    # Under causality the last key of a query shares its element with the first key of the next query, as the 2 of
    # queries 0 and 1 in the drawing. Only the last query sees the last key. So the view leaves it out, and that one
    # score is copied by itself.
    copied = keys - 1 if is_causal else keys
    shifted(by_distance, queries, copied).copy_(source[..., :copied])
    flat[:, -1, keys - 1] = source[:, -1, -1]
    return by_distance
