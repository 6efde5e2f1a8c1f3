"""The forward and the backward pass of `dcmha_triton`: matrix matmuls and, between them, what composes."""

import torch
from torch import Tensor

from .arguments import MapInputs, MapSettings
from .composers.head_by_head import HeadByHeadComposer
from .composers.interface import KernelComposer
from .composers.tensor_cores import TensorCoreComposer
from .matmuls import CublasMatmuls, Matmuls
from .tuning import composes_on_tensor_cores
from .window_matmuls import WindowMatmuls
from .workspace import Workspace, padded


def attend(inputs: MapInputs, settings: MapSettings) -> tuple[Tensor, Tensor]:
    """Returns the output `[B, T, H, D]` and the log-sum-exp of each row of composed scores, `[B, H, T]` in float32."""
    kind = choose_composer(inputs, settings)
    work = Workspace(inputs, settings, ("scores", *kind.maps(inputs, backward=False)), kind.patch_of(inputs))
    composer, matmuls = kind(work, inputs, backward=False), choose_matmuls(work)(work, inputs)
    lse = torch.zeros(work.batch, work.heads, work.queries, device=work.device)
    for chunk in work.chunks():
        scores = matmuls.scores(chunk)
        matmuls.attend(chunk, composer.probs(chunk, scores, lse[chunk.items, :, chunk.queries]))
    real = inputs.query.shape[2]
    return matmuls.output[:, :real].contiguous(), lse[..., :real].contiguous()


def attend_backward(grad_output: Tensor, lse: Tensor, inputs: MapInputs, settings: MapSettings) -> dict[str, Tensor]:
    """Returns the gradients of all `inputs` that are there, but of what hides keys, by name.

    Sums are float32; what one chunk alone sets may have the dtype of the inputs.
    """
    kind = choose_composer(inputs, settings)
    maps = "scores", "grad_composed", "result", *kind.maps(inputs, backward=True)
    work = Workspace(inputs, settings, maps, kind.patch_of(inputs))
    composer, matmuls = kind(work, inputs, backward=True), choose_matmuls(work)(work, inputs, grad_output)
    lse = padded(lse, 2, work.queries)
    delta = torch.zeros_like(lse)
    for chunk in work.chunks():
        rows = [tensor[chunk.items, :, chunk.queries] for tensor in (lse, delta)]
        scores = matmuls.scores(chunk)
        probs, grad_probs = composer.backward_post(chunk, scores, matmuls.grad_composed(chunk), *rows)
        matmuls.add_to_values(chunk, probs)
        matmuls.add_to_queries_and_keys(chunk, composer.backward_pre(chunk, scores, grad_probs, *rows))
    return matmuls.gradients() | composer.gradients()


def choose_composer(inputs: MapInputs, settings: MapSettings) -> type[KernelComposer]:
    """Returns which kernels compose: a static matrix mixes heads of all groups, which matrices of one group cannot."""
    is_static_across_groups = settings.groups > 1 and (inputs.pre_static, inputs.post_static) != (None, None)
    has_composition = any(part is not None for part in (*inputs.terms, inputs.pre_static, inputs.post_static))
    by_matrices = composes_on_tensor_cores(inputs.query.shape[1], inputs.query.dtype)
    return TensorCoreComposer if has_composition and by_matrices and not is_static_across_groups else HeadByHeadComposer


def choose_matmuls(work: Workspace) -> type[Matmuls]:
    """Returns whose matrix matmuls serve: the vendor's know no bands."""
    return CublasMatmuls if work.tiling.step is None else WindowMatmuls
