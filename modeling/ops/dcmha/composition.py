"""`Composition`: the factors that mix the heads of one stage, and their packed form."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..autocast import without_autocast

SIDES = ("query", "key")
LOW_RANK = ("query_down", "query_up", "key_down", "key_up")
# The tensors of a composition, in the order in which operators and C code take them, and the side of each.
SIDE_OF = {f"{side}_{kind}": side for side in SIDES for kind in ("down", "up", "gate")} | {"static": ""}
TENSORS = tuple(SIDE_OF)


@dataclass(frozen=True)
class Composition:
    """What mixes the heads of one stage; a field that is `None` is a term that is absent.

    For one query and one key, with scores (or probabilities) `A[n]` of the heads `n`, the composed score of head `m` is
    `out[m] = A[m] + sum_n A[n] (static[n, m] + sum_r down[r, n] up[r, m]) + A[m] gate[m]`,
    where the low-rank and gate terms of the query and those of the key are both added. Every term reads the original
    `A`. With `groups` > 1 the low-rank terms mix heads only inside each of that many groups of consecutive heads;
    `static` is then expected to be block-diagonal.

    Attributes:
        query_down, query_up: low-rank factors of the queries, `[B, T, R, H]`.
        key_down, key_up: those of the keys, `[B, S, R, H]`.
        query_gate: `[B, T, H]`.
        key_gate: `[B, S, H]`.
        static: the same for all pairs, `[H, H]`, indexed [in, out].
        groups: number of groups of heads that the low-rank terms mix.
        packed: the packed terms of each side, if the fields of that side are views of them; they then need not be
            packed again. A composition that is made by replacing a field has none.
    """

    query_down: Tensor | None = None
    query_up: Tensor | None = None
    key_down: Tensor | None = None
    key_up: Tensor | None = None
    query_gate: Tensor | None = None
    key_gate: Tensor | None = None
    static: Tensor | None = None
    groups: int = 1
    # Filled by `unpack_factors`. It is no argument of the constructor, since `replace` would pass an argument on.
    packed: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that are present by name, in the order of `TENSORS`."""
        named = {name: getattr(self, name) for name in TENSORS}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def backing_tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that hold all factors: the packed terms of a side by its name, and the other fields.

        Views share dtype, device, layout and the need of gradients with them, so that a decoding step looks at these
        few tensors only.
        """
        backing = dict(self.packed)
        for name, side in SIDE_OF.items():
            tensor = getattr(self, name)
            if tensor is not None and side not in self.packed:
                backing[name] = tensor
        return backing

    def side(self, side: str) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns down `[B, T or S, R, H]`, up `[B, T or S, R, H]` and gate `[B, T or S, H]` of `query` or `key`."""
        if side == "query":
            return self.query_down, self.query_up, self.query_gate
        return self.key_down, self.key_up, self.key_gate

    def map(self, change: Callable[[Tensor], Tensor]) -> "Composition":
        """Returns the same composition with `change` applied to every tensor that is present."""
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **changed)

    def narrow(self, queries: slice | None = None, keys: slice | None = None) -> "Composition":
        """Returns the composition of some queries and some keys, as views of the factors; None takes all."""
        spans = {"query": queries, "key": keys, "static": None}
        narrowed: dict[str, Any] = {}
        for name, tensor in self.tensors().items():
            span = spans[name.partition("_")[0]]
            if span is not None:
                narrowed[name] = tensor[:, span]
        return replace(self, **narrowed)


def list_tensors(composition: Composition | None) -> list[Tensor | None]:
    """Returns one entry for each name in `TENSORS`: the tensor, or None if it is absent."""
    return [getattr(composition, name, None) for name in TENSORS]


def from_list(tensors: Sequence[Tensor | None], groups: int) -> Composition | None:
    """The inverse of `list_tensors`: returns the composition of its `tensors`, None if there are none."""
    if all(tensor is None for tensor in tensors):
        return None
    named: dict[str, Any] = dict(zip(TENSORS, tensors, strict=True))
    return Composition(**named, groups=groups)


def pack_factors(composition: Composition | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the packed terms of queries `[B, T, terms, H]` and of keys `[B, S, terms, H]`, and static `[H, H]`.

    A term has `H` elements for each token. Each side has `R` down terms, `R` up terms and, exactly if the number of its
    terms is odd, a gate. A side without terms is None.
    """
    if composition is None:
        return None, None, None
    return pack_side(composition, "query"), pack_side(composition, "key"), composition.static


def pack_side(composition: Composition, side: str) -> Tensor | None:
    """Returns the packed terms `[B, T or S, terms, H]` of `query` or `key`, copied only if they are not packed yet."""
    if side in composition.packed:
        return composition.packed[side]
    down, up, gate = composition.side(side)
    terms = [term for term in (down, up, None if gate is None else gate.unsqueeze(2)) if term is not None]
    if not terms:
        return None
    with without_autocast(terms[0].device):  # under autocast `cat` raises for the other half precision
        return torch.cat(terms, dim=2)


def unpack_factors(packed: Mapping[str, Tensor | None], static: Tensor | None = None, groups: int = 1) -> Composition:
    """The inverse of `pack_factors`: returns the composition whose fields are views of packed terms.

    Args:
        packed: the terms `[B, T or S, terms, H]` of each side by its name (`query`, `key`); None for one without terms.
        static: `[H, H]`, indexed [in, out].
    """
    factors: dict[str, Any] = {}
    present = {side: terms for side, terms in packed.items() if terms is not None}
    for side, terms in present.items():
        rank, has_gate = divmod(int(terms.shape[2]), 2)  # `torch.jit.trace` makes tensors of sizes
        # The gradient of a split is a single operation.
        down, up, gate = terms.split_with_sizes((rank, rank, has_gate), dim=2)
        if rank:
            factors[f"{side}_down"], factors[f"{side}_up"] = down, up
        if has_gate:
            factors[f"{side}_gate"] = gate.squeeze(2)
    composition = Composition(**factors, static=static, groups=groups)
    composition.packed.update(present)
    return composition
