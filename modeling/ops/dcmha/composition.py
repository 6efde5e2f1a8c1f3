"""What composes heads: the factors of one stage, and how they are packed for the kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Composition:
    """What mixes the heads of one stage; a field that is `None` is a term that is absent.

    Every term reads the original scores `A` and is added to them:
    `out[m] = A[m] + sum_n A[n] (static[n, m] + sum_r down[r, n] up[r, m]) + A[m] gate[m]`,
    with the query's and the key's low-rank and gate terms summed. With `groups` > 1 the low-rank terms mix heads only
    inside each of that many consecutive groups; `static` is then expected to be block-diagonal.
    """

    query_down: Tensor | None = None  # [B, T, R, H]
    query_up: Tensor | None = None  # [B, T, R, H]
    key_down: Tensor | None = None  # [B, S, R, H]
    key_up: Tensor | None = None  # [B, S, R, H]
    query_gate: Tensor | None = None  # [B, T, H]
    key_gate: Tensor | None = None  # [B, S, H]
    static: Tensor | None = None  # [H, H], indexed [in, out]
    groups: int = 1


def pack_factors(composition: Composition | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the rows of queries `[B, T, rows, H]` and of keys `[B, S, rows, H]`, and the static matrix."""
    if composition is None:
        return None, None, None
    sides = []
    for side in ("query", "key"):
        down, up, gate = (getattr(composition, f"{side}_{kind}") for kind in ("down", "up", "gate"))
        rows = [part for part in (down, up, None if gate is None else gate.unsqueeze(2)) if part is not None]
        sides.append(torch.cat(rows, dim=2) if rows else None)
    return sides[0], sides[1], composition.static
