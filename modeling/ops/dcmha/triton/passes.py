"""The forward and the backward pass of `dcmha_triton`: matrix products and, between them, what composes."""

import torch
from torch import Tensor

from .arguments import MapInputs, MapSettings
from .composers.head_by_head import LoopComposer
from .composers.interface import Composer
from .composers.tensor_cores import MatrixComposer
from .matmuls import Products, VendorProducts
from .tuning import composes_by_matrices
from .window_matmuls import BandProducts
from .workspace import Workspace, padded


def attend(inputs: MapInputs, settings: MapSettings) -> tuple[Tensor, Tensor]:
    """Returns the output `[B, T, H, D]` and the log-sum-exp of each row of composed scores, `[B, H, T]` in float32."""
    kind = choose_composer(inputs, settings)
    work = Workspace(inputs, settings, ("scores", *kind.maps(inputs, backward=False)), kind.patch_of(inputs))
    composer, products = kind(work, inputs, backward=False), choose_products(work)(work, inputs)
    lse = torch.zeros(work.batch, work.heads, work.queries, device=work.device)
    for chunk in work.chunks():
        scores = products.scores(chunk)
        products.attend(chunk, composer.probs(chunk, scores, lse[chunk.items, :, chunk.queries]))
    real = inputs.query.shape[2]
    return products.output[:, :real].contiguous(), lse[..., :real].contiguous()


def attend_backward(grad_output: Tensor, lse: Tensor, inputs: MapInputs, settings: MapSettings) -> dict[str, Tensor]:
    """Returns the gradients of all `inputs` that are there, but of what hides keys, by name.

    Sums are float32; what one chunk alone sets may have the dtype of the inputs.
    """
    kind = choose_composer(inputs, settings)
    maps = "scores", "grad_composed", "result", *kind.maps(inputs, backward=True)
    work = Workspace(inputs, settings, maps, kind.patch_of(inputs))
    composer, products = kind(work, inputs, backward=True), choose_products(work)(work, inputs, grad_output)
    lse = padded(lse, 2, work.queries)
    delta = torch.zeros_like(lse)
    for chunk in work.chunks():
        rows = [tensor[chunk.items, :, chunk.queries] for tensor in (lse, delta)]
        scores = products.scores(chunk)
        probs, grad_probs = composer.backward_post(chunk, scores, products.grad_composed(chunk), *rows)
        products.add_to_values(chunk, probs)
        products.add_to_queries_and_keys(chunk, composer.backward_pre(chunk, scores, grad_probs, *rows))
    return products.gradients() | composer.gradients()


def choose_composer(inputs: MapInputs, settings: MapSettings) -> type[Composer]:
    """Returns which kernels compose: a static matrix mixes heads of all groups, which matrices of one group cannot."""
    is_static_across_groups = settings.groups > 1 and (inputs.pre_static, inputs.post_static) != (None, None)
    has_composition = any(part is not None for part in (*inputs.rows, inputs.pre_static, inputs.post_static))
    by_matrices = composes_by_matrices(inputs.query.shape[1], inputs.query.dtype)
    return MatrixComposer if has_composition and by_matrices and not is_static_across_groups else LoopComposer


def choose_products(work: Workspace) -> type[Products]:
    """Returns whose matrix products serve: the vendor's know no bands."""
    return VendorProducts if work.cut.step is None else BandProducts
