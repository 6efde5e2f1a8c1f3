"""DCMHA on CUDA devices: the vendor's matrix products around Triton kernels that mix the heads.

A single query, a decoding step, is left to `dcmha_chunked`.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .dcmha_chunked import dcmha_chunked, pack_factors
from .dcmha_triton_sweeps import MapInputs, attend, attend_backward
from .dcmha_triton_workspace import load_kernels

if TYPE_CHECKING:
    from .dcmha import Composition

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def dcmha_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pre: "Composition | None",
    post: "Composition | None",
    scaling: float,
    attention_mask: Tensor | None,
    is_causal: bool,
    sliding_window: int | None,
) -> tuple[Tensor, None]:
    """`dcmha_attention` in memory that grows with the number of queries plus that of keys, not with their product.

    Queries, keys, values and all factors have exact gradients, which are the same in every run. Scores are kept in
    float16 for inputs of half precision, so that their magnitude has to stay below 65504. Under `torch.compile` the op
    is one node of the graph. With `TRITON_INTERPRET=1` in the environment before the first call it runs, slowly, on
    the CPU.

    Returns:
        The output `[B, T, H, D]`, and no attention maps.

    Raises:
        ImportError: Triton is not installed.
        ValueError: a dtype, device, mask or composition that the kernels do not know.
    """
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    _refuse_unknown(query, pre, post, attention_mask)
    if query.shape[2] == 1:
        load_kernels(query.device)  # refuses what the other calls refuse
        return dcmha_chunked(
            query,
            key,
            value,
            pre=pre,
            post=post,
            scaling=scaling,
            attention_mask=attention_mask,
            is_causal=is_causal,
            sliding_window=sliding_window,
        )
    if attention_mask is not None:
        attention_mask = attention_mask[(None,) * (4 - attention_mask.ndim)]
    inputs = MapInputs(query, key, value, *pack_factors(pre)[:2], *pack_factors(post)[:2], attention_mask)
    output, _ = _forward_op(*inputs, scaling, is_causal, sliding_window)
    return output, None


def _refuse_unknown(
    query: Tensor, pre: "Composition | None", post: "Composition | None", attention_mask: Tensor | None
) -> None:
    if query.dtype not in DTYPES:
        raise ValueError(f"implementation='triton' knows {DTYPES}, not {query.dtype}; use 'chunked'")
    for name, stage in (("pre", pre), ("post", post)):
        if stage is not None and stage.groups > 1:
            raise ValueError(
                f"implementation='triton' mixes all heads, not {name}.groups={stage.groups}; use 'chunked'"
            )
        if stage is not None and stage.static is not None:
            raise ValueError(f"implementation='triton' knows no static matrix, but {name}.static is one; use 'chunked'")
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise ValueError(f"implementation='triton' takes boolean masks, not {attention_mask.dtype}; use 'chunked'")
    if attention_mask is not None and attention_mask.ndim > 2 and attention_mask.shape[-3] != 1:
        raise ValueError(
            "implementation='triton' takes masks that all heads share, [B, 1, T, S], not "
            f"{tuple(attention_mask.shape)}; use 'chunked'"
        )


@torch.library.custom_op("dynattn::dcmha_triton", mutates_args=())
def _forward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre_query: Tensor | None,
    pre_key: Tensor | None,
    post_query: Tensor | None,
    post_key: Tensor | None,
    mask: Tensor | None,
    scaling: float,
    is_causal: bool,
    sliding_window: int | None,
) -> tuple[Tensor, Tensor]:
    inputs = MapInputs(query, key, value, pre_query, pre_key, post_query, post_key, mask)
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False), torch.cuda.device_of(query):
        return attend(inputs, scaling, is_causal, sliding_window)


@torch.library.custom_op("dynattn::dcmha_triton_backward", mutates_args=())
def _backward_op(
    grad_output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre_query: Tensor | None,
    pre_key: Tensor | None,
    post_query: Tensor | None,
    post_key: Tensor | None,
    mask: Tensor | None,
    scaling: float,
    is_causal: bool,
    sliding_window: int | None,
) -> list[Tensor]:
    inputs = MapInputs(query, key, value, pre_query, pre_key, post_query, post_key, mask)
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False), torch.cuda.device_of(query):
        return attend_backward(grad_output, lse, inputs, scaling, is_causal, sliding_window)


@_forward_op.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, queries, width = query.shape
    lse = query.new_empty((batch, heads, queries), dtype=torch.float32)
    return query.new_empty(batch, queries, heads, width), lse


@_backward_op.register_fake
def _(grad_output: Tensor, lse: Tensor, *arguments: Any) -> list[Tensor]:
    differentiable = arguments[: len(MapInputs._fields) - 1]
    return [tensor.new_empty(tensor.shape) for tensor in differentiable if tensor is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    count = len(MapInputs._fields)
    ctx.save_for_backward(output[1], *inputs[:count])
    ctx.settings = inputs[count:]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad_output: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    lse, *tensors = ctx.saved_tensors
    grads = iter(_backward_op(grad_output, lse, *tensors, *ctx.settings))
    given = [None if tensor is None else next(grads) for tensor in tensors[:-1]]
    return *given, None, *(None for _ in ctx.settings)


_forward_op.register_autograd(_differentiate, setup_context=_save)
