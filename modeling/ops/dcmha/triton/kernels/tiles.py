"""The parts of the kernels in `head_by_head`: tiles `[block_t, block_s]` of one head, and their composition.

Parts that belong together are tuples. A stage is `(down, up, gate)`, each of which is (terms of queries, terms of
keys). A term is (its side, see `_side`; its offset in a panel). The tuples of `arguments` are passed as they are.
"""

from typing import NamedTuple

from ..arguments import PANEL as PANEL_LENGTH

# What runs on the device is typed by Triton's compiler.
# mypy: disable-error-code="no-untyped-def,assignment"

# The other modules of kernels import `triton` and `tl` from here. The import is in a `try`: Transformers does not load
# the code of a published model that imports an absent package elsewhere.
try:
    import triton
    import triton.language as tl
    from triton.language.target_info import is_hip
except ImportError as error:
    raise ImportError("implementation='triton' needs Triton: pip install triton, or use 'chunked'") from error

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# The number of partial results that a program loads at once; with fewer it would wait for memory more often.
PARTS = tl.constexpr(64)
PANEL = tl.constexpr(PANEL_LENGTH)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.constexpr_function
def padded_width(width: int) -> int:
    """The channels of a tile of rows: a power of two, and 16 at least, which is what matrix instructions add up."""
    return max(16, triton.next_power_of_2(width))


class Patch(NamedTuple):
    """The queries and keys of one item that a program works on, counted from the chunk's first ones."""

    item: tl.tensor
    t: tl.tensor  # [block_t]
    s: tl.tensor  # [block_s], columns
    shift: tl.tensor  # add to a column to get its key
    heads: tl.tensor
    sizes: tuple  # `Sizes`


class PatchTables(NamedTuple):
    """Tables by distance for a patch: each is `()`, or (pointer, columns).

    The pointer is to the first head's element for query 0 and column 0 of the chunk.
    """

    composed_bias: tuple
    mixed_bias: tuple
    bias: tuple
    gain: tuple


@triton.jit
def make_patch(sizes, where, heads: tl.constexpr, block_t: tl.constexpr, block_s: tl.constexpr):
    """The patch of this program."""
    t = tl.program_id(1) * block_t + tl.arange(0, block_t)
    s = tl.program_id(0) * block_s + tl.arange(0, block_s)
    shift = shift_of(where, tl.program_id(1) * block_t)
    return Patch(tl.program_id(2).to(tl.int64), t, s, shift, heads, sizes)


@triton.jit
def original(number):
    """The inverse of `arguments.unspecialized`."""
    return number >> 2


@triton.jit
def bound(number):
    """A bound of a loop as `range` takes it: in Triton's interpreter it must not be a tensor."""
    if INTERPRETED:
        return number.handle.data.item()
    return number


@triton.jit
def shift_of(where, query):
    """What to add to a column to get its key, in the row of a query; all are counted from the chunk's first ones."""
    shift = 0
    if where.step is not None:
        shift = query // where.step * where.step
    return shift


@triton.jit
def is_reached(where, query, key, block_t: tl.constexpr, block_s: tl.constexpr):
    """Whether any of `block_t` queries from `query` on is near enough to see any of `block_s` keys from `key` on."""
    back = query + original(where.position) - key
    return (back + block_t > -where.ahead) & (back - block_s < where.behind)


@triton.jit
def make_penalty(where, patch):
    """What to add to scores times log2(e): `[block_t, block_s]`, a mask's bias, and minus infinity for hidden keys."""
    t, key = patch.t[:, None], (patch.s + (patch.shift + original(where.start)))[None, :]
    back, is_real = t + original(where.position) - key, t < original(where.real_queries)
    visible = (back <= where.behind) & (back >= -where.ahead) & (key < original(where.real_keys)) & is_real
    if where.first_real_key is not None:
        visible = visible & (key >= where.first_real_key)
    if where.first_keys is not None:
        first = where.first_keys + (patch.item // where.groups) * where.row_of_first_keys + t
        visible = visible & (key >= tl.load(first, mask=is_real, other=0))
    if where.mask is not None:
        row = (patch.item // where.groups) * where.mask_of_row
        mask = where.mask + row + t.to(tl.int64) * where.mask_of_query + key.to(tl.int64) * where.mask_of_key
        visible = visible & (tl.load(mask, mask=visible, other=0) != 0)
    penalty = tl.where(visible, 0.0, float("-inf"))
    if where.bias is not None:
        row = (patch.item // where.groups) * where.bias_of_row
        bias = where.bias + row + t.to(tl.int64) * where.bias_of_query + key.to(tl.int64) * where.bias_of_key
        penalty += tl.load(bias, mask=visible, other=0.0).to(tl.float32) * LOG2_E
    return penalty


@triton.jit
def make_tables(tables, where, patch):
    """The tables by distance for a patch, from `ColumnTables`."""
    return PatchTables(
        _table(tables.composed_bias, tables, where, patch),
        _table(tables.mixed_bias, tables, where, patch),
        _table(tables.bias, tables, where, patch),
        _table(tables.gain, tables, where, patch),
    )


@triton.jit
def _table(rows, tables, where, patch):
    """A table of a patch, from its rows `[heads of all groups, X]`."""
    table = ()
    if rows is not None:
        columns = original(tables.columns)
        head = patch.item % where.groups * patch.heads
        table = (rows + head * columns + (original(tables.first) + patch.shift), columns)
    return table


@triton.jit
def plus(tile, table, patch, head):
    """Adds one head's elements of a table by distance to a tile `[block_t, block_s]`."""
    if len(table) > 0:
        tile += _by_distance(table, patch, head)
    return tile


@triton.jit
def times(tile, table, patch, head):
    """Multiplies a tile `[block_t, block_s]` by one head's elements of a table by distance."""
    if len(table) > 0:
        tile *= _by_distance(table, patch, head)
    return tile


@triton.jit
def _by_distance(table, patch, head):
    """Loads one head's elements `[block_t, block_s]` of a table: one for each distance, without bounds."""
    return tl.load(table[0] + head * table[1] + (patch.s[None, :] - patch.t[:, None]))


@triton.jit
def make_stage(query_side, key_side, patch, query_count: tl.constexpr, key_count: tl.constexpr):
    """A stage as (down, up, gate), from panels `[items, H, panels, terms, PANEL]` of queries and of keys."""
    query, key = tl.program_id(1) * patch.t.shape[0], tl.program_id(0) * patch.s.shape[0] + patch.shift
    queries = _side(query_side, patch, query, patch.t.shape[0], patch.sizes.all_queries, query_count)
    keys = _side(key_side, patch, key, patch.s.shape[0], patch.sizes.all_keys, key_count)
    query_rank: tl.constexpr = query_count // 2
    key_rank: tl.constexpr = key_count // 2
    down = (_terms(queries, 0, query_rank), _terms(keys, 0, key_rank))
    up = (_terms(queries, query_rank, 2 * query_rank), _terms(keys, key_rank, 2 * key_rank))
    gate = (_terms(queries, 2 * query_rank, query_count), _terms(keys, 2 * key_rank, key_count))
    return (down, up, gate)


@triton.jit
def _side(panels, patch, position, block: tl.constexpr, length, count: tl.constexpr):
    """(pointer to the first head's panels at `position`, offsets `[block]` of the positions, stride between heads)."""
    side = ()
    if count > 0:
        positions = tl.arange(0, block)
        offsets = positions // PANEL * (count * PANEL) + positions % PANEL
        first = (patch.item * patch.heads * length + position) * count
        side = (panels + first, offsets, count * length)
    return side


@triton.jit
def transposed(stage):
    """The stage whose composition is the transpose of this one's."""
    return (stage[1], stage[0], stage[2])


@triton.jit
def _terms(side, first: tl.constexpr, last: tl.constexpr):
    """Terms `first` up to `last` of a side, each of them as (side, offset in a panel)."""
    terms = ()
    for index in tl.static_range(first, last):
        terms += ((side, index * PANEL),)
    return terms


@triton.jit
def _factor(term, head):
    """One head's factor of each query, `[block_t]`, or of each key, `[block_s]`."""
    side, place = term
    return tl.load(side[0] + head * side[2] + side[1] + place)


@triton.jit
def no_hidden(stage, block_t: tl.constexpr, block_s: tl.constexpr):
    """Zeros `[block_t, block_s]` for each hidden map of a stage: those of queries' terms, then those of keys' terms."""
    hidden = ()
    for _ in tl.static_range(len(stage[0][0]) + len(stage[0][1])):
        hidden += (tl.zeros([block_t, block_s], tl.float32),)
    return hidden


@triton.jit
def gather(hidden, tile, down, head):
    """Adds one head's tile `[block_t, block_s]` times its factors to the hidden maps."""
    gathered = ()
    for index in tl.static_range(len(down[0])):
        gathered += (hidden[index] + tile * _factor(down[0][index], head)[:, None],)
    for index in tl.static_range(len(down[1])):
        gathered += (hidden[len(down[0]) + index] + tile * _factor(down[1][index], head)[None, :],)
    return gathered


@triton.jit
def hidden_maps(maps, bias, stage, patch, heads: tl.constexpr, block_t: tl.constexpr, block_s: tl.constexpr):
    """The hidden maps `[block_t, block_s]` of a patch of `[items, H, c, n]`, which a bias by distance is added to."""
    hidden = no_hidden(stage, block_t, block_s)
    if len(hidden) > 0:
        for head in range(heads):
            hidden = gather(hidden, plus(load(maps, patch, head), bias, patch, head), stage[0], head)
    return hidden


@triton.jit
def mixed(maps, bias, tile, patch, head):
    """What a composition is without low-rank terms and gates: the head's `tile`, plus the static matrix's part if any.

    `maps` are `Statics.scores` or `Statics.grads`, which have both; None without a static matrix. `bias` is the table
    `mixed_bias`, or `()`.
    """
    base = tile
    if maps is not None:
        base = plus(load(maps, patch, head), bias, patch, head)
    return base


@triton.jit
def compose(tile, base, hidden, stage, head):
    """One head of a composition, `[block_t, block_s]`, from its tile, its `mixed` tile and the hidden maps of all."""
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
def composed_score(scores, hidden, pre, statics, tables, patch, head):
    """One head of the composed scores `[block_t, block_s]`, with every bias by distance."""
    score = plus(load(scores, patch, head), tables.composed_bias, patch, head)
    base = mixed(statics.scores, tables.mixed_bias, score, patch, head)
    return plus(compose(score, base, hidden, pre, head), tables.bias, patch, head)


@triton.jit
def probability(scores, hidden, pre, softmax, statics, tables, patch, head):
    """One head of the softmax over composed scores, `[block_t, block_s]`; `softmax` is (log-sum-exp, penalty)."""
    lse, penalty = softmax
    composed = composed_score(scores, hidden, pre, statics, tables, patch, head)
    return exp2(composed * LOG2_E + (penalty - load_of_queries(lse, patch, head)[:, None] * LOG2_E))


@triton.jit
def product(left, right):
    """A matrix product, or one for each index of the first axis, added up in float32."""
    if INTERPRETED:  # The interpreter would multiply the bit patterns of bfloat16.
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def exp2(exponent):
    """Two to a power, by a single instruction; on NVIDIA's GPUs results below 2^-126 are zero."""
    if INTERPRETED or is_hip():
        power = tl.exp2(exponent)
    else:
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [exponent], dtype=tl.float32, is_pure=True, pack=1
        )
    return power


@triton.jit
def load(maps, patch, head):
    """Loads one head's tile `[block_t, block_s]` of maps `[items, H, c, n]` in float32."""
    return tl.load(_tile(maps, patch, head)).to(tl.float32)


@triton.jit
def store(maps, tile, patch, head):
    """Writes `[block_t, block_s]` where `load` reads it."""
    tl.store(_tile(maps, patch, head), rounded(tile, maps.dtype.element_ty))


@triton.jit
def rounded(tile, dtype: tl.constexpr):
    """Rounds to the nearest value of a dtype, also in Triton's interpreter, which truncates to bfloat16."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = tile.to(tl.int32, bitcast=True)
        tile = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return tile.to(dtype)


@triton.jit
def _tile(maps, patch, head):
    """Pointers `[block_t, block_s]` to one head's tile of maps `[items, H, c, n]`."""
    base = maps + (patch.item * patch.heads + head) * patch.sizes.queries * patch.sizes.keys
    return base + (patch.t[:, None] * patch.sizes.keys + patch.s[None, :])


@triton.jit
def load_of_queries(elements, patch, head):
    """Loads `[block_t]` of one head from the chunk's part of `[B, H, T]`."""
    return tl.load(elements + (patch.item * patch.heads + head) * patch.sizes.all_queries + patch.t)


@triton.jit
def store_of_queries(partial, elements, index, count, patch):
    """Writes `[block_t]` as entry `index` of `count` of this block of keys, in `[items, blocks, count, c]`."""
    block = patch.item * tl.num_programs(0) + tl.program_id(0)
    tl.store(partial + (block * count + index) * patch.sizes.queries + patch.t, elements)


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
    query_count: tl.constexpr,
    key_count: tl.constexpr,
):
    """Writes one head's part of the gradients of a stage's terms, summed over the patch.

    `tile` `[block_t, block_s]` is the composition's input and `grad` the gradient of its output. `partial_query` and
    `partial_key` are `[patches, H, terms, block_t]` and `[patches, H, terms, block_s]`.
    """
    query_rank: tl.constexpr = query_count // 2
    key_rank: tl.constexpr = key_count // 2
    for rank in tl.static_range(query_rank):
        pair = tl.sum(tl.join(tile * hidden_grads[rank], grad * hidden[rank]), axis=1)
        _store_pair(partial_query, pair, patch, head, rank, query_rank, query_count)
    for rank in tl.static_range(key_rank):
        pair = tl.sum(tl.join(tile * hidden_grads[query_rank + rank], grad * hidden[query_rank + rank]), axis=0)
        _store_pair(partial_key, pair, patch, head, rank, key_rank, key_count)
    if query_count % 2:
        _store_gate(partial_query, tl.sum(tile * grad, axis=1), patch, head, query_count)
    if key_count % 2:
        _store_gate(partial_key, tl.sum(tile * grad, axis=0), patch, head, key_count)


@triton.jit
def _store_pair(partial, pair, patch, head, rank: tl.constexpr, ranks: tl.constexpr, count: tl.constexpr):
    """Writes `[block, 2]` as the terms `down` and `up` of a rank to this patch's `[H, terms, block]`."""
    block: tl.constexpr = pair.shape[0]
    first = _patch_index(patch) * (patch.heads * count * block) + head * (count * block)
    tl.store(partial + first + tl.arange(0, block)[:, None] + (rank + ranks * tl.arange(0, 2)[None, :]) * block, pair)


@triton.jit
def _store_gate(partial, gate, patch, head, count: tl.constexpr):
    """Writes `[block]` as the last term of this patch's `[H, terms, block]`."""
    block: tl.constexpr = gate.shape[0]
    first = _patch_index(patch) * (patch.heads * count * block) + head * (count * block)
    tl.store(partial + first + tl.arange(0, block) + (count - 1) * block, gate)


@triton.jit
def _patch_index(patch):
    """The patch's index, which counts along the keys first, then along the queries, then along the items."""
    return (patch.item * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)


@triton.jit
def log_sum_exp(partial, parts, stride, column, inside, columns: tl.constexpr):
    """The log-sum-exp `[columns]` over `parts` elements that are `stride` apart; minus infinity if all of them are."""
    highest = tl.full([columns], float("-inf"), tl.float32)
    total = tl.zeros([columns], tl.float32)
    for first in range(0, bound(parts), PARTS):
        part = first + tl.arange(0, PARTS)
        here = (part[:, None] < parts) & inside[None, :]
        values = tl.load(partial + part[:, None] * stride + column[None, :], mask=here, other=float("-inf"))
        higher = tl.maximum(highest, tl.max(values, axis=0))
        total = total * tl.exp(highest - finite(higher)) + tl.sum(tl.exp(values - finite(higher)[None, :]), axis=0)
        highest = higher
    return finite(highest) + tl.log(total)


@triton.jit
def finite(highest):
    """Maxima with zeros for minus infinity, so that they can be subtracted from scores that are all minus infinity."""
    return tl.where(highest == float("-inf"), 0.0, highest)
