"""What the passes of `dcmha_triton` need from the kernels between their matrix products."""

from abc import ABC, abstractmethod

from torch import Tensor

from ..arguments import MapChunk, MapInputs
from ..workspace import Workspace


class KernelComposer(ABC):
    """Composes the maps of one chunk after the other, and adds up the gradients of what composes them.

    Maps are `[items, H, c, n]`; those of `scores` stay as they are in a backward pass. `lse` and `delta` are
    `[items, H, c of T]` in float32.
    """

    @staticmethod
    @abstractmethod
    def patch_of(inputs: MapInputs) -> tuple[int, int]:
        """Returns the queries and keys that a chunk has a multiple of."""

    @staticmethod
    @abstractmethod
    def maps(inputs: MapInputs, *, backward: bool) -> list[str]:
        """Returns the names of the buffers that it needs besides those of the passes."""

    @abstractmethod
    def __init__(self, work: Workspace, inputs: MapInputs, *, backward: bool) -> None: ...

    @abstractmethod
    def probs(self, chunk: MapChunk, scores: Tensor, lse: Tensor) -> Tensor:
        """Sets the log-sum-exp of composed scores, and returns composed probabilities in their memory."""

    @abstractmethod
    def backward_post(
        self, chunk: MapChunk, scores: Tensor, grad_composed: Tensor, lse: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns composed probabilities and the gradients of probabilities, and sets `delta`, their product's sums."""

    @abstractmethod
    def backward_pre(self, chunk: MapChunk, scores: Tensor, grad_probs: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
        """Returns the gradients of the scores, in the memory of the composed probabilities."""

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """Returns the gradients of packed rows and of static matrices, those that are there, in the inputs' order."""
