"""The kernels of `dcmha_triton` for decoding: one query of each item against a cache.

    dcmha_decode_scores   s = q k; x = pre(s), written; the log-sum-exp of each head over the keys of one split
    dcmha_decode_outputs  p = exp(x - lse); a = post(p), written over x; a v, summed over the keys of one split
    dcmha_decode_sum      the sum over splits

A program has all heads of its keys, since composition mixes heads for each key on its own. Scores are `[B, S, H]`: a
tile of all heads of some keys is then contiguous, as the keys' factors are. Matrix instructions need at least 16 rows:
the heads that share a key head are padded with zeros.

Stages are a `DecodeStage`, `where` a `DecodeMask`, `pages` a `DecodePages` or None, `tables` a `DecodeTables` and
`sizes` a `CacheSizes` of the module `decode`, where shapes are. Strides are those between items, heads and positions.
With pages, keys and values are the rows of all pages, which a table assigns to items, and strides are those between
rows and heads; a row has its token's factors behind the channels of each head. `DESIGN.md`, "Decoding", tells why
scores and outputs take two kernels.
"""

# What runs on the device is typed by Triton's compiler.
# mypy: disable-error-code="no-untyped-def,assignment"

from .tiles import PARTS, bound, finite, log_sum_exp, original, product, tl, triton


@triton.jit
def dcmha_decode_scores(
    query,  # [B, H, 1, D]
    key,  # [B, H_kv, S, D]
    scores,  # [B, S, H], written, float32: composed scores, minus infinity for hidden keys
    partial_lse,  # [B, splits, H], written, float32
    pre,  # `DecodeStage`
    where,  # `DecodeMask`
    pages,  # `DecodePages` or None
    sizes,  # `CacheSizes`
    query_strides,
    key_strides,
    tables,  # `DecodeTables`
    scaling,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    width: tl.constexpr,
    query_rank: tl.constexpr,
    key_rank: tl.constexpr,
    groups: tl.constexpr,
    block_s: tl.constexpr,
    block_h: tl.constexpr,
    block_g: tl.constexpr,
    block_d: tl.constexpr,
):
    """Composed scores of one split's keys, and their log-sum-exp."""
    item, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = _end_of(pages, sizes, item)
    members = tl.arange(0, block_g)
    column = tl.arange(0, block_d)
    repeats: tl.constexpr = heads // kv_heads
    # One loop over key heads and blocks lets the compiler load the next block during the product of this one.
    for step in range(kv_heads * bound(sizes.blocks)):
        kv_head = step // sizes.blocks
        block = step - kv_head * sizes.blocks
        head = kv_head * repeats + members
        row = _rows_of(query, query_strides, item, head)[:, None] + column[None, :]
        rows = tl.load(row, mask=(members[:, None] < repeats) & (column[None, :] < width), other=0.0)
        s = _keys_of(split, block, sizes, block_s)
        inside = (column[:, None] < width) & (s[None, :] < end)
        place = _positions(pages, key_strides, item, s, end)
        here = _rows_of(key, key_strides, _item_of(pages, item), kv_head) + place[None, :] + column[:, None]
        score = product(rows, tl.load(here, mask=inside, other=0.0)) * scaling
        at = _place(scores, item, s, sizes, heads)[None, :] + head[:, None]
        tl.store(at, score, mask=(members[:, None] < repeats) & (s[None, :] < end))
    # The loop below reads scores that other threads have written.
    tl.debug_barrier()
    every = tl.arange(0, block_h)
    highest = tl.full([block_h], float("-inf"), tl.float32)
    total = tl.zeros([block_h], tl.float32)
    for block in range(bound(sizes.blocks)):
        s = _keys_of(split, block, sizes, block_s)
        at = _place(scores, item, s, sizes, heads)[:, None] + every[None, :]
        inside = (s[:, None] < end) & (every[None, :] < heads)
        maps = tl.load(at, mask=inside, other=0.0)
        if tables.composed_bias is not None:
            maps += _by_distance(tables.composed_bias, tables.bias_rows, tables, s, end, every, heads)
        rows = _paged_rows(pages, key_strides, item, s, end)
        composed = _compose(maps, pre, item, s, rows, every, end, heads, kv_heads, width, query_rank, key_rank, groups)
        if tables.bias is not None:
            composed += _by_distance(tables.bias, tables.bias_rows, tables, s, end, every, heads)
        composed = _hide(composed, where, item, s, end)
        # They overwrite scores safely, for the same reason as probabilities do in `dcmha_matrix_probs`.
        tl.store(at, composed, mask=inside)
        higher = tl.maximum(highest, tl.max(composed, axis=0))
        total = total * tl.exp(highest - finite(higher)) + tl.sum(tl.exp(composed - finite(higher)[None, :]), axis=0)
        highest = higher
    lse = partial_lse + (item * sizes.splits + split) * heads + every
    tl.store(lse, finite(highest) + tl.log(total), mask=every < heads)


@triton.jit
def dcmha_decode_outputs(
    scores,  # [B, S, H], float32: composed scores, overwritten by composed probabilities
    partial_lse,  # [B, splits, H], float32
    value,  # [B, H_kv, S, D]
    partial,  # [B, splits, H, D], written
    post,  # `DecodeStage`
    pages,  # `DecodePages` or None
    sizes,  # `CacheSizes`
    value_strides,
    tables,  # `DecodeTables`
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    width: tl.constexpr,
    query_rank: tl.constexpr,
    key_rank: tl.constexpr,
    groups: tl.constexpr,
    block_s: tl.constexpr,
    block_h: tl.constexpr,
    block_g: tl.constexpr,
    block_d: tl.constexpr,
):
    """The part of the output that comes from one split's keys."""
    item, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = _end_of(pages, sizes, item)
    head = tl.arange(0, block_h)
    lse = finite(
        log_sum_exp(partial_lse + item * sizes.splits * heads, sizes.splits, heads, head, head < heads, block_h)
    )
    for block in range(bound(sizes.blocks)):
        s = _keys_of(split, block, sizes, block_s)
        at = _place(scores, item, s, sizes, heads)[:, None] + head[None, :]
        inside = (s[:, None] < end) & (head[None, :] < heads)
        probs = tl.exp(tl.load(at, mask=inside, other=float("-inf")) - lse[None, :])
        if tables.gain is not None:
            probs *= _by_distance(tables.gain, tables.gain_rows, tables, s, end, head, heads)
        rows = _paged_rows(pages, value_strides, item, s, end)
        composed = _compose(probs, post, item, s, rows, head, end, heads, kv_heads, width, query_rank, key_rank, groups)
        # Probabilities overwrite scores safely, for the same reason as in `dcmha_matrix_probs`.
        tl.store(at, composed, mask=inside)
    # The loop below reads probabilities that other threads have written.
    tl.debug_barrier()
    members = tl.arange(0, block_g)
    column = tl.arange(0, block_d)
    repeats: tl.constexpr = heads // kv_heads
    output = tl.zeros([block_g, block_d], tl.float32)
    # One loop over value heads and blocks lets the compiler load the next block during the product of this one.
    for step in range(kv_heads * bound(sizes.blocks)):
        kv_head = step // sizes.blocks
        block = step - kv_head * sizes.blocks
        member = kv_head * repeats + members
        s = _keys_of(split, block, sizes, block_s)
        at = _place(scores, item, s, sizes, heads)[None, :] + member[:, None]
        probs = tl.load(at, mask=(members[:, None] < repeats) & (s[None, :] < end), other=0.0)
        place = _positions(pages, value_strides, item, s, end)
        row = _rows_of(value, value_strides, _item_of(pages, item), kv_head) + place[:, None]
        real = (s[:, None] < end) & (column[None, :] < width)
        rows = tl.load(row + column[None, :], mask=real, other=0.0)
        output = tl.where(block == 0, 0.0, output) + product(probs.to(rows.dtype), rows)
        result = partial + ((item * sizes.splits + split) * heads + member)[:, None] * width + column[None, :]
        written = tl.where(block == sizes.blocks - 1, repeats, 0)  # the sum is complete after the last block
        inside = (members[:, None] < written) & (column[None, :] < width)
        tl.store(result, output.to(partial.dtype.element_ty), mask=inside)


@triton.jit
def dcmha_decode_sum(
    partial,  # [B, splits, H, D], float32
    output,  # [B, 1, H, D], written
    splits,
    heads: tl.constexpr,
    width: tl.constexpr,
    block_d: tl.constexpr,
):
    """Some channels of one head's output: the sum over splits, always in the same order."""
    item, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * block_d + tl.arange(0, block_d)
    total = tl.zeros([PARTS, block_d], tl.float32)
    for first in range(0, bound(splits), PARTS):
        split = first + tl.arange(0, PARTS)
        at = partial + ((item * splits + split) * heads + head)[:, None] * width + column[None, :]
        total += tl.load(at, mask=(split[:, None] < splits) & (column[None, :] < width), other=0.0)
    result = tl.sum(total, axis=0).to(output.dtype.element_ty)
    tl.store(output + (item * heads + head) * width + column, result, mask=column < width)


@triton.jit
def _rows_of(rows, strides, item, head):
    """Pointers to the first row of one head or of `[heads]`; in 64 bits, since heads of a cache may be far apart."""
    return rows + item * strides[0] + tl.cast(head, tl.int64) * strides[1]


@triton.jit
def _keys_of(split, block, sizes, block_s: tl.constexpr):
    """The positions `[block_s]` of a block's keys in the cache."""
    return original(sizes.first) + ((split * sizes.blocks + block) * block_s + tl.arange(0, block_s)).to(tl.int64)


@triton.jit
def _place(scores, item, s, sizes, heads: tl.constexpr):
    """Pointers `[block_s]` to the scores of each key in `[B, S, H]`."""
    return scores + (item * (original(sizes.keys) - original(sizes.first)) + s - original(sizes.first)) * heads


@triton.jit
def _end_of(pages, sizes, item):
    """The end of the item's keys; with pages, each request has an end of its own."""
    end = original(sizes.keys)
    if pages is not None:
        end = tl.load(pages.bounds + item * 2 + 1)
    return end


@triton.jit
def _item_of(pages, item):
    """The item from which pointers to rows start; with pages 0, because offsets count from the first of all rows."""
    first = item
    if pages is not None:
        first = 0
    return first


@triton.jit
def _positions(pages, strides, item, s, end):
    """Offsets `[block_s]` of the rows of keys, to be added to a pointer of `_rows_of`."""
    place = s * strides[2]
    if pages is not None:
        table = pages.table + tl.load(pages.bounds + item * 2)
        place = tl.load(table + s, mask=s < end, other=0) * strides[0]
    return place


@triton.jit
def _paged_rows(pages, strides, item, s, end):
    """Offsets `[block_s]` of the rows that hold the factors of keys; None without pages: factors are tensors then."""
    rows = None
    if pages is not None:
        rows = _positions(pages, strides, item, s, end)
    return rows


@triton.jit
def _by_distance(table, rows, tables, s, end, head, heads: tl.constexpr):
    """The elements `[block_s, heads]` of a table `[L, H]` for the distances from the query to some keys."""
    position = end - 1
    if tables.position is not None:
        position = tl.load(tables.position)
    distance = tl.minimum(tl.maximum(position - s, 0), original(rows) - 1)
    inside = (s[:, None] < end) & (head[None, :] < heads)
    return tl.load(table + distance[:, None] * heads + head[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _hide(composed, where, item, s, end):
    """Adds the bias to scores `[block_s, heads]`, and sets those of hidden keys to minus infinity."""
    visible = s < end
    if where.mask is not None:
        mask = tl.load(where.mask + item * where.mask_strides[0] + s * where.mask_strides[1], mask=visible, other=0)
        visible = visible & (mask != 0)
    if where.first_keys is not None:
        visible = visible & (s >= tl.load(where.first_keys + item))
    if where.bias is not None:
        bias = where.bias + item * where.bias_strides[0] + s * where.bias_strides[1]
        composed += tl.load(bias, mask=visible, other=0.0).to(tl.float32)[:, None]
    return tl.where(visible[:, None], composed, float("-inf"))


@triton.jit
def _compose(
    maps,
    stage,
    item,
    s,
    rows,
    head,
    end,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    width: tl.constexpr,
    query_rank: tl.constexpr,
    key_rank: tl.constexpr,
    groups: tl.constexpr,
):
    """The composition of all heads of some keys' maps, `[block_s, heads]`."""
    composed = maps
    in_keys = s[:, None] < end
    of_query = item * stage.query.item_stride + head[None, :]
    of_key = _of_keys(stage.key, item, s, rows, head)
    # Channels of a head that hold the packed terms of a row: `key_rank` down, as many up, and a gate.
    extra: tl.constexpr = (2 * key_rank + (stage.key.gate is not None)) * (heads // kv_heads)
    for group in tl.static_range(groups):
        inside = (head[None, :] < heads) & (head[None, :] // (heads // groups) == group)
        for rank in tl.static_range(query_rank):
            at = of_query + rank * stage.query.term_stride
            composed += _low_rank(maps, stage.query.down + at, stage.query.up + at, inside)
        for rank in tl.static_range(key_rank):
            down = of_key + _of_term(stage.key, rows, head, rank, rank, heads, width, extra)
            up = of_key + _of_term(stage.key, rows, head, rank, key_rank + rank, heads, width, extra)
            composed += _low_rank(maps, stage.key.down + down, stage.key.up + up, inside & in_keys)
    inside = head[None, :] < heads
    if stage.query.gate is not None:
        composed += maps * tl.load(stage.query.gate + of_query, mask=inside, other=0.0).to(tl.float32)
    if stage.key.gate is not None:
        gate = of_key + _of_term(stage.key, rows, head, 0, 2 * key_rank, heads, width, extra)
        composed += maps * tl.load(stage.key.gate + gate, mask=inside & in_keys, other=0.0).to(tl.float32)
    if stage.static is not None:
        for other in range(heads):
            theirs = tl.sum(tl.where(head[None, :] == other, maps, 0.0), axis=1)
            static = tl.load(stage.static + other * heads + head[None, :], mask=inside, other=0.0)
            composed += theirs[:, None] * static.to(tl.float32)
    return composed


@triton.jit
def _of_keys(side, item, s, rows, head):
    """Offsets of the factors of keys, `[block_s, heads]`, or of the rows that hold them, `[block_s, 1]`."""
    if rows is None:
        offsets = item * side.item_stride + s[:, None] * side.token_stride + head[None, :]
    else:
        offsets = rows[:, None]
    return offsets


@triton.jit
def _of_term(
    side,
    rows,
    head,
    rank: tl.constexpr,
    term: tl.constexpr,
    heads: tl.constexpr,
    width: tl.constexpr,
    extra: tl.constexpr,
):
    """The offset of a factor from `_of_keys`: of factor `rank` in a tensor, or `[1, heads]` for `term` of a row."""
    if rows is None:
        offset = rank * side.term_stride
    else:
        packed = term * heads + head
        offset = (packed // extra * side.term_stride + width + packed % extra)[None, :]
    return offset


@triton.jit
def _low_rank(maps, down, up, inside):
    """A low-rank term `[block_s, heads]`: the sum over heads of maps times `down`, times `up`."""
    hidden = tl.sum(maps * tl.load(down, mask=inside, other=0.0).to(tl.float32), axis=1)
    return hidden[:, None] * tl.load(up, mask=inside, other=0.0).to(tl.float32)


DECODE_KERNELS = {
    "dcmha_decode_scores": dcmha_decode_scores,
    "dcmha_decode_outputs": dcmha_decode_outputs,
    "dcmha_decode_sum": dcmha_decode_sum,
}
