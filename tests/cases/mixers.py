"""Published attentions that mix heads, in their authors' formulas: every map in memory, no code of the package.

All take queries `[B, H, T, D]`, aligned to the end of keys and values `[B, H, S, D]`, and return `[B, T, H, D]`.
"""

import torch
from torch import Tensor


def causal_softmax(logits: Tensor) -> Tensor:
    queries, keys = logits.shape[-2:]
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)
    return torch.softmax(logits.masked_fill(hidden, -torch.inf), dim=-1)


def talking_heads(query: Tensor, key: Tensor, value: Tensor, logits_proj: Tensor, weights_proj: Tensor) -> Tensor:
    """Section 3 of arXiv 2003.02436, in its own einsums."""
    logits = torch.einsum("bhnd,bhmd->bhnm", query, key) / query.shape[-1] ** 0.5
    logits = torch.einsum("bhnm,hg->bgnm", logits, logits_proj)
    weights = torch.einsum("bgnm,gf->bfnm", causal_softmax(logits), weights_proj)
    return torch.einsum("bfnm,bfmd->bnfd", weights, value)


def convolve_heads(maps: Tensor, kernels: Tensor) -> Tensor:
    """Section 3.2 of arXiv 2504.00927: each new head of a group is a weighted sum of the heads of that group."""
    size, mixed = kernels.shape[1], []
    for group, kernel in enumerate(kernels):
        heads = [maps[:, group * size + index] for index in range(size)]
        mixed += [sum(heads[i] * kernel[i, j] for i in range(size)) for j in range(size)]
    return torch.stack(mixed, dim=1)


def head_convolution(
    query: Tensor, key: Tensor, value: Tensor, before: Tensor | None = None, after: Tensor | None = None
) -> Tensor:
    maps = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    maps = causal_softmax(maps if before is None else convolve_heads(maps, before))
    maps = maps if after is None else convolve_heads(maps, after)
    return (maps @ value).transpose(1, 2)


def differential(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    """Equation 1 of arXiv 2410.05258; the pairs' maps and value halves are the first and the second half of the heads.

    The output of a pair, of double width, is given as that of two heads: first halves, then second halves.
    """
    first_query, second_query = query.chunk(2, dim=1)
    first_key, second_key = key.chunk(2, dim=1)
    wide = torch.cat(value.chunk(2, dim=1), dim=-1)  # [B, H/2, S, 2D]
    scale = query.shape[-1] ** -0.5
    first = causal_softmax(first_query @ first_key.transpose(-1, -2) * scale)
    second = causal_softmax(second_query @ second_key.transpose(-1, -2) * scale)
    output = (first - weight * second) @ wide  # [B, H/2, T, 2D]
    return torch.cat(output.chunk(2, dim=-1), dim=1).transpose(1, 2)


def modded_nanogpt(query: Tensor, key: Tensor, value: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """What the record's kernels compute: plain attention, and for each head a correction by one map of all heads."""
    probs = causal_softmax(query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5)
    shared = sum(w1[:, :, head, None] * probs[:, head] for head in range(probs.shape[1]))  # [B, T, S]
    corrections = [(w2[:, :, head, None] * shared) @ value[:, head] for head in range(probs.shape[1])]
    return (probs @ value).transpose(1, 2) + torch.stack(corrections, dim=2)
