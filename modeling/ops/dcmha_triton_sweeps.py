"""The forward and the backward pass of `dcmha_triton`: matrix products and, between them, the kernels."""

import torch
from torch import Tensor

from .dcmha_triton_workspace import Chunk, MapInputs, Workspace, multiply


def attend(inputs: MapInputs, scaling: float, is_causal: bool, sliding_window: int | None) -> tuple[Tensor, Tensor]:
    """Returns the output `[B, T, H, D]` and the log-sum-exp of each row of composed scores, `[B, H, T]` in float32."""
    work = Workspace(inputs, scaling, is_causal, sliding_window, maps=1)
    batch, heads, queries, width = inputs.query.shape
    output = work.query.new_zeros(batch, queries, heads, width)
    lse = work.query.new_full((batch, heads, queries), -torch.inf, dtype=torch.float32)
    for chunk in work.chunks():
        scores, probs = work.scores(chunk), work.map(0, chunk, work.value.dtype)
        partial_lse = work.partial_of_queries("dcmha_statistics", chunk)
        work.launch("dcmha_statistics", chunk, scores, partial_lse)
        rows = lse[chunk.items, :, chunk.queries]
        rows.copy_(torch.logsumexp(partial_lse, dim=1))
        work.launch("dcmha_probs", chunk, scores, probs, rows)
        mixed = torch.bmm(work.grouped(probs), work.of_keys(work.value, chunk)).view(*scores.shape[:3], width)
        output[chunk.items, chunk.queries] = mixed.transpose(1, 2)
    return output, lse


def attend_backward(
    grad_output: Tensor, lse: Tensor, inputs: MapInputs, scaling: float, is_causal: bool, sliding_window: int | None
) -> list[Tensor]:
    """Returns the gradients of all `inputs` that are there, but of the mask."""
    work = Workspace(inputs, scaling, is_causal, sliding_window, maps=3)
    grad_output, delta = grad_output.transpose(1, 2), torch.zeros_like(lse)
    sums = _Sums(work)
    for chunk in work.chunks():
        scores, grad_composed = work.scores(chunk), work.map(1, chunk, work.value.dtype)
        probs = grad_scores = work.map(2, chunk, work.value.dtype)
        grad_chunk, value = work.of_queries(grad_output, chunk), work.of_keys(work.value, chunk)
        multiply(grad_chunk, value.transpose(1, 2), out=work.grouped(grad_composed))
        rows, delta_rows = (tensor[chunk.items, :, chunk.queries] for tensor in (lse, delta))

        partial_delta = work.partial_of_queries("dcmha_backward_post", chunk)
        partial = sums.partial("dcmha_backward_post", chunk, "post")
        work.launch("dcmha_backward_post", chunk, scores, grad_composed, probs, partial_delta, *partial, rows)
        torch.sum(partial_delta, dim=1, out=delta_rows)
        sums.add_factors(chunk, "post", partial)
        sums.add(sums.value, chunk, work.grouped(probs), grad_chunk)

        partial = sums.partial("dcmha_backward_pre", chunk, "pre")
        work.launch("dcmha_backward_pre", chunk, scores, grad_composed, grad_scores, delta_rows, *partial, rows)
        sums.add_factors(chunk, "pre", partial)
        sums.add(sums.key, chunk, work.grouped(grad_scores), work.of_queries(work.query, chunk), scaling)
        sums.set_query(chunk, work.grouped(grad_scores))
    return sums.results(inputs)


class _Sums:
    """The gradients of all inputs while they add up: what several chunks add to in float32."""

    def __init__(self, work: Workspace) -> None:
        self.work = work
        self.query = torch.zeros_like(work.query)
        self.key, self.value = (torch.zeros_like(rows, dtype=torch.float32) for rows in (work.key, work.value))
        self.factors = {
            name: torch.zeros_like(rows, dtype=torch.float32)
            for name, rows in work.factors._asdict().items()
            if rows is not None
        }

    def partial(self, kernel: str, chunk: Chunk, stage: str) -> list[Tensor | None]:
        """Room for the gradients of a stage's rows of queries and of keys, for each block of the other side."""
        key_blocks, query_blocks, items = self.work.grid(kernel, chunk)
        _, queries, keys = chunk.counts
        partial: list[Tensor | None] = []
        for side, blocks, length in (("query", key_blocks, queries), ("key", query_blocks, keys)):
            sums = self.factors.get(f"{stage}_{side}")
            shape = () if sums is None else (items, blocks, *sums.shape[1:3], length)
            partial.append(None if sums is None else sums.new_empty(shape))
        return partial

    def add_factors(self, chunk: Chunk, stage: str, partial: list[Tensor | None]) -> None:
        for side, places, parts in zip(("query", "key"), (chunk.queries, chunk.keys), partial, strict=True):
            if parts is not None:
                self.factors[f"{stage}_{side}"][chunk.items, :, :, places] += parts.sum(1)

    def add(self, total: Tensor, chunk: Chunk, maps: Tensor, rows: Tensor, scaling: float = 1.0) -> None:
        """Adds `maps^T @ rows * scaling` to the gradients of the chunk's keys."""
        total, maps = self.work.of_keys(total, chunk), maps.transpose(1, 2)
        if maps.is_cuda and maps.dtype != total.dtype:
            torch.baddbmm(total, maps, rows, alpha=scaling, out_dtype=total.dtype, out=total)
        else:
            total.baddbmm_(maps.to(total.dtype), rows.to(total.dtype), alpha=scaling)

    def set_query(self, chunk: Chunk, maps: Tensor) -> None:
        """Sets `maps @ key * scaling`: no other chunk has these queries."""
        grad = self.query[chunk.items, :, chunk.queries]
        rows = grad.new_empty(maps.shape[0], maps.shape[1], grad.shape[-1])
        multiply(maps, self.work.of_keys(self.work.key, chunk), out=rows, scaling=self.work.scaling)
        grad.copy_(rows.view(grad.shape))

    def results(self, inputs: MapInputs) -> list[Tensor]:
        keys = inputs.key.shape[2]
        sums = {"query": self.query}
        sums |= {"key": self.key[:, :keys].view_as(inputs.key)}
        sums |= {"value": self.value[:, :keys].view_as(inputs.value)}
        for name, total in self.factors.items():
            sums[name] = total.permute(0, 3, 1, 2)[:, : getattr(inputs, name).shape[1]]
        return [total.to(getattr(inputs, name).dtype).contiguous() for name, total in sums.items()]
