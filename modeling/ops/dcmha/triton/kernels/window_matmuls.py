"""Kernels of `dcmha_triton` for causal windows: the matrix products of queries, keys and values with maps.

Column `s` of row `t` of a map is key `s + t // step * step`, counted from the chunk's first key (`WindowTiling`).

    dcmha_window_maps     z[t, s] = x[t] . y[key(t, s)]              scores, gradients of composed probabilities
    dcmha_window_queries  x[t] = sum_s z[t, s] y[key(t, s)]          output, gradients of queries
    dcmha_window_keys     y[k] = sum_{key(t, s) = k} z[t, s] x[t]    gradients of values and of keys

Rows are read in place, and tiles of maps are skipped if none of their queries can see any of their keys.
`dcmha_window_keys` sums over the heads that share a key head. The number of channels is padded to a power of two.

All three take strides between items, heads and positions, `sizes` (`Sizes`) and `where` (`Visibility`). `DESIGN.md`,
"Windows", tells why they are not products of cuBLAS, and not one kernel with the composition.
"""

from .tiles import is_reached, original, padded_width, product, rounded, shift_of, tl, triton

# What runs on the device is typed by Triton's compiler.
# mypy: disable-error-code="no-untyped-def"


@triton.jit
def places_of(rows, strides, item, head, positions, is_real, width: tl.constexpr):
    """(pointers, whether they are real), both `[block, filled]`, of rows of one head in `[B, H, T, D]`.

    `filled` is `padded_width(width)`; strides are those between items, heads and positions.
    """
    channel = tl.arange(0, padded_width(width))[None, :]
    first = rows + item * strides[0] + tl.cast(head, tl.int64) * strides[1]
    return first + (positions.to(tl.int64)[:, None] * strides[2] + channel), is_real[:, None] & (channel < width)


@triton.jit
def load_rows(places):
    """Loads `[block, filled]`, with zeros where places are not real."""
    return tl.load(places[0], mask=places[1], other=0.0)


@triton.jit
def store_rows(places, rows):
    """Writes `[block, filled]` where `load_rows` reads it."""
    tl.store(places[0], rounded(rows, places[0].dtype.element_ty), mask=places[1])


@triton.jit
def is_key(positions, where):
    """Which of the positions `[block]` are those of real keys."""
    return (positions >= 0) & (positions < original(where.real_keys))


@triton.jit
def tile_of(maps, plane, t, s, sizes):
    """Pointers `[block_t, block_s]` to a tile of maps `[items, H, c, n]`; a plane is one head's map of one item."""
    return maps + plane.to(tl.int64) * sizes.queries * sizes.keys + (t[:, None] * sizes.keys + s[None, :])


@triton.jit
def dcmha_window_maps(
    left,  # [items, H, c of T, D]
    right,  # [items, H_kv, S, D]
    maps,  # [items, H, c, n], written
    left_strides,
    right_strides,
    sizes,
    where,
    scaling,
    heads: tl.constexpr,
    share: tl.constexpr,
    width: tl.constexpr,
    block_t: tl.constexpr,
    block_s: tl.constexpr,
):
    """A tile of one head's map: scaled products of its queries' rows with its keys' rows."""
    item, head = (tl.program_id(2) // heads).to(tl.int64), tl.program_id(2) % heads
    t, s = tl.program_id(1) * block_t + tl.arange(0, block_t), tl.program_id(0) * block_s + tl.arange(0, block_s)
    key = s + shift_of(where, tl.program_id(1) * block_t) + original(where.start)
    of_queries = load_rows(places_of(left, left_strides, item, head, t, t < original(where.real_queries), width))
    of_keys = load_rows(places_of(right, right_strides, item, head // share, key, is_key(key, where), width))
    tile = product(of_queries, tl.trans(of_keys)) * scaling
    tl.store(tile_of(maps, tl.program_id(2), t, s, sizes), rounded(tile, maps.dtype.element_ty))


@triton.jit
def dcmha_window_queries(
    maps,  # [items, H, c, n]
    right,  # [items, H_kv, S, D]
    rows,  # [items, H, c of T, D], written
    right_strides,
    strides,
    sizes,
    where,
    scaling,
    heads: tl.constexpr,
    share: tl.constexpr,
    width: tl.constexpr,
    reach: tl.constexpr,
    block_t: tl.constexpr,
    block_s: tl.constexpr,
):
    """Writes the rows of one head's queries: scaled sums over the keys of their block."""
    plane, first = tl.program_id(1), tl.program_id(0) * block_t
    item, head, t = (plane // heads).to(tl.int64), plane % heads, first + tl.arange(0, block_t)
    start = shift_of(where, first) + original(where.start)
    total = tl.zeros([block_t, padded_width(width)], tl.float32)
    for column in range(0, reach, block_s):
        if is_reached(where, first, start + column, block_t, block_s):
            s = column + tl.arange(0, block_s)
            key = start + s
            of_keys = load_rows(places_of(right, right_strides, item, head // share, key, is_key(key, where), width))
            total += product(tl.load(tile_of(maps, plane, t, s, sizes)), of_keys)
    store_rows(places_of(rows, strides, item, head, t, t < original(where.real_queries), width), total * scaling)


@triton.jit
def dcmha_window_keys(
    maps,  # [items, H, c, n]
    left,  # [items, H, c of T, D]
    rows,  # [items, H_kv, S, D], written, or added to
    left_strides,
    strides,
    sizes,
    where,
    scaling,
    heads: tl.constexpr,
    share: tl.constexpr,
    width: tl.constexpr,
    step: tl.constexpr,
    reach: tl.constexpr,
    is_added: tl.constexpr,
    block_t: tl.constexpr,
    block_s: tl.constexpr,
):
    """Writes rows of one key head: scaled sums over the queries whose blocks reach them, in all heads that share it."""
    first, kv_heads = tl.program_id(0) * block_s, heads // share
    item, kv_head = (tl.program_id(1) // kv_heads).to(tl.int64), tl.program_id(1) % kv_heads
    total = tl.zeros([block_s, padded_width(width)], tl.float32)
    for member in range(share):
        head = kv_head * share + member
        for back in range((reach + step - 1) // step):
            block = first // step - back
            column = first - block * step
            if (block >= 0) & (block * step < sizes.queries) & (column < reach):
                for inside in range(0, step, block_t):
                    query = block * step + inside
                    if is_reached(where, query, original(where.start) + first, block_t, block_s):
                        t = query + tl.arange(0, block_t)
                        tile = tl.load(tile_of(maps, item * heads + head, t, column + tl.arange(0, block_s), sizes))
                        of_queries = places_of(
                            left, left_strides, item, head, t, t < original(where.real_queries), width
                        )
                        total += product(tl.trans(tile), load_rows(of_queries))
    key = original(where.start) + first + tl.arange(0, block_s)
    places = places_of(rows, strides, item, kv_head, key, is_key(key, where), width)
    total *= scaling
    if is_added:
        total += load_rows(places)
    store_rows(places, total)


WINDOW_KERNELS = {
    "dcmha_window_maps": dcmha_window_maps,
    "dcmha_window_queries": dcmha_window_queries,
    "dcmha_window_keys": dcmha_window_keys,
}
