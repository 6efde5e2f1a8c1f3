"""Published attentions that mix heads, as compositions for `dcmha_attention`.

`docs/guides/mixers.md` has the formulas of all of them. Matrices are indexed [in, out], as `Composition.static` is.
Here a matrix is the whole mixing; `static` is what the mixing adds to the identity.
"""

import torch
from torch import Tensor

from ..autocast import without_autocast
from .composition import Composition


def talking_heads(mixing: Tensor) -> Composition:
    """One stage of talking heads (arXiv 2003.02436): map `m` becomes `sum_n A[n] mixing[n, m]`.

    The paper has one matrix for the scores (`pre`) and one for the probabilities (`post`).

    Args:
        mixing: `[H, H]`.
    """
    return Composition(static=_without_identity(mixing))


def head_convolution(kernels: Tensor) -> Composition:
    """One stage of the head convolution of multi-token attention (arXiv 2504.00927, section 3.2).

    The heads of a group are mixed by the group's own matrix.

    Args:
        kernels: `[G, H/G, H/G]`, one for each of `G` consecutive groups.
    """
    return Composition(static=_without_identity(torch.block_diag(*kernels)), groups=len(kernels))


def differential_heads(weight: Tensor, num_heads: int) -> Composition:
    """The `post` stage of differential attention (arXiv 2410.05258, equation 1), for pairs `(i, i + H/2)` of heads.

    Both maps of a pair become `A[i] - weight A[i + H/2]`. The value of a pair has width `2D`: `value` holds its first
    `D` channels in head `i` and the others in head `i + H/2`. Likewise the outputs of both heads, side by side, are the
    output of the pair.

    Args:
        weight: a scalar, the paper's lambda.
        num_heads: `H`, even; two for each pair.
    """
    return Composition(static=difference_of_pairs(weight, num_heads))


def difference_of_pairs(weight: Tensor, num_heads: int) -> Tensor:
    """Returns the static matrix `[H, H]` of `differential_heads`, with the same arguments."""
    same = torch.eye(num_heads // 2, dtype=weight.dtype, device=weight.device)
    with without_autocast(weight.device):  # under autocast `cat` raises for the other half precision
        first = torch.cat([torch.zeros_like(same), same], dim=1)
        second = torch.cat([-weight * same, (-1 - weight) * same], dim=1)
        return torch.cat([first, second])


def one_term_of_the_query(down: Tensor, up: Tensor) -> Composition:
    """The `post` stage of the modded-nanogpt record: map `m` becomes `A[m] + up[m] sum_n down[n] A[n]`.

    Args:
        down, up: `[B, T, H]`, generated from the query's token; the record divides `down` by its root mean square.
    """
    return Composition(query_down=down.unsqueeze(2), query_up=up.unsqueeze(2))


def _without_identity(mixing: Tensor) -> Tensor:
    """The static matrix `[H, H]` of a whole mixing: what it adds to the identity."""
    return mixing - torch.eye(len(mixing), dtype=mixing.dtype, device=mixing.device)
