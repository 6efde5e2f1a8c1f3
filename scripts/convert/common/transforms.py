"""Reversible changes of layout between two formats' tensors; each works on meta tensors too."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Transform(Protocol):
    """Turns the tensors of one side of a rule into those of the other side, and back."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """From the foreign format to ours."""
        ...

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """From our format to the foreign one."""
        ...


@dataclass(frozen=True)
class Keep:
    """Only the names differ."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)


KEEP = Keep()


@dataclass(frozen=True)
class Split:
    """One tensor holds several behind each other along `dim`; `sizes` are their lengths."""

    sizes: tuple[int, ...]
    dim: int = 0

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (joined,) = tensors
        return list(joined.split(self.sizes, dim=self.dim))

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(tensors), dim=self.dim)]


@dataclass(frozen=True)
class Reshape:
    """The same numbers in the same order; one pair of shapes for each tensor."""

    theirs: tuple[tuple[int, ...], ...]
    ours: tuple[tuple[int, ...], ...]

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.reshape(shape) for tensor, shape in zip(tensors, self.ours, strict=True)]

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.reshape(shape) for tensor, shape in zip(tensors, self.theirs, strict=True)]


@dataclass(frozen=True)
class Select:
    """Of `count` entries along `dim` ours has only `kept`, in that order; the foreign format gets zeros for others."""

    dim: int
    kept: tuple[int, ...]
    count: int

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.index_select(self.dim, self._indices(tensor)) for tensor in tensors]

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self._fill(tensor) for tensor in tensors]

    def _fill(self, tensor: Tensor) -> Tensor:
        shape = (*tensor.shape[: self.dim], self.count, *tensor.shape[self.dim + 1 :])
        return tensor.new_zeros(shape).index_copy(self.dim, self._indices(tensor), tensor)

    def _indices(self, tensor: Tensor) -> Tensor:
        return torch.tensor(self.kept, device=tensor.device)


@dataclass(frozen=True)
class Interleaved:
    """One tensor holds, head by head, the rows of `parts` tensors: those of the first for head 0, of the second, ..."""

    heads: int
    parts: int

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (joined,) = tensors
        return [part.flatten(0, 1) for part in joined.unflatten(0, (self.heads, self.parts, -1)).unbind(1)]

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        per_head = [tensor.unflatten(0, (self.heads, -1)) for tensor in tensors]
        return [torch.stack(per_head, dim=1).flatten(0, 2)]


@dataclass(frozen=True)
class CausalKernel:
    """A causal depthwise convolution's `[D, 1, W]`, the oldest token first, is `[W, D]` in ours, the newest first."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.squeeze(1).T.flip(0) for tensor in tensors]

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.flip(0).T.unsqueeze(1) for tensor in tensors]


@dataclass(frozen=True)
class Stack:
    """Several tensors of one shape become one, along a new first dimension."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.stack(list(tensors))]

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (stacked,) = tensors
        return list(stacked.unbind())


@dataclass(frozen=True)
class Chain:
    """One transform after the other."""

    parts: tuple[Transform, ...]

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        for part in self.parts:
            tensors = part.forward(tensors)
        return list(tensors)

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        for part in reversed(self.parts):
            tensors = part.backward(tensors)
        return list(tensors)
