"""Reversible changes of layout between two formats' tensors; each works on meta tensors too.

`[...]` stands for any shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Transform(Protocol):
    """Turns the tensors of one side of a rule into those of the other side, and back."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """From the foreign format to ours, `[...]` each."""
        ...

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """From our format to the foreign one, `[...]` each."""
        ...


@dataclass(frozen=True)
class Split:
    """One foreign tensor is the concatenation of several of ours along `dim`; `sizes` are their lengths."""

    sizes: tuple[int, ...]
    dim: int = 0

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`[sum of sizes, ...]` to one `[size, ...]` for each size (with `dim` = 0)."""
        (joined,) = tensors
        return list(joined.split(self.sizes, dim=self.dim))

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`[size, ...]` each to `[sum of sizes, ...]` (with `dim` = 0)."""
        return [torch.cat(list(tensors), dim=self.dim)]


@dataclass(frozen=True)
class Transpose:
    """Foreign matrices have inputs along the first dimension, ours outputs."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`[in, out]` to `[out, in]`, each."""
        return [tensor.T for tensor in tensors]

    backward = forward


@dataclass(frozen=True)
class Reshape:
    """The same elements in the same order; one pair of shapes for each tensor."""

    theirs: tuple[tuple[int, ...], ...]
    ours: tuple[tuple[int, ...], ...]

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """From the shapes `theirs` to `ours`, `[...]` each."""
        return [tensor.reshape(shape) for tensor, shape in zip(tensors, self.ours, strict=True)]

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """From the shapes `ours` to `theirs`, `[...]` each."""
        return [tensor.reshape(shape) for tensor, shape in zip(tensors, self.theirs, strict=True)]


@dataclass(frozen=True)
class Select:
    """Ours has only the entries `kept` of `count` along `dim`, in that order; the others become zeros on export."""

    dim: int
    kept: tuple[int, ...]
    count: int

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`[..., count, ...]` to `[..., len(kept), ...]`."""
        return [tensor.index_select(self.dim, self._indices(tensor)) for tensor in tensors]

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`[..., len(kept), ...]` to `[..., count, ...]`."""
        return [self._fill(tensor) for tensor in tensors]

    def _fill(self, tensor: Tensor) -> Tensor:
        """`[..., len(kept), ...]` to `[..., count, ...]`, zero where nothing was kept."""
        shape = (*tensor.shape[: self.dim], self.count, *tensor.shape[self.dim + 1 :])
        return tensor.new_zeros(shape).index_copy(self.dim, self._indices(tensor), tensor)

    def _indices(self, tensor: Tensor) -> Tensor:
        """`kept` as indices `[len(kept)]` on the device of `tensor`."""
        return torch.tensor(self.kept, device=tensor.device)


@dataclass(frozen=True)
class Interleaved:
    """One foreign tensor interleaves the rows of `parts` tensors of ours: head 0 of each, then head 1 of each, ..."""

    heads: int
    parts: int

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`[heads * parts * width, ...]` to `parts` tensors `[heads * width, ...]`."""
        (joined,) = tensors
        return [part.flatten(0, 1) for part in joined.unflatten(0, (self.heads, self.parts, -1)).unbind(1)]

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`parts` tensors `[heads * width, ...]` to `[heads * parts * width, ...]`."""
        per_head = [tensor.unflatten(0, (self.heads, -1)) for tensor in tensors]
        return [torch.stack(per_head, dim=1).flatten(0, 2)]


@dataclass(frozen=True)
class CausalKernel:
    """A causal depthwise kernel: the foreign `[D, 1, W]` has the oldest token first, our `[W, D]` the newest."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`[D, 1, W]` to `[W, D]`, each."""
        return [tensor.squeeze(1).T.flip(0) for tensor in tensors]

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`[W, D]` to `[D, 1, W]`, each."""
        return [tensor.flip(0).T.unsqueeze(1) for tensor in tensors]


@dataclass(frozen=True)
class Stack:
    """Several foreign tensors of one shape are one of ours, along a new first dimension."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`n` tensors `[...]` to `[n, ...]`."""
        return [torch.stack(list(tensors))]

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`[n, ...]` to `n` tensors `[...]`."""
        (stacked,) = tensors
        return list(stacked.unbind())


@dataclass(frozen=True)
class Chain:
    """The transforms `parts`, one after the other."""

    parts: tuple[Transform, ...]

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Through all parts, `[...]`."""
        for part in self.parts:
            tensors = part.forward(tensors)
        return list(tensors)

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Back through all parts, `[...]`."""
        for part in reversed(self.parts):
            tensors = part.backward(tensors)
        return list(tensors)


# Only the names differ.
KEEP = Chain(())
