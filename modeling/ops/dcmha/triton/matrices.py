"""The matrices that mix the heads on the tensor cores: one for each query and one for each key of a stage.

They are made before the other kernels run. Time and memory for that grow with the number of tokens, not of pairs.
"""

import torch
from torch import Tensor

from .arguments import Factors, MapInputs, Matrices
from .tiling import MOST_PROGRAMS
from .tuning import tile_of_matrices
from .workspace import Workspace


def filled_up(heads: int) -> int:
    """Returns the number of heads that a program holds: 16 or 32."""
    return 16 if heads <= 16 else 32


def count_terms(terms: Tensor | None) -> int:
    """Returns the number of terms in `[B, length, terms, H]`, 0 for None."""
    return 0 if terms is None else terms.shape[2]


def padded_terms(work: Workspace, inputs: MapInputs) -> dict[str, Tensor | None]:
    """Returns packed terms `[B, length, terms, H]` with padding by the names of `Factors`; None without terms."""
    return {
        name: None if terms is None else work.with_padding(terms, of_keys="key" in name).contiguous()
        for name, terms in zip(Factors._fields, inputs.terms, strict=True)
    }


def make_matrices(work: Workspace, inputs: MapInputs, terms: dict[str, Tensor | None]) -> Matrices:
    """Returns the matrices of all positions, `[B, length, padded, padded]`, made of `padded_terms`."""
    pre = _of_stage(work, terms["pre_query"], terms["pre_key"], inputs.pre_static)
    return Matrices(*pre, *_of_stage(work, terms["post_query"], terms["post_key"], inputs.post_static))


def _of_stage(
    work: Workspace, query: Tensor | None, key: Tensor | None, static: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """A stage's matrices of all queries and of all keys, `[B, length, padded, padded]` or None.

    They are made of terms `[B, length, terms, H]` and of `static` `[H, H]`. The identity and the static matrix are part
    of the queries' matrices; if only keys have terms and there is no static matrix, the identity is part of the keys'.
    """
    of_queries = of_keys = None
    if query is None and key is None and static is None:
        return None, None
    constant = torch.eye(work.heads, dtype=torch.float32, device=work.device)
    if static is not None:
        constant += static.t()
    if query is not None or static is not None:
        of_queries = _of_side(work, query, constant, work.queries)
    if key is not None:
        of_keys = _of_side(work, key, constant if of_queries is None else None, work.keys)
    return of_queries, of_keys


def _of_side(work: Workspace, terms: Tensor | None, constant: Tensor | None, length: int) -> Tensor:
    """Matrices `[B, length, padded, padded]` in the dtype of the scores.

    They are made of terms `[B, length, terms, H]` and of a matrix `[H, H]` that all positions share.
    """
    padded, (block, warps) = filled_up(work.heads), tile_of_matrices()
    matrices = torch.empty(work.batch, length, padded, padded, dtype=work.score_dtype, device=work.device)
    for first in range(0, work.batch, MOST_PROGRAMS):
        items = slice(first, min(first + MOST_PROGRAMS, work.batch))
        work.kernels["dcmha_matrices"][length // block, items.stop - first](
            matrices[items],
            None if terms is None else terms[items],
            constant,
            length,
            heads=work.heads,
            padded=padded,
            count=count_terms(terms),
            block=block,
            num_warps=warps,
        )
    return matrices
