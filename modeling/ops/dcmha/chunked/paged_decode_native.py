"""A decoding step over a paged cache on a CPU, in one call of C code that reads the rows in place.

csrc/decode.c describes how a row holds factors.
"""

from torch import Tensor

from ...distance_tables import NO_TABLES, DistanceTables
from ..composition import Composition
from ..pages import Pages
from .arguments import DecodeStep
from .composers.choice import compile_mode
from .decode_native import call_decode, decodes_in_c, load_decode


def attend_to_pages(
    query: Tensor,
    pages: Pages,
    pre: Composition | None,
    post: Composition | None,
    scaling: float,
    terms: int,
    tables: DistanceTables = NO_TABLES,
) -> Tensor | None:
    """Attention for one query of each of `N` requests. Maps and sums are float32, whatever the dtype.

    Results do not depend on the number of threads.

    Args:
        query: `[N, H, 1, D]`.
        pages: the rows of keys and values, and which of them each query sees.
        pre, post: the composition of both stages, without the key-side factors, which are in the rows.
        terms: number of key-side terms of one stage in a row, each of `H` elements; 0 if rows hold none.
        tables: a bias and a gain `[L, H]`, by distance from the query, which is at its request's last key.

    Returns:
        `[N, 1, H, D]`; None where there is no C code for these arguments.
    """
    # Rows take the place of keys `[B, H_kv, S, D]`: what is asked of them does not depend on the order of dimensions.
    step = DecodeStep(query, pages.key, pages.value, pre, post, scaling, tables=tables)
    if compile_mode() == "0" or not decodes_in_c(step):
        return None
    library = load_decode(step, terms)
    if library is None:
        return None
    source = []
    for rows in (pages.key, pages.value):
        source += [rows.data_ptr(), 0, rows.stride(1), rows.stride(0)]
    # Six zeros stand for no mask. The last two are not read: requests differ in the number of keys and in the position
    # of the query, and `key_counts` tells both.
    source += [0] * 8 + [tensor.data_ptr() for tensor in pages[2:]]
    elements = int(pages.key_counts.sum()) * pages.key.shape[1] * query.shape[3]
    return call_decode(library, step, source, elements)
