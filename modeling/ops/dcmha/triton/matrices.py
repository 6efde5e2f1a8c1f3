"""What mixes the heads on the tensor cores: a matrix for each query and stage, and the packed terms of keys.

Matrices are made before the other kernels run. Time and memory for that grow with the number of tokens, not of pairs.
"""

import torch
from torch import Tensor

from .arguments import Factors, MapInputs, Mixing
from .tiling import MOST_PROGRAMS
from .tuning import filled_up, tile_of_matrices
from .workspace import Workspace


def count_terms(terms: Tensor | None) -> int:
    """Returns the number of terms in `[B, length, terms, H]`, 0 for None."""
    return 0 if terms is None else terms.shape[2]


def padded_terms(work: Workspace, inputs: MapInputs) -> dict[str, Tensor | None]:
    """Returns packed terms `[B, length, terms, H]` with padding by the names of `Factors`; None without terms."""
    return {
        name: None if terms is None else work.with_padding(terms, of_keys="key" in name).contiguous()
        for name, terms in zip(Factors._fields, inputs.terms, strict=True)
    }


def make_mixing(work: Workspace, inputs: MapInputs, terms: dict[str, Tensor | None]) -> Mixing:
    """Returns what mixes the heads of all positions, made of `padded_terms`; those of keys are passed on."""
    pre, post = (
        _matrices_of_queries(work, terms[f"{stage}_query"], static)
        for stage, static in (("pre", inputs.pre_static), ("post", inputs.post_static))
    )
    return Mixing(pre, terms["pre_key"], post, terms["post_key"])


def key_counts(mixing: Mixing) -> tuple[int, int]:
    """Returns the numbers of keys' terms before and after the softmax."""
    return count_terms(mixing.pre_key), count_terms(mixing.post_key)


def _matrices_of_queries(work: Workspace, terms: Tensor | None, static: Tensor | None) -> Tensor | None:
    """Matrices `[B, T, padded, padded]` of one stage in the dtype of the scores, or None if they would be identities.

    They are made of terms `[B, T, terms, H]` and of `static` `[H, H]`.
    """
    if terms is None and static is None:
        return None
    static = None if static is None else static.contiguous()
    padded, (block, warps) = filled_up(work.heads), tile_of_matrices()
    matrices = torch.empty(work.batch, work.queries, padded, padded, dtype=work.score_dtype, device=work.device)
    for first in range(0, work.batch, MOST_PROGRAMS):
        items = slice(first, min(first + MOST_PROGRAMS, work.batch))
        work.kernels["dcmha_matrices"][work.queries // block, items.stop - first](
            matrices[items],
            None if terms is None else terms[items],
            static,
            work.queries,
            heads=work.heads,
            padded=padded,
            count=count_terms(terms),
            block=block,
            num_warps=warps,
        )
    return matrices
