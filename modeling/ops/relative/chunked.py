"""Relative attention in linear memory: one chunk of queries at a time, with scores recomputed in the backward pass.

A chunk has `c` queries and the `n` keys that any of them sees. Its scores against the position tables come from one
matrix product `[c, x]` of the queries with the rows of the table that they reach, from the farthest distance to the
nearest. The score of query `t` and key `j` then stands in row `t` and column `c - 1 - t + j`: each row is shifted by
one more than the one below it. The relative shift of Transformer-XL (arXiv 1901.02860, appendix B) is therefore a view
of the product whose row stride is shorter by one, and copies nothing. There are `x = n + c - 1` distances between the
queries and the keys of a chunk; under causality the first `n` of them are enough, since no query sees the others.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..masking import Structure, split_mask
from .eager import relative_eager

# Queries of a chunk.
CHUNK = 64
# Without causality a chunk multiplies its queries by `c - 1` more rows of the tables than it has keys. Up to so many
# pairs of queries and keys, whose maps are small, that takes longer than the definition.
FEW_PAIRS = 1 << 15
# The op's first arguments are the tensors that have gradients; this is their number.
DIFFERENTIABLE = 6


class Operands(NamedTuple):
    """The tensors that all chunks read, or their gradients; heads are first, as the batch of every matrix product."""

    query: Tensor  # [H, B, T, D]
    key: Tensor  # [H, B, S, D]
    value: Tensor  # [H, B, S, D]
    embeddings: Tensor | None  # [H, L, D], the farthest distance first
    bias: Tensor | None  # [H, L], the farthest distance first
    content_bias: Tensor | None  # [H, 1, 1, D]
    visible: Tensor | None  # broadcastable to [H, B, T, S]
    added: Tensor | None  # additive mask, broadcastable to [H, B, T, S]


def relative_chunked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    position_embeddings: Tensor | None,
    position_bias: Tensor | None,
    content_bias: Tensor | None,
    scaling: float,
    attention_mask: Tensor | None,
    is_causal: bool,
    sliding_window: int | None,
    offset: int | Tensor | None = None,
    dropout: float = 0.0,
    later_rows: int = 0,
) -> tuple[Tensor, None]:
    """`relative_attention` in memory proportional to `T + S`. Returns the output `[B, T, H, D]`, and no attention maps.

    Under `torch.compile` the op is one node of the graph. Additive masks get no gradient.

    Queries before the first key see nothing; they are left out, and their rows of the output are zero. A single query,
    and queries that do not end where the keys end, use `relative_eager`: such calls come from decoding, where its
    memory is linear too. So do calls without causality that have no more than `FEW_PAIRS` pairs.
    """
    structure = Structure(query.shape[2], key.shape[2], is_causal, sliding_window)
    if offset is not None or _is_small(structure):
        output, _ = relative_eager(
            query,
            key,
            value,
            position_embeddings=position_embeddings,
            position_bias=position_bias,
            content_bias=content_bias,
            scaling=scaling,
            attention_mask=attention_mask,
            is_causal=is_causal,
            sliding_window=sliding_window,
            offset=offset,
            dropout=dropout,
            later_rows=later_rows,
        )
        return output, None
    unseeing = max(structure.queries - structure.keys, 0) if is_causal else 0
    if attention_mask is not None and attention_mask.ndim > 1 and attention_mask.shape[-2] > 1:
        attention_mask = attention_mask[..., unseeing:, :]
    rows = _reached_rows(structure, later_rows)
    tensors = [
        query[:, :, unseeing:],
        key,
        value,
        None if position_embeddings is None else position_embeddings[rows],
        None if position_bias is None else position_bias[rows],
        content_bias,
    ]
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        tensors = [None if tensor is None else tensor.to(dtype) for tensor in tensors]
    seed = torch.randint(2**62, ()) if dropout else None
    later_rows -= rows.start
    output = _forward_op(*tensors, attention_mask, seed, scaling, is_causal, sliding_window, dropout, later_rows)
    return (F.pad(output, (0, 0, 0, 0, unseeing, 0)) if unseeing else output), None


def _is_small(structure: Structure) -> bool:
    """Whether the maps of a call are so small that the definition is the better choice."""
    few = structure.queries * structure.keys <= FEW_PAIRS
    return structure.queries == 1 or (few and not structure.is_causal)


def _reached_rows(structure: Structure, later_rows: int) -> slice:
    """The rows of the tables whose distance occurs between a query and a key that it may see."""
    unbounded = structure.keys + structure.queries
    window = unbounded if structure.sliding_window is None else structure.sliding_window
    ahead = 0 if structure.is_causal else min(structure.queries, window) - 1
    return slice(max(later_rows - ahead, 0), later_rows + min(structure.keys, window))


@torch.library.custom_op("dynattn::relative_chunked", mutates_args=())
def _forward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embeddings: Tensor | None,
    bias: Tensor | None,
    content_bias: Tensor | None,
    attention_mask: Tensor | None,
    seed: Tensor | None,
    scaling: float,
    is_causal: bool,
    sliding_window: int | None,
    dropout: float,
    later_rows: int,
) -> Tensor:
    """The output `[B, T, H, D]`; shapes of the arguments as in `relative_attention`, causal tables cut to the reach.

    `seed` `[]` starts the random numbers of dropout, so that the backward pass repeats them; None without dropout.
    """
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        operands = _heads_first(query, key, value, embeddings, bias, content_bias, attention_mask)
        output = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], query.shape[3])
        structure = Structure(query.shape[2], key.shape[2], is_causal, sliding_window)
        for chunk in _chunks(structure, later_rows):
            probs = chunk.probabilities(operands, scaling)
            kept = chunk.dropout_mask(probs, dropout, seed)
            weights = (probs if kept is None else probs * kept).to(query.dtype)
            output.permute(2, 0, 1, 3)[:, :, chunk.queries] = weights @ operands.value[:, :, chunk.keys]
        return output


@torch.library.custom_op("dynattn::relative_chunked_backward", mutates_args=())
def _backward_op(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embeddings: Tensor | None,
    bias: Tensor | None,
    content_bias: Tensor | None,
    attention_mask: Tensor | None,
    seed: Tensor | None,
    scaling: float,
    is_causal: bool,
    sliding_window: int | None,
    dropout: float,
    later_rows: int,
) -> list[Tensor]:
    """The gradients of those of the first six operands that are given, each in the shape of its operand.

    `grad_output` is `[B, T, H, D]`.
    """
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        operands = _heads_first(query, key, value, embeddings, bias, content_bias, attention_mask)
        grads = Operands(*(None if t is None else torch.zeros_like(t) for t in operands[:DIFFERENTIABLE]), None, None)  # type: ignore[call-arg, arg-type]
        grad_output = grad_output.permute(2, 0, 1, 3).contiguous()
        structure = Structure(query.shape[2], key.shape[2], is_causal, sliding_window)
        for chunk in _chunks(structure, later_rows):
            probs = chunk.probabilities(operands, scaling)
            kept = chunk.dropout_mask(probs, dropout, seed)
            grad_chunk = grad_output[:, :, chunk.queries]
            weights = (probs if kept is None else probs * kept).to(query.dtype)
            grads.value[:, :, chunk.keys] += weights.transpose(-1, -2) @ grad_chunk
            grad_probs = (grad_chunk @ operands.value[:, :, chunk.keys].transpose(-1, -2)).to(probs.dtype)
            grad_probs = grad_probs if kept is None else grad_probs.mul_(kept)
            # The mean that is subtracted is that of these very numbers: if all are equal, nothing but zero is left.
            grad_scores = torch.ops.aten._softmax_backward_data(grad_probs, probs, -1, probs.dtype)
            chunk.accumulate(operands, grads, grad_scores.mul_(scaling).to(query.dtype))
        return _as_given(grads)


@_forward_op.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    """An empty output `[B, T, H, D]`."""
    batch, heads, queries, width = query.shape
    return query.new_empty(batch, queries, heads, width)


@_backward_op.register_fake
def _(grad_output: Tensor, *arguments: Any) -> list[Tensor]:
    """Empty gradients in the shapes of their operands, `query` `[B, H, T, D]` first."""
    return [tensor.new_empty(tensor.shape) for tensor in arguments[:DIFFERENTIABLE] if tensor is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keeps all operands and nothing of the output `[B, T, H, D]`; probabilities are recomputed."""
    ctx.save_for_backward(*inputs[: DIFFERENTIABLE + 2])
    ctx.settings = inputs[DIFFERENTIABLE + 2 :]


def _differentiate(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of all arguments of `_forward_op`, from that of its output `[B, T, H, D]`."""
    tensors = ctx.saved_tensors
    grads = iter(_backward_op(grad_output, *tensors, *ctx.settings))
    given = [None if tensor is None else next(grads) for tensor in tensors[:DIFFERENTIABLE]]
    return *given, None, None, *(None for _ in ctx.settings)


_forward_op.register_autograd(_differentiate, setup_context=_save)


class _QueryChunk(NamedTuple):
    """`c` consecutive queries and the `n` keys that any of them sees."""

    queries: slice
    keys: slice
    structure: Structure
    later_rows: int  # rows of the tables that belong to later keys

    @property
    def shape(self) -> tuple[int, int]:
        """`(c, n)`, the numbers of queries and keys."""
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start

    @property
    def distances(self) -> range:
        """The distances of the `x` columns of products with tables, from the farthest to the nearest."""
        num_queries, num_keys = self.shape
        farthest = self.queries.stop - 1 + self.structure.first_query - self.keys.start
        columns = num_keys if self.structure.is_causal else num_keys + num_queries - 1
        return range(farthest, farthest - columns, -1)

    def probabilities(self, operands: Operands, scaling: float) -> Tensor:
        """Softmax of the scores, `[H, B, c, n]`, in at least float32."""
        query = operands.query[:, :, self.queries]
        content = query if operands.content_bias is None else query + operands.content_bias
        key = operands.key[:, :, self.keys].transpose(-1, -2)
        positions = self._position_scores(operands, query)
        if positions is None or scaling == 0:  # some kernels of `baddbmm` leave their result unwritten if both are 0
            scores = (content @ key).mul_(scaling)
        else:
            batched = torch.baddbmm(
                positions.reshape(-1, *self.shape),
                content.flatten(0, 1),
                key.flatten(0, 1),
                beta=scaling,
                alpha=scaling,
            )
            scores = batched.unflatten(0, query.shape[:2])
        return self._softmax(scores, operands)

    def accumulate(self, operands: Operands, grads: Operands, grad_scores: Tensor) -> None:
        """Adds to `grads` what the gradient of the scores `[H, B, c, n]` contributes to each operand but the values."""
        query = operands.query[:, :, self.queries]
        content = query if operands.content_bias is None else query + operands.content_bias
        grad_query = grad_scores @ operands.key[:, :, self.keys]
        grads.key[:, :, self.keys] += grad_scores.transpose(-1, -2) @ content
        if grads.content_bias is not None:
            grads.content_bias.add_(grad_query.sum((1, 2), keepdim=True))
        if operands.embeddings is not None or operands.bias is not None:
            unshifted = self._unshift(grad_scores).flatten(1, 2)  # [H, B * c, x]
            unshifted = unshifted[..., self._real_columns(operands)]
            if grads.bias is not None:
                self._table_rows(grads.bias).add_(unshifted.sum(1))
            if operands.embeddings is not None and grads.embeddings is not None:
                self._table_rows(grads.embeddings).add_(unshifted.transpose(-1, -2) @ query.flatten(1, 2))
                grad_query += (unshifted @ self._table_rows(operands.embeddings)).view_as(grad_query)
        grads.query[:, :, self.queries] = grad_query

    def dropout_mask(self, probs: Tensor, dropout: float, seed: Tensor | None) -> Tensor | None:
        """The factors `[H, B, c, n]` that dropout multiplies probabilities by; equal in both passes for a seed `[]`."""
        if seed is None:
            return None
        generator = torch.Generator(probs.device).manual_seed(int(seed) + self.queries.start)
        kept = torch.rand(probs.shape, device=probs.device, generator=generator) >= dropout
        return kept.to(probs.dtype).div_((1 - dropout) or 1.0)

    def _position_scores(self, operands: Operands, query: Tensor) -> Tensor | None:
        """Scores of `query` `[H, B, c, D]` with the tables, shifted to `[H * B, c, n]`; undefined for hidden keys."""
        if operands.embeddings is None and operands.bias is None:
            return None
        heads, batch = query.shape[:2]
        (num_queries, num_keys), columns = self.shape, len(self.distances)
        real = self._real_columns(operands)
        by_distance = query.new_empty(heads, batch * num_queries, columns)
        by_distance[..., : real.start] = 0
        by_distance[..., real.stop :] = 0
        reachable = by_distance[..., real]
        if operands.embeddings is None:
            reachable.copy_(self._table_rows(operands.bias)[:, None])  # type: ignore[arg-type]
        else:
            table = self._table_rows(operands.embeddings).transpose(-1, -2)
            if operands.bias is None:
                torch.bmm(query.flatten(1, 2), table, out=reachable)
            else:
                torch.baddbmm(self._table_rows(operands.bias)[:, None], query.flatten(1, 2), table, out=reachable)
        return by_distance.as_strided(
            (heads * batch, num_queries, num_keys),
            (num_queries * columns, columns - 1, 1),
            storage_offset=num_queries - 1,
        )

    def _unshift(self, grad_scores: Tensor) -> Tensor:
        """Undoes the relative shift of `grad_scores` `[H, B, c, n]`: gradients by distance `[H, B, c, x]`, else 0."""
        (num_queries, num_keys), columns = self.shape, len(self.distances)
        by_distance = grad_scores.new_zeros(*grad_scores.shape[:3], columns)
        flat, source = by_distance.flatten(0, 1), grad_scores.flatten(0, 1)
        # Under causality the last key of a query shares its element of the shifted view with the first key of the next
        # query. The last key is visible to the last query only, so the view leaves it out, and that one gradient is
        # copied by itself.
        copied = num_keys - 1 if self.structure.is_causal else num_keys
        shifted = flat.as_strided(
            (flat.shape[0], num_queries, copied),
            (num_queries * columns, columns - 1, 1),
            storage_offset=num_queries - 1,
        )
        shifted.copy_(source[..., :copied])
        flat[:, -1, num_keys - 1] = source[:, -1, -1]
        return by_distance

    def _table_rows(self, table: Tensor) -> Tensor:
        """The rows of a farthest-first table `[H, L, ...]` that queries of this chunk reach."""
        farthest = table.shape[1] - 1 - self.later_rows
        first, last = farthest - self.distances[0], farthest - self.distances[-1]
        return table[:, max(first, 0) : max(last + 1, 0)]

    def _real_columns(self, operands: Operands) -> slice:
        """The columns whose distance has a row in the tables; the window hides the others from every query."""
        table = operands.bias if operands.embeddings is None else operands.embeddings
        length = 0 if table is None else self._table_rows(table).shape[1]
        farthest = 0 if table is None else table.shape[1] - 1 - self.later_rows
        first = min(max(self.distances[0] - farthest, 0), len(self.distances) - length)
        return slice(first, first + length)

    def _softmax(self, scores: Tensor, operands: Operands) -> Tensor:
        """Softmax of `scores` `[H, B, c, n]` over the visible keys, 0 for queries without any; overwrites `scores`."""
        (num_queries, num_keys), window, hidden = self.shape, self.structure.sliding_window, None
        if not self.structure.is_causal:
            if window is not None:
                hidden = ~self.structure.visible(self.queries, self.keys, scores.device)
                scores.masked_fill_(hidden, -torch.inf)
        else:
            later = torch.ones(num_queries, num_queries, dtype=torch.bool, device=scores.device).triu_(1)
            scores[..., num_keys - num_queries :].masked_fill_(later, -torch.inf)
            if window is not None and num_keys > window:
                # Query `t` stands at key `n - c + t`; keys up to `n - c + t - sliding_window` are outside its window.
                outside = torch.ones(num_queries, num_keys, dtype=torch.bool, device=scores.device)
                outside.tril_(num_keys - num_queries - window)
                scores.masked_fill_(outside, -torch.inf)
        if operands.added is not None:
            scores = scores + self._of_chunk(operands.added)
        if operands.visible is not None:
            hidden = ~self._of_chunk(operands.visible)
            scores = scores.masked_fill_(hidden, -torch.inf)
        dtype = torch.promote_types(scores.dtype, torch.float32)
        probs = torch.softmax(scores, dim=-1, dtype=dtype)
        if hidden is None:
            return probs
        return probs.masked_fill_(scores.eq(-torch.inf).all(-1, keepdim=True), 0.0)

    def _of_chunk(self, mask: Tensor) -> Tensor:
        """The part of a mask, broadcastable to `[H, B, T, S]`, that belongs to this chunk."""
        mask = mask[:, :, self.queries] if mask.shape[2] > 1 else mask
        return mask[..., self.keys] if mask.shape[3] > 1 else mask


def _chunks(structure: Structure, later_rows: int) -> list[_QueryChunk]:
    """Divides the queries, which end where the keys end, into chunks of `CHUNK`; those that see no key are left out."""
    spans = [slice(start, min(start + CHUNK, structure.queries)) for start in range(0, structure.queries, CHUNK)]
    chunks = [_QueryChunk(span, structure.reach(span), structure, later_rows) for span in spans]
    return [chunk for chunk in chunks if chunk.keys.stop > chunk.keys.start]


def _heads_first(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embeddings: Tensor | None,
    bias: Tensor | None,
    content_bias: Tensor | None,
    attention_mask: Tensor | None,
) -> Operands:
    """Lays out the op's arguments for the chunks: heads first, tables from the farthest distance to the nearest.

    Arguments have the shapes of `relative_attention`: `query` `[B, H, T, D]`, `embeddings` `[L, H, D]`, and so on.
    """
    visible, added = split_mask(attention_mask)
    query, key, value = (x.transpose(0, 1).contiguous() for x in (query, key, value))
    return Operands(
        query,
        key,
        value,
        None if embeddings is None else embeddings.flip(0).transpose(0, 1).contiguous(),
        None if bias is None else bias.flip(0).T.contiguous(),
        None if content_bias is None else content_bias[:, None, None],
        *(None if mask is None else _four_dimensions(mask).transpose(0, 1) for mask in (visible, added)),
    )


def _four_dimensions(mask: Tensor) -> Tensor:
    """Adds leading dimensions to a mask of up to four: `[T, S]` becomes `[1, 1, T, S]`."""
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def _as_given(grads: Operands) -> list[Tensor]:
    """Gradients in the layout of the op's arguments, `query` `[B, H, T, D]` first; absent operands are left out."""
    given = [
        *(x.transpose(0, 1) for x in (grads.query, grads.key, grads.value)),
        None if grads.embeddings is None else grads.embeddings.transpose(0, 1).flip(0),
        None if grads.bias is None else grads.bias.T.flip(0),
        None if grads.content_bias is None else grads.content_bias[:, 0, 0],
    ]
    return [grad.contiguous() for grad in given if grad is not None]
