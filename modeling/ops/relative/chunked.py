"""Relative attention in linear memory: one chunk of queries at a time, with scores recomputed in the backward pass."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..autocast import autocast
from ..custom_operators import AttentionOperator
from ..dtypes import at_least_float32
from ..function_transforms import under_transforms
from ..masking import Structure, four_dimensional, split_mask
from .chunk import Operands, RelativeChunk, relative_chunks
from .eager import NO_TERMS, PositionTerms, relative_eager

# Calls without causality that have at most this number of (query, key) pairs use `relative_eager`, which is faster:
# their maps are small, and a chunk would multiply its queries by `c - 1` more rows of the tables than it has keys.
FEW_PAIRS = 1 << 15


class RelativeInputs(NamedTuple):
    """The arguments of the operator that are tensors."""

    query: Tensor  # [B, H, T, D]
    key: Tensor  # [B, H, S, D]
    value: Tensor  # [B, H, S, D]
    embeddings: Tensor | None  # [L, H, D], the rows of `_reached_rows`
    bias: Tensor | None  # [L, H], the same rows, in the dtype of the query or in float32
    content_bias: Tensor | None  # [H, D]
    attention_mask: Tensor | None  # broadcastable to [B, H, T, S]
    seed: Tensor | None  # [], of the random numbers of dropout, which both passes draw; None without dropout


class RelativeSettings(NamedTuple):
    """The arguments of the operator that are not tensors."""

    scaling: float
    is_causal: bool
    sliding_window: int | None
    dropout: float
    later_rows: int  # of the rows in `embeddings` and `bias`
    bias_may_hide: bool  # keys, where it is minus infinity


@under_transforms(relative_eager)
def relative_chunked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    attention_mask: Tensor | None,
    is_causal: bool,
    sliding_window: int | None,
    dropout: float = 0.0,
    terms: PositionTerms = NO_TERMS,
) -> tuple[Tensor, None]:
    """`relative_attention` in memory proportional to `T + S`. Returns the output `[B, T, H, D]`, and no attention maps.

    Under `torch.compile` the op is one node of the graph. An additive mask that needs a gradient is refused.

    Under causality, queries before the first key see nothing; they are left out, and their output is zero. A single
    query, and queries with an `offset`, use `relative_eager`: such calls come from decoding, where its memory is linear
    too. So do calls without causality that have at most `FEW_PAIRS` pairs.
    """
    structure = Structure(query.shape[2], key.shape[2], is_causal, sliding_window)
    if terms.offset is not None or _is_small(structure):
        output, _ = relative_eager(
            query,
            key,
            value,
            scaling=scaling,
            attention_mask=attention_mask,
            is_causal=is_causal,
            sliding_window=sliding_window,
            dropout=dropout,
            terms=terms,
        )
        return output, None
    if attention_mask is not None and attention_mask.requires_grad and torch.is_grad_enabled():
        raise ValueError("implementation='chunked' has no gradient for attention_mask; detach it, or use 'eager'")
    unseeing = max(structure.queries - structure.keys, 0) if is_causal else 0
    if attention_mask is not None and attention_mask.ndim > 1 and attention_mask.shape[-2] > 1:
        attention_mask = attention_mask[..., unseeing:, :]
    rows = _reached_rows(structure, terms.later_rows)
    embeddings, bias = (None if table is None else table[rows] for table in (terms.embeddings, terms.bias))
    tensors = [query[:, :, unseeing:], key, value, embeddings, bias, terms.content_bias]
    # Under autocast, a bias by itself (ALiBi, T5) keeps its dtype; beside embeddings it is part of a product.
    kept = bias if embeddings is None else None
    tensors = [x if x is None or x is kept else autocast(x)[0] for x in tensors]
    seed = torch.randint(2**62, (), device="cpu") if dropout else None
    bias_may_hide = bias is not None and not terms.has_finite_bias
    settings = RelativeSettings(
        scaling, is_causal, sliding_window, dropout, terms.later_rows - rows.start, bias_may_hide
    )
    output = _forward_op(*tensors, attention_mask, seed, *settings)
    return (F.pad(output, (0, 0, 0, 0, unseeing, 0)) if unseeing else output), None


def _is_small(structure: Structure) -> bool:
    """Whether the maps of a call are so small that `relative_eager` is faster."""
    few = structure.queries * structure.keys <= FEW_PAIRS
    return structure.queries == 1 or (few and not structure.is_causal)


def _reached_rows(structure: Structure, later_rows: int) -> slice:
    """The rows of the tables for all distances between a query and a key that it may see.

    While exporting these are all rows, because `torch.export` cannot prove that the smaller of two sizes is in range.
    """
    if torch.compiler.is_exporting():
        return slice(0, None)
    unbounded = structure.keys + structure.queries
    window = unbounded if structure.sliding_window is None else structure.sliding_window
    ahead = 0 if structure.is_causal else min(structure.queries, window) - 1
    return slice(max(later_rows - ahead, 0), later_rows + min(structure.keys, window))


def _attend(inputs: RelativeInputs, settings: RelativeSettings) -> Tensor:
    """The output `[B, T, H, D]`."""
    operands = _heads_first(inputs)
    output = inputs.query.new_zeros(inputs.query.transpose(1, 2).shape)
    for chunk in _chunks(inputs, settings):
        probs = chunk.probabilities(operands, settings.scaling)
        kept = chunk.dropout_mask(probs, settings.dropout, inputs.seed)
        weights = (probs if kept is None else probs * kept).to(inputs.query.dtype)
        output.permute(2, 0, 1, 3)[:, :, chunk.queries] = weights @ operands.value[:, :, chunk.keys]
    return output


def _attend_backward(
    grad_output: Tensor, inputs: RelativeInputs, settings: RelativeSettings, _: Sequence[str]
) -> dict[str, Tensor]:
    """The gradients of the inputs by name, each in the shape of its tensor, from that of the output, `[B, T, H, D]`."""
    operands = _heads_first(inputs)
    grads = _zeros_like(operands)
    grad_output = grad_output.permute(2, 0, 1, 3).contiguous()
    for chunk in _chunks(inputs, settings):
        probs = chunk.probabilities(operands, settings.scaling)
        kept = chunk.dropout_mask(probs, settings.dropout, inputs.seed)
        grad_chunk = grad_output[:, :, chunk.queries]
        weights = (probs if kept is None else probs * kept).to(inputs.query.dtype)
        grads.value[:, :, chunk.keys] += weights.transpose(-1, -2) @ grad_chunk
        grad_probs = (grad_chunk @ operands.value[:, :, chunk.keys].transpose(-1, -2)).to(probs.dtype)
        grad_probs = grad_probs if kept is None else grad_probs.mul_(kept)
        # PyTorch's formula subtracts the weighted mean of `grad_probs` as stored here: if all are equal, 0 is left.
        grad_scores = torch.ops.aten._softmax_backward_data(grad_probs, probs, -1, probs.dtype)
        # These maps would otherwise be kept beside those by distance.
        del probs, weights, grad_probs
        chunk.accumulate(operands, grads, grad_scores.mul_(settings.scaling).to(inputs.query.dtype))
    return _as_given(grads)


def _reference(inputs: RelativeInputs, settings: RelativeSettings) -> Tensor:
    """The reference op on the arguments of the operator, without masks."""
    terms = PositionTerms(inputs.embeddings, inputs.bias, inputs.content_bias, later_rows=settings.later_rows)
    nothing_hidden: Any = {"attention_mask": None, "is_causal": False, "sliding_window": None}
    return relative_eager(inputs.query, inputs.key, inputs.value, scaling=1.0, terms=terms, **nothing_hidden)[0]


# The inputs that have gradients are the first fields of `RelativeInputs`.
_forward_op = AttentionOperator(
    "relative_chunked",
    RelativeInputs,
    RelativeSettings,
    _attend,
    _attend_backward,
    _reference,
    differentiable=RelativeInputs._fields[: RelativeInputs._fields.index("attention_mask")],
).forward


def _chunks(inputs: RelativeInputs, settings: RelativeSettings) -> list[RelativeChunk]:
    """The chunks of a call, in which the last query is at the last key."""
    structure = Structure.of_call(inputs.query, inputs.key, None, settings.is_causal, settings.sliding_window)
    bias_hides, bias = settings.bias_may_hide, inputs.bias
    if bias_hides and bias is not None and bias.is_cpu:  # reading it from another device would wait
        bias_hides = bool(bias.isneginf().any())
    return relative_chunks(structure, settings.later_rows, bias_hides)


def _heads_first(inputs: RelativeInputs) -> Operands:
    """The inputs in the layout that chunks read: heads first, tables from the farthest distance to the nearest."""
    query, key, value = (x.transpose(0, 1).contiguous() for x in inputs[:3])
    embeddings, bias, content_bias = inputs.embeddings, inputs.bias, inputs.content_bias
    visible, added = split_mask(inputs.attention_mask)
    return Operands(
        query,
        key,
        value,
        None if embeddings is None else embeddings.flip(0).transpose(0, 1).contiguous(),
        None if bias is None else bias.flip(0).T.contiguous(),
        None if content_bias is None else content_bias[:, None, None],
        *(None if mask is None else four_dimensional(mask).transpose(0, 1) for mask in (visible, added)),
    )


def _zeros_like(operands: Operands) -> Operands:
    """Gradients of the operands, all zero, in the dtype in which chunks are summed; None for masks, which have none."""
    given = operands._replace(visible=None, added=None)
    zeros: dict[str, Any] = {
        name: torch.zeros_like(one, dtype=at_least_float32(one.dtype))
        for name, one in given._asdict().items()
        if one is not None
    }
    return given._replace(**zeros)


def _as_given(grads: Operands) -> dict[str, Tensor]:
    """Gradients by name in the layout of the op's arguments, such as `query` `[B, H, T, D]`, without absent ones."""
    given = {name: getattr(grads, name).transpose(0, 1) for name in ("query", "key", "value")}
    if grads.embeddings is not None:
        given["embeddings"] = grads.embeddings.transpose(0, 1).flip(0)
    if grads.bias is not None:
        given["bias"] = grads.bias.T.flip(0)
    if grads.content_bias is not None:
        given["content_bias"] = grads.content_bias[:, 0, 0]
    return given
