"""The interface of composers: the composition between the matrix products of `dcmha_triton`'s passes."""

from abc import ABC, abstractmethod

from torch import Tensor

from ..arguments import MapChunk, MapInputs
from ..distance_columns import DistanceColumns
from ..workspace import Workspace


class KernelComposer(ABC):
    """Composes the maps of one chunk after the other, and adds up the gradients of the terms over chunks.

    Maps are `[items, H, c, n]`, `lse` and `delta` `[items, H, c of T]` in float32. A backward pass does not overwrite
    the scores.

    Args:
        work: the chunks and their buffers.
        inputs: the op's tensors.
        tables: the tables by distance.
        backward: whether this is a backward pass.
    """

    @staticmethod
    @abstractmethod
    def patch_of(inputs: MapInputs) -> tuple[int, int]:
        """Returns the sides of a patch: a chunk's numbers of queries and of keys are multiples of them."""

    @staticmethod
    @abstractmethod
    def maps(inputs: MapInputs, *, backward: bool) -> list[str]:
        """Returns the names of the map buffers that the composer needs besides those of the passes."""

    @abstractmethod
    def __init__(self, work: Workspace, inputs: MapInputs, tables: DistanceColumns, *, backward: bool) -> None: ...

    @abstractmethod
    def probs(self, chunk: MapChunk, scores: Tensor, lse: Tensor) -> Tensor:
        """Returns composed probabilities `[items, H, c, n]`, in the memory of the scores.

        Sets `lse` `[items, H, c of T]`, the log-sum-exp of each row of the composed scores.
        """

    @abstractmethod
    def backward_post(
        self, chunk: MapChunk, scores: Tensor, grad_composed: Tensor, lse: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns composed probabilities and the gradients of probabilities, both `[items, H, c, n]`.

        Sets `delta` `[items, H, c of T]`, each row's mean of these gradients, weighted by the probabilities.
        """

    @abstractmethod
    def backward_pre(self, chunk: MapChunk, scores: Tensor, grad_probs: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
        """Returns the gradients of the scores, `[items, H, c, n]`, in the memory of the composed probabilities."""

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """Returns the gradients of the inputs' terms and static matrices by the names of `MapInputs`, in their order.

        They are `[B, T or S, terms, H]` and `[heads, heads]`, in float32.
        """
