"""A decoding step of `dcmha_triton` over a paged cache: kernels find rows through a table of pages, without copies."""

import torch
from torch import Tensor

from ...distance_tables import NO_TABLES, DistanceTables
from ..composition import Composition, list_tensors
from ..pages import Pages
from .attention import DTYPES
from .decode import DecodeMask, DecodePages, DecodeSide, DecodeStage, decode_stage, decode_tables, launch


def decode_pages(
    query: Tensor,
    pages: Pages,
    pre: Composition | None,
    post: Composition | None,
    scaling: float,
    terms: int,
    tables: DistanceTables = NO_TABLES,
) -> Tensor | None:
    """Attention for one query of each of `N` requests, without gradients.

    Args:
        query: `[N, H, 1, D]`.
        pages: the rows of keys and values, and which of them each query sees.
        pre, post: the composition of both stages, without the key-side factors, which are in the rows.
        terms: number of key-side terms of one stage in a row, each of `H` elements; 0 if rows hold none.
        tables: a bias and a gain `[L, H]`, by distance from the query, which is at its request's last key.

    Returns:
        `[N, 1, H, D]`; None for dtypes that the kernels do not support.

    Raises:
        ImportError: Triton is not installed.
        ValueError: Triton does not run on the device of `query`.
    """
    if query.dtype not in DTYPES:
        return None
    longest = int(pages.key_counts.max())
    if longest == 0:
        return query.new_zeros(query.transpose(1, 2).shape)
    pre_groups, post_groups = (1 if stage is None else stage.groups for stage in (pre, post))
    bounds = torch.stack([pages.table_starts, pages.key_counts], dim=1)
    bounds = bounds.to(query.device, non_blocking=True)  # else each layer would wait for the one before
    with torch.no_grad(), torch.cuda.device_of(query):
        return launch(
            query,
            pages.key.unsqueeze(2),
            pages.value.unsqueeze(2),
            (_stage_of_rows(pages.key, pre, terms), _stage_of_rows(pages.value, post, terms)),
            (pre_groups, post_groups),
            DecodeMask(None, (0, 0), None, (0, 0), None),
            DecodePages(pages.table, bounds),
            decode_tables(tables),
            (0, longest),
            scaling,
        )


def _stage_of_rows(rows: Tensor, stage: Composition | None, terms: int) -> DecodeStage:
    """A stage whose key-side factors are in rows `[rows, H_kv, width]`.

    Its key side consists of views that only carry what kernels need to find a term in a row: the address, the rank,
    whether there is a gate, and the stride between key heads.
    """
    made = decode_stage(list_tensors(stage))
    if stage is None or not terms:
        return made
    factors = rows[:, None, :1].expand(-1, -1, terms // 2, -1)
    low_rank = factors if terms > 1 else None
    return made._replace(key=DecodeSide(low_rank, low_rank, rows if terms % 2 else None, 0, 0, rows.stride(1)))
