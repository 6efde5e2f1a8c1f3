"""What the kernels of `dcmha_triton` are made of: tiles `[block_t, block_s]` of one head, and what composes them."""

from typing import Any, NamedTuple

# What runs on the device is typed by Triton's compiler.
# mypy: disable-error-code="no-untyped-def,assignment"

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("implementation='triton' needs Triton: pip install triton, or use 'chunked'") from error

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# How many partial results are read at once where all are read: with fewer, programs would wait for memory more often.
PARTS = tl.constexpr(64)


class Patch(NamedTuple):
    """What a program works on. Positions count from the chunk's first query and key."""

    item: tl.tensor
    t: tl.tensor  # [block_t]
    s: tl.tensor  # [block_s]
    in_queries: tl.tensor  # [block_t], whether there is such a query
    in_keys: tl.tensor  # [block_s]
    heads: tl.tensor
    sizes: tuple  # `Sizes`


@triton.jit
def make_patch(sizes, heads: tl.constexpr, block_t: tl.constexpr, block_s: tl.constexpr):
    """The patch of this program."""
    t = tl.program_id(1) * block_t + tl.arange(0, block_t)
    s = tl.program_id(0) * block_s + tl.arange(0, block_s)
    return Patch(tl.program_id(2).to(tl.int64), t, s, t < sizes.queries, s < sizes.keys, heads, sizes)


@triton.jit
def make_visible(where, patch):
    """`[block_t, block_s]`, whether a query sees a key."""
    t, s = patch.t[:, None], patch.s[None, :]
    back = t + where.distance - s
    visible = (back <= where.behind) & (back >= -where.ahead) & (s < where.real_keys) & patch.in_queries[:, None]
    if where.first_keys is not None:
        first = where.first_keys + (patch.item // where.groups) * where.row_of_first_keys + patch.t
        visible = visible & (s + where.start >= tl.load(first, mask=patch.in_queries, other=0)[:, None])
    if where.mask is not None:
        mask = where.mask + _offsets(where.mask_strides, where, patch)
        visible = visible & (tl.load(mask, mask=visible, other=0) != 0)
    return visible


@triton.jit
def biased(composed, where, visible, patch):
    """Composed scores plus what an additive mask has for them, which is read again for each head."""
    if where.bias is not None:
        bias = where.bias + _offsets(where.bias_strides, where, patch)
        composed += tl.load(bias, mask=visible, other=0.0).to(tl.float32)
    return composed


@triton.jit
def _offsets(strides, where, patch):
    """`[block_t, block_s]`, of a mask that all heads, and so all groups of them, share."""
    return (patch.item // where.groups) * strides[0] + patch.t[:, None] * strides[1] + patch.s[None, :] * strides[2]


@triton.jit
def make_stage(query_side, key_side, patch, query_rows: tl.constexpr, key_rows: tl.constexpr):
    """One stage as (down, up, gate), each of them (rows of queries, rows of keys)."""
    queries = (query_side, patch.t, patch.in_queries, patch.sizes.all_queries)
    keys = (key_side, patch.s, patch.in_keys, patch.sizes.all_keys)
    query_rank: tl.constexpr = query_rows // 2
    key_rank: tl.constexpr = key_rows // 2
    down = (_rows(queries, patch, query_rows, 0, query_rank), _rows(keys, patch, key_rows, 0, key_rank))
    up = (
        _rows(queries, patch, query_rows, query_rank, 2 * query_rank),
        _rows(keys, patch, key_rows, key_rank, 2 * key_rank),
    )
    gate = (
        _rows(queries, patch, query_rows, 2 * query_rank, query_rows),
        _rows(keys, patch, key_rows, 2 * key_rank, key_rows),
    )
    return (down, up, gate)


@triton.jit
def transposed(stage):
    """What takes gradients of this stage's composition back to what was composed."""
    return (stage[1], stage[0], stage[2])


@triton.jit
def _rows(side, patch, count: tl.constexpr, first: tl.constexpr, last: tl.constexpr):
    """Rows `first` up to `last` of a side `[items, count, H, length]`; positions and length stay with each pointer."""
    rows = ()
    for row in tl.static_range(first, last):
        rows += ((side[0] + (patch.item * count + row) * patch.heads * side[3], side[1], side[2], side[3]),)
    return rows


@triton.jit
def _factor(row, head):
    """One head's number for each query, `[block_t]`, or for each key, `[block_s]`."""
    return tl.load(row[0] + head * row[3] + row[1], mask=row[2], other=0.0).to(tl.float32)


@triton.jit
def no_hidden(stage, block_t: tl.constexpr, block_s: tl.constexpr):
    """A zero for each hidden map of a stage: those that queries' rows make, then those that keys' rows make."""
    hidden = ()
    for _ in tl.static_range(len(stage[0][0]) + len(stage[0][1])):
        hidden += (tl.zeros([block_t, block_s], tl.float32),)
    return hidden


@triton.jit
def gather(hidden, tile, down, head):
    """Adds one head's part to the hidden maps."""
    gathered = ()
    for index in tl.static_range(len(down[0])):
        gathered += (hidden[index] + tile * _factor(down[0][index], head)[:, None],)
    for index in tl.static_range(len(down[1])):
        gathered += (hidden[len(down[0]) + index] + tile * _factor(down[1][index], head)[None, :],)
    return gathered


@triton.jit
def hidden_maps(maps, stage, patch, heads: tl.constexpr, block_t: tl.constexpr, block_s: tl.constexpr):
    """The hidden maps of maps that lie in memory."""
    hidden = no_hidden(stage, block_t, block_s)
    if len(hidden) > 0:
        for head in range(heads):
            hidden = gather(hidden, load(maps, patch, head), stage[0], head)
    return hidden


@triton.jit
def mixed(maps, tile, patch, head):
    """What the identity and a static matrix make of all heads' tiles, given this head's; None is no static matrix."""
    base = tile
    if maps is not None:
        base = load(maps, patch, head)
    return base


@triton.jit
def compose(tile, base, hidden, stage, head):
    """One head of a composition, from the head itself, what is `mixed` for it, and the hidden maps of all."""
    composed, up, gate = base, stage[1], stage[2]
    for index in tl.static_range(len(up[0])):
        composed += hidden[index] * _factor(up[0][index], head)[:, None]
    for index in tl.static_range(len(up[1])):
        composed += hidden[len(up[0]) + index] * _factor(up[1][index], head)[None, :]
    for index in tl.static_range(len(gate[0])):
        composed += tile * _factor(gate[0][index], head)[:, None]
    for index in tl.static_range(len(gate[1])):
        composed += tile * _factor(gate[1][index], head)[None, :]
    return composed


@triton.jit
def probability(score, hidden, pre, softmax, statics, patch, head):
    """One head of the softmax over composed scores; `softmax` is (log-sum-exp, visible, where)."""
    lse, visible, where = softmax
    composed = compose(score, mixed(statics.scores, score, patch, head), hidden, pre, head)
    composed = biased(composed, where, visible, patch)
    return tl.where(visible, tl.exp(composed - load_of_queries(lse, patch, head)[:, None]), 0.0)


@triton.jit
def load(maps, patch, head):
    """One head's tile of maps `[items, H, c, n]`; zero outside."""
    base = maps + (patch.item * patch.heads + head) * patch.sizes.queries * patch.sizes.keys
    inside = patch.in_queries[:, None] & patch.in_keys[None, :]
    return tl.load(base + patch.t[:, None] * patch.sizes.keys + patch.s[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store(maps, tile, patch, head):
    """Writes what `load` reads."""
    base = maps + (patch.item * patch.heads + head) * patch.sizes.queries * patch.sizes.keys
    inside = patch.in_queries[:, None] & patch.in_keys[None, :]
    tl.store(base + patch.t[:, None] * patch.sizes.keys + patch.s[None, :], tile.to(maps.dtype.element_ty), mask=inside)


@triton.jit
def load_of_queries(numbers, patch, head):
    """`[block_t]` of one head, from the chunk's part of `[B, H, T]`."""
    base = numbers + (patch.item * patch.heads + head) * patch.sizes.all_queries
    return tl.load(base + patch.t, mask=patch.in_queries, other=0.0)


@triton.jit
def store_of_queries(partial, numbers, index, count, patch):
    """Writes `[block_t]` as number `index` of the `count` that this block of keys says about its queries."""
    block = patch.item * tl.num_programs(0) + tl.program_id(0)
    tl.store(partial + (block * count + index) * patch.sizes.queries + patch.t, numbers, mask=patch.in_queries)


@triton.jit
def store_of_keys(partial, numbers, index, count, patch):
    """Writes `[block_s]` as number `index` of the `count` that this block of queries says about its keys."""
    block = patch.item * tl.num_programs(1) + tl.program_id(1)
    tl.store(partial + (block * count + index) * patch.sizes.keys + patch.s, numbers, mask=patch.in_keys)


@triton.jit
def store_of_factors(
    partial_query,
    partial_key,
    tile,
    grad,
    hidden,
    hidden_grads,
    patch,
    head,
    query_rows: tl.constexpr,
    key_rows: tl.constexpr,
):
    """One head's part of the gradients of a stage's rows: `tile` is what was composed, `grad` that of what came out."""
    query_rank: tl.constexpr = query_rows // 2
    key_rank: tl.constexpr = key_rows // 2
    for rank in tl.static_range(query_rank):
        down = tl.sum(tile * hidden_grads[rank], axis=1)
        store_of_queries(partial_query, down, rank * patch.heads + head, query_rows * patch.heads, patch)
        up = tl.sum(grad * hidden[rank], axis=1)
        store_of_queries(partial_query, up, (query_rank + rank) * patch.heads + head, query_rows * patch.heads, patch)
    for rank in tl.static_range(key_rank):
        down = tl.sum(tile * hidden_grads[query_rank + rank], axis=0)
        store_of_keys(partial_key, down, rank * patch.heads + head, key_rows * patch.heads, patch)
        up = tl.sum(grad * hidden[query_rank + rank], axis=0)
        store_of_keys(partial_key, up, (key_rank + rank) * patch.heads + head, key_rows * patch.heads, patch)
    if query_rows % 2:
        gate = tl.sum(tile * grad, axis=1)
        store_of_queries(partial_query, gate, (query_rows - 1) * patch.heads + head, query_rows * patch.heads, patch)
    if key_rows % 2:
        gate = tl.sum(tile * grad, axis=0)
        store_of_keys(partial_key, gate, (key_rows - 1) * patch.heads + head, key_rows * patch.heads, patch)


@triton.jit
def log_sum_exp(partial, parts, stride, column, inside, columns: tl.constexpr):
    """`[columns]`, of `parts` numbers each that lie `stride` apart; minus infinity where all of them are."""
    highest = tl.full([columns], float("-inf"), tl.float32)
    total = tl.zeros([columns], tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        here = (part[:, None] < parts) & inside[None, :]
        values = tl.load(partial + part[:, None] * stride + column[None, :], mask=here, other=float("-inf"))
        higher = tl.maximum(highest, tl.max(values, axis=0))
        total = total * tl.exp(highest - finite(higher)) + tl.sum(tl.exp(values - finite(higher)[None, :]), axis=0)
        highest = higher
    return finite(highest) + tl.log(total)


@triton.jit
def finite(highest):
    """What can be subtracted from minus infinity."""
    return tl.where(highest == float("-inf"), 0.0, highest)


def loop_bound(count: int) -> Any:
    """`count` as an argument that kernels loop up to: Triton's interpreter needs it as a constant."""
    return tl.constexpr(count) if INTERPRETED else count
