"""The matrix products of `dcmha_triton`'s passes; between them a `KernelComposer` composes the maps."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ...scaled_products import scaled_bmm
from .arguments import MapChunk, MapInputs
from .workspace import Workspace, padded

# The size of the elements as which rows are copied.
COPIED_BYTES = 8


class Matmuls(ABC):
    """Products of queries, keys and values with each other and with maps `[items, H, c, n]`, chunk by chunk.

    Args:
        work: the chunks and their buffers.
        inputs: the op's tensors.
        grad_output: `[B, T, H, D]`, in a backward pass.

    Attributes:
        output: `[B, T, H, D]`, set by `attend` in a forward pass.
    """

    output: Tensor

    @abstractmethod
    def __init__(self, work: Workspace, inputs: MapInputs, grad_output: Tensor | None = None) -> None: ...

    @abstractmethod
    def scores(self, chunk: MapChunk) -> Tensor:
        """Returns the scaled scores `[items, H, c, n]`, in a buffer."""

    @abstractmethod
    def attend(self, chunk: MapChunk, probs: Tensor) -> None:
        """Writes the output of the chunk's queries, from composed probabilities `[items, H, c, n]`."""

    @abstractmethod
    def grad_composed(self, chunk: MapChunk) -> Tensor:
        """Returns the gradients of composed probabilities `[items, H, c, n]`, in a buffer."""

    @abstractmethod
    def add_to_values(self, chunk: MapChunk, probs: Tensor) -> None:
        """Adds to the gradients of values, from composed probabilities `[items, H, c, n]`."""

    @abstractmethod
    def add_to_queries_and_keys(self, chunk: MapChunk, grads: Tensor) -> None:
        """Writes the gradients of queries and adds to those of keys, from the scores' gradients `[items, H, c, n]`."""

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """Returns the gradients of `query`, `[B, H, T, D]`, and of `key` and `value`, `[B, H_kv, S, D]`."""


class CublasMatmuls(Matmuls):
    """Batched products of cuBLAS, called through PyTorch, for chunks of whole rows of the map."""

    def __init__(self, work: Workspace, inputs: MapInputs, grad_output: Tensor | None = None) -> None:
        self.work, self.kv_heads, width = work, inputs.key.shape[1], inputs.query.shape[3]
        # Rows that are contiguous by head need no copy in each chunk.
        query = contiguous(padded(inputs.query, 2, work.queries))
        key, self.value = (contiguous(padded(rows, 2, work.keys)).flatten(0, 1) for rows in (inputs.key, inputs.value))
        self.score_query, self.score_key = query.to(work.score_dtype), key.to(work.score_dtype)
        if grad_output is None:
            # Contiguous by head, so that a product can write to it.
            self.output = query.new_zeros(work.batch, work.heads, work.queries, width).transpose(1, 2)
        else:
            self.query, self.key = query, key
            self.grad_output = contiguous(padded(grad_output.transpose(1, 2), 2, work.queries))
            self.grad_query = torch.zeros_like(self.query)
            self.grad_key, self.grad_value = (
                torch.zeros_like(rows, dtype=torch.float32) for rows in (self.key, self.value)
            )

    def scores(self, chunk: MapChunk) -> Tensor:
        """Returns `[items, H, c, n]` by one batched product."""
        scores = self.work.map("scores", chunk, self.work.score_dtype)
        query, key = self._of_queries(self.score_query, chunk), self._of_keys(self.score_key, chunk)
        scaled_bmm(query, key.transpose(1, 2), out=self._grouped(scores), scaling=self.work.scaling)
        return scores

    def attend(self, chunk: MapChunk, probs: Tensor) -> None:
        """Writes `[items, c, H, D]` of the output, from maps `[items, H, c, n]`."""
        self._write(self.output.transpose(1, 2), chunk, self._grouped(probs), self._of_keys(self.value, chunk))

    def grad_composed(self, chunk: MapChunk) -> Tensor:
        """Returns `[items, H, c, n]` by one batched product."""
        grads, value = self.work.map("grad_composed", chunk), self._of_keys(self.value, chunk)
        scaled_bmm(self._of_queries(self.grad_output, chunk), value.transpose(1, 2), out=self._grouped(grads))
        return grads

    def add_to_values(self, chunk: MapChunk, probs: Tensor) -> None:
        """Adds sums over the queries of maps `[items, H, c, n]`."""
        self._add(self.grad_value, chunk, self._grouped(probs), self._of_queries(self.grad_output, chunk))

    def add_to_queries_and_keys(self, chunk: MapChunk, grads: Tensor) -> None:
        """Adds sums over the keys and over the queries of maps `[items, H, c, n]`."""
        grads, scaling = self._grouped(grads), self.work.scaling
        self._add(self.grad_key, chunk, grads, self._of_queries(self.query, chunk), scaling)
        self._write(self.grad_query, chunk, grads, self._of_keys(self.key, chunk), scaling)

    def gradients(self) -> dict[str, Tensor]:
        """Returns `[B, H, T, D]` and twice `[B, H_kv, S, D]`, without padding."""
        structure = self.work.structure
        key, value = (
            rows[:, : structure.keys].unflatten(0, (-1, self.kv_heads)) for rows in (self.grad_key, self.grad_value)
        )
        return {"query": self.grad_query[:, :, : structure.queries], "key": key, "value": value}

    def _grouped(self, rows: Tensor) -> Tensor:
        """`[items, H, c, D or n]` as a factor of a product with keys, `[items * H_kv, H / H_kv * c, D or n]`."""
        return rows.reshape(rows.shape[0] * self.kv_heads, -1, rows.shape[-1])

    def _of_queries(self, rows: Tensor, chunk: MapChunk) -> Tensor:
        """The rows of the chunk's queries in `[B, H, T, D]`, grouped as `[items * H_kv, H / H_kv * c, D]`."""
        return self._grouped(rows[chunk.items, :, chunk.queries])

    def _of_keys(self, rows: Tensor, chunk: MapChunk) -> Tensor:
        """The rows of the chunk's keys in `[B * H_kv, S, D]`: a view `[items * H_kv, n, D]`."""
        return rows[chunk.items.start * self.kv_heads : chunk.items.stop * self.kv_heads, chunk.keys]

    def _write(self, total: Tensor, chunk: MapChunk, maps: Tensor, rows: Tensor, scaling: float = 1.0) -> None:
        """Writes `maps @ rows * scaling` for the chunk's queries to `total` `[B, H, T, D]`.

        Maps `[items * H_kv, H / H_kv * c, n]` are grouped; rows are `[items * H_kv, n, D]`.
        """
        part = total[chunk.items, :, chunk.queries]
        # Heads that share keys are rows of one product. In `total` they have no common stride, so they are copied.
        is_view = self.kv_heads == self.work.heads
        product = part.flatten(0, 1) if is_view else part.new_empty(*maps.shape[:2], part.shape[-1])
        scaled_bmm(maps, rows, out=product, scaling=scaling)
        if not is_view:
            part.copy_(product.view(part.shape))

    def _add(self, total: Tensor, chunk: MapChunk, maps: Tensor, rows: Tensor, scaling: float = 1.0) -> None:
        """Adds `maps^T @ rows * scaling` to the chunk's keys in `total` `[B * H_kv, S, D]`.

        Maps `[items * H_kv, H / H_kv * c, n]` and rows `[items * H_kv, H / H_kv * c, D]` are grouped.
        """
        total, maps = self._of_keys(total, chunk), maps.transpose(1, 2)
        if maps.is_cuda and maps.dtype != total.dtype:
            torch.baddbmm(total, maps, rows, alpha=scaling, out_dtype=total.dtype, out=total)
        else:
            total.baddbmm_(maps.to(total.dtype), rows.to(total.dtype), alpha=scaling)


def contiguous(rows: Tensor) -> Tensor:
    """`[.., D]` in contiguous memory, copied 8 bytes at a time if possible: PyTorch copies one element at a time."""
    ratio = COPIED_BYTES // rows.itemsize
    distances = (rows.storage_offset(), rows.shape[-1], *rows.stride()[:-1])
    if rows.is_contiguous() or rows.stride(-1) != 1 or any(distance % ratio for distance in distances):
        return rows.contiguous()
    return rows.view(torch.int64).contiguous().view(rows.dtype)


def with_contiguous_rows(rows: Tensor) -> Tensor:
    """`[B, H, T, D]` with contiguous channels, as kernels read them; a copy only if they are not."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def row_strides(rows: Tensor) -> tuple[int, ...]:
    """The strides of `[B, H, T, D]` between items, heads and positions."""
    return rows.stride()[:3]
