"""Baselines: composed and plain attention, computed as other code computes them.

The official style is the algorithm of the published training and decoding code of DCMHA (arXiv 2405.08553), written
anew: query chunks of 128, composition as separate passes over the heads for every rank, side and gate, and a cache of
`H x H` matrices. It computes exactly the same function as ours. Unlike the published code, it neither rounds
probabilities to bfloat16 in every dtype nor runs an additional empty chunk.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from dynattn.modeling.layers.attention_masks import compact_mask
from dynattn.modeling.ops.dcmha.composition import Composition

from ..harness.inputs import OpInputs
from ..harness.interface import COMPILED

CHUNK = 128


def compose_in_passes(scores: Tensor, composition: Composition) -> Tensor:
    """Mixes the heads of `[B, H, T, S]` one rank, one side and one gate after another: 38 passes with two ranks."""
    composed = scores
    for side, axis in (("query", 3), ("key", 2)):
        down, up, gate = (getattr(composition, f"{side}_{name}") for name in ("down", "up", "gate"))
        for rank in range(0 if down is None else down.shape[2]):
            mixing, spreading = (factor[:, :, rank].transpose(1, 2).unsqueeze(axis) for factor in (down, up))
            hidden = (scores * mixing).sum(1, keepdim=True)
            composed = composed + hidden * spreading
        if gate is not None:
            composed = composed + scores * gate.transpose(1, 2).unsqueeze(axis)
    if composition.static is not None:
        composed = composed + torch.einsum("bnts,nm->bmts", scores, composition.static)
    return composed


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, pre: dict[str, Any], post: dict[str, Any]
) -> Tensor:
    """Attention of one chunk of queries over the keys where `visible` `[T, S]` is true, or over all without it.

    Returns `[B, H, T, D]`.
    """
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    probs = probabilities(compose_in_passes(scores, Composition(**pre)), visible)
    return compose_in_passes(probs, Composition(**post)) @ value


def probabilities(scores: Tensor, visible: Tensor | None) -> Tensor:
    """The softmax of scores `[..., S]` over the keys where `visible`, of a shape that fits, is true; all without it."""
    if visible is not None:
        scores = torch.where(visible, scores, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)


@cache
def compiled_attend_rows() -> Callable[..., Tensor]:
    """`attend_rows`, which returns `[B, H, T, D]`, compiled for lengths that vary.

    It is made at its first use, because `torch.compile` is slow to import.
    """
    return torch.compile(attend_rows, dynamic=True)


def attend_in_chunks(inputs: OpInputs, *, compile_rows: bool = False) -> Tensor:
    """Attention over query chunks, composed, static or plain as the inputs are. Returns `[B, T, H, D]`."""
    attend = compiled_attend_rows() if compile_rows else attend_rows
    outputs = []
    length = inputs.query.shape[2]
    for start in range(0, length, CHUNK):
        rows = inputs.rows(start, min(start + CHUNK, length))
        stages = [{} if stage is None else stage.tensors() for stage in (rows.pre, rows.post)]
        outputs.append(attend(rows.query, rows.key, rows.value, rows.mask_by_position(), *stages))
    return torch.cat(outputs, dim=2).transpose(1, 2)


def in_models(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sliding_window: int | None = None,
    pre: Composition | None = None,
    post: Composition | None = None,
    *,
    compile_rows: bool,
    **_: Any,
) -> tuple[Tensor, None]:
    """The official style behind Transformers' attention interface, for batches without padding.

    Takes `query` `[B, H, T, D]`, `key` and `value` `[B, H, S, D]`; returns `[B, T, H, D]` and no attention maps.
    """
    assert attention_mask is None
    inputs = OpInputs(query, key, value, query, pre, post, sliding_window)
    return attend_in_chunks(inputs, compile_rows=compile_rows), None


IN_MODELS = {"official": False, f"official{COMPILED}": True}
for _name, _compiles in IN_MODELS.items():
    AttentionInterface.register(_name, partial(in_models, compile_rows=_compiles))
    AttentionMaskInterface.register(_name, compact_mask)


def attend_sdpa(inputs: OpInputs) -> Tensor:
    """PyTorch's attention, for a single query or as many queries as keys. Returns `[B, T, H, D]`."""
    heads, is_causal = (inputs.query, inputs.key, inputs.value), inputs.hides_later_keys
    output = F.scaled_dot_product_attention(*heads, inputs.visible, is_causal=is_causal, scale=inputs.scaling)
    return output.transpose(1, 2)


def attend_whole(inputs: OpInputs) -> Tensor:
    """Plain attention as matrix product, softmax and matrix product. Returns `[B, T, H, D]`."""
    scores = inputs.query @ inputs.key.transpose(-1, -2) * inputs.scaling
    visible = inputs.mask_by_position() if inputs.query.shape[2] > 1 else inputs.visible
    return (probabilities(scores, visible) @ inputs.value).transpose(1, 2)


def mixing_matrices(side: str, *stages: Composition) -> Tensor:
    """The terms of one side of `P` stages as matrices without the identity, `[B, T or S, P, H (in), H (out)]`."""
    matrices = []
    for stage in stages:
        down, up, gate = (getattr(stage, f"{side}_{name}") for name in ("down", "up", "gate"))
        matrices.append(torch.einsum("btrn,btrm->btnm", down, up) + torch.diag_embed(gate))
    return torch.stack(matrices, dim=2)


def key_matrix_cache(inputs: OpInputs) -> Tensor:
    """The cache of the official decoding code: each key's mixing matrices plus the identity, `[B, S, 2, H, H]`."""
    assert inputs.pre is not None and inputs.post is not None
    matrices = mixing_matrices("key", inputs.pre, inputs.post)
    return matrices + torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)


def decode_with_matrices(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_matrices: Tensor,
    key_matrices: Tensor,
    visible: Tensor | None = None,
) -> Tensor:
    """Composed attention of one token over a cache of matrices, as in the official decoding code.

    Takes `query` `[B, H, 1, D]`, `key` and `value` `[B, H, S, D]`, matrices `[B, 1 or S, 2, H, H]` and `visible`
    `[B, 1, 1, S]`; returns `[B, 1, H, D]`.
    """
    pre, post = (query_matrices + key_matrices).unbind(2)  # [B, S, H, H] each
    scores = (query @ key.transpose(-1, -2))[:, :, 0] * query.shape[-1] ** -0.5  # [B, H, S]
    scores = torch.einsum("bns,bsnm->bms", scores, pre)
    probs = probabilities(scores, None if visible is None else visible[:, 0])
    probs = torch.einsum("bns,bsnm->bms", probs, post)
    return (probs[:, :, None] @ value).transpose(1, 2)
