"""The forward and the backward pass of `dcmha_triton`: matrix products with composition between them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .arguments import MapInputs, MapSettings
from .composers.choice import composer_class_for
from .distance_columns import DistanceColumns, sums_needed
from .matmuls import CublasMatmuls, Matmuls, contiguous
from .window_matmuls import WindowMatmuls
from .workspace import Workspace, padded


def attend(inputs: MapInputs, settings: MapSettings) -> tuple[Tensor, Tensor]:
    """Returns the output `[B, T, H, D]` and the log-sum-exp of each row of composed scores, `[B, H, T]` in float32."""
    kind = composer_class_for(inputs, settings)
    work = Workspace(inputs, settings, ("scores", *kind.maps(inputs, backward=False)), kind.patch_of(inputs))
    composer = kind(work, inputs, DistanceColumns(work, inputs), backward=False)
    matmuls = choose_matmuls(work)(work, inputs)
    lse = torch.zeros(work.batch, work.heads, work.queries, dtype=torch.float32, device=work.device)
    for chunk in work.chunks():
        scores = matmuls.scores(chunk)
        matmuls.attend(chunk, composer.probs(chunk, scores, lse[chunk.items, :, chunk.queries]))
    real = inputs.query.shape[2]
    return contiguous(matmuls.output[:, :real]), lse[..., :real].contiguous()


def attend_backward(
    grad_output: Tensor, lse: Tensor, inputs: MapInputs, settings: MapSettings, wanted: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Returns the gradients of all differentiable inputs, by name and in their shapes and dtypes.

    Args:
        grad_output: `[B, T, H, D]`.
        lse: `[B, H, T]`, float32, of the forward pass.
        wanted: the tables by distance whose gradients are needed.
    """
    kind = composer_class_for(inputs, settings)
    maps = ["scores", "grad_composed", "result", *kind.maps(inputs, backward=True)]
    maps += ["pairs"] if sums_needed(inputs, wanted) - {"scores"} else []
    work = Workspace(inputs, settings, maps, kind.patch_of(inputs))
    tables = DistanceColumns(work, inputs, wanted)
    composer, matmuls = kind(work, inputs, tables, backward=True), choose_matmuls(work)(work, inputs, grad_output)
    lse = padded(lse, 2, work.queries)
    delta = torch.zeros_like(lse)
    for chunk in work.chunks():
        rows = [tensor[chunk.items, :, chunk.queries] for tensor in (lse, delta)]
        scores = matmuls.scores(chunk)
        probs, grad_probs = composer.backward_post(chunk, scores, matmuls.grad_composed(chunk), *rows)
        tables.add("probs", chunk)
        matmuls.add_to_values(chunk, probs)
        grad_scores = composer.backward_pre(chunk, scores, grad_probs, *rows)
        tables.add("composed_scores", chunk)
        tables.add("scores", chunk, grad_scores)
        matmuls.add_to_queries_and_keys(chunk, grad_scores)
    grads = matmuls.gradients() | composer.gradients() | tables.gradients()
    return {name: contiguous(grad.to(getattr(inputs, name).dtype)) for name, grad in grads.items()}


def choose_matmuls(work: Workspace) -> type[Matmuls]:
    """Returns the matrix products for a tiling: cuBLAS cannot shift the keys from block to block, as windows need."""
    return CublasMatmuls if work.tiling.step is None else WindowMatmuls
