"""The forward and the backward pass of `dcmha_triton`: matrix products and, between them, the kernels."""

import torch
from torch import Tensor

from .dcmha_triton_arguments import Chunk, MapInputs, MapSettings
from .dcmha_triton_choice import composes_by_matrices
from .dcmha_triton_composer import Composer
from .dcmha_triton_loops import LoopComposer
from .dcmha_triton_matrices import MatrixComposer
from .dcmha_triton_workspace import Workspace, multiply, padded


def attend(inputs: MapInputs, settings: MapSettings) -> tuple[Tensor, Tensor]:
    """Returns the output `[B, T, H, D]` and the log-sum-exp of each row of composed scores, `[B, H, T]` in float32."""
    work, composer = _prepare(inputs, settings, ("scores",), backward=False)
    batch, heads, queries, width = work.query.shape
    output = work.query.new_zeros(batch, queries, heads, width)
    lse = work.query.new_zeros(batch, heads, queries, dtype=torch.float32)
    for chunk in work.chunks():
        scores = work.scores(chunk)
        probs = composer.probs(chunk, scores, lse[chunk.items, :, chunk.queries])
        mixed = torch.bmm(work.grouped(probs), work.of_keys(work.value, chunk)).view(*scores.shape[:3], width)
        output[chunk.items, chunk.queries] = mixed.transpose(1, 2)
    real = inputs.query.shape[2]
    return output[:, :real].contiguous(), lse[..., :real].contiguous()


def attend_backward(grad_output: Tensor, lse: Tensor, inputs: MapInputs, settings: MapSettings) -> dict[str, Tensor]:
    """Returns the gradients of all `inputs` that are there, but of what hides keys, by name; sums are float32."""
    work, composer = _prepare(inputs, settings, ("scores", "grad_composed", "result"), backward=True)
    grad_output, lse = (padded(rows, 2, work.queries) for rows in (grad_output.transpose(1, 2), lse))
    delta = torch.zeros_like(lse)
    sums = _Sums(work)
    for chunk in work.chunks():
        scores, grad_composed = work.scores(chunk), work.map("grad_composed", chunk)
        grad_chunk, value = work.of_queries(grad_output, chunk), work.of_keys(work.value, chunk)
        multiply(grad_chunk, value.transpose(1, 2), out=work.grouped(grad_composed))
        rows = [tensor[chunk.items, :, chunk.queries] for tensor in (lse, delta)]
        probs, grad_probs = composer.backward_post(chunk, scores, grad_composed, *rows)
        sums.add(sums.value, chunk, work.grouped(probs), grad_chunk)
        grads = work.grouped(composer.backward_pre(chunk, scores, grad_probs, *rows))
        sums.add(sums.key, chunk, grads, work.of_queries(work.query, chunk), work.scaling)
        sums.set_query(chunk, grads)
    return sums.results(inputs) | composer.gradients()


def choose_composer(inputs: MapInputs, settings: MapSettings) -> type[Composer]:
    """Returns which kernels serve: a static matrix mixes heads of all groups, which matrices of one group cannot."""
    is_static_across_groups = settings.groups > 1 and (inputs.pre_static, inputs.post_static) != (None, None)
    has_composition = any(part is not None for part in (*inputs.rows, inputs.pre_static, inputs.post_static))
    by_matrices = composes_by_matrices(inputs.query.shape[1], inputs.query.dtype)
    return MatrixComposer if has_composition and by_matrices and not is_static_across_groups else LoopComposer


def _prepare(
    inputs: MapInputs, settings: MapSettings, maps: tuple[str, ...], *, backward: bool
) -> tuple[Workspace, Composer]:
    kind = choose_composer(inputs, settings)
    work = Workspace(inputs, settings, (*maps, *kind.maps(inputs, backward=backward)), kind.patch_of(inputs))
    return work, kind(work, inputs, backward=backward)


class _Sums:
    """The gradients of queries, keys and values while they add up: what several chunks add to in float32."""

    def __init__(self, work: Workspace) -> None:
        self.work = work
        self.query = torch.zeros_like(work.query)
        self.key, self.value = (torch.zeros_like(rows, dtype=torch.float32) for rows in (work.key, work.value))

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

    def results(self, inputs: MapInputs) -> dict[str, Tensor]:
        queries, keys = inputs.query.shape[2], inputs.key.shape[2]
        sums = {"query": self.query[:, :, :queries]}
        sums |= {"key": self.key[:, :keys].view_as(inputs.key)}
        return sums | {"value": self.value[:, :keys].view_as(inputs.value)}
