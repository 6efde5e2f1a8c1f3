"""Kernels of a forward pass that keeps no maps: everything between the inputs and the output, for all heads at once.

A program owns `block_t` queries of all heads and goes through the keys that they reach, `block_s` at a time. Maps are
computed, composed and consumed in registers and shared memory:

    s[h, t, :] = scaling q[h, t] . k[h, :]            a product for each head
    x[t, s, :] = (Q[t] + K[s]) s[t, s, :]             a product for each query and terms of each key: `tensor_cores`
    lse[h, t] = log sum_s exp(x[h, t, s])             `dcmha_fused_statistics`
    p = exp(x - lse)
    a[t, s, :] = (Q'[t] + K'[s]) p[t, s, :]
    o[h, t] = sum_s a[h, t, s] v[h, s]                `dcmha_fused_output`, which computes x again

The second kernel needs the result of the first: composition mixes heads with different normalizers, which depend on all
keys. The heads of a patch are padded to 16 or 32, and the channels to a power of two.

Both take strides between items, heads and positions, and `mixing` (`Mixing`), `sizes` (`Sizes`), `where` (`Visibility`)
and `key_counts`, as the kernels of `tensor_cores` do. `DESIGN.md`, "Without maps", has their memory, their instructions
and the reasons.
"""

from .matrix_tiles import compose, exponents, gather, load_key_terms, load_matrices, load_of_queries
from .tiles import LOG2_E, Patch, bound, exp2, finite, original, padded_width, product, rounded

# What runs on the device is typed by Triton's compiler.
# mypy: disable-error-code="no-untyped-def"

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("implementation='triton' needs Triton: pip install triton, or use 'chunked'") from error


@triton.jit
def make_patch(keys, sizes, heads: tl.constexpr, block_t: tl.constexpr):
    """The queries of this program and some keys `[block_s]`. Later queries, which see more keys, are run first."""
    t = (tl.num_programs(0) - 1 - tl.program_id(0)) * block_t + tl.arange(0, block_t)
    return Patch(tl.program_id(1).to(tl.int64), t, keys, 0, heads, sizes)


@triton.jit
def reached_keys(where, patch, block_t: tl.constexpr, block_s: tl.constexpr):
    """The first key that the program's queries may see, rounded down to whole blocks, and the end of these keys."""
    query = (tl.num_programs(0) - 1 - tl.program_id(0)) * block_t + original(where.position)
    first = tl.maximum(query - where.behind, 0)
    if where.first_keys is not None:
        place = where.first_keys + (patch.item // where.groups) * where.row_of_first_keys + patch.t
        real = patch.t < original(where.real_queries)
        first = tl.maximum(first, tl.min(tl.load(place, mask=real, other=original(where.real_keys)), axis=0))
    last = tl.minimum(query + block_t + where.ahead, original(where.real_keys))
    return first // block_s * block_s, tl.maximum(last, 0)


@triton.jit
def places_of(
    rows, strides, item, positions, heads: tl.constexpr, share: tl.constexpr, padded: tl.constexpr, width: tl.constexpr
):
    """Pointers `[padded, block, filled]` to rows of all heads in `[B, H, T, D]`, of which `share` heads share one."""
    head = tl.minimum(tl.arange(0, padded), heads - 1)[:, None, None] // share
    channel = tl.arange(0, padded_width(width))[None, None, :]
    inside = head.to(tl.int64) * strides[1] + (positions.to(tl.int64)[None, :, None] * strides[2] + channel)
    return rows + item * strides[0] + inside


@triton.jit
def are_inside(positions, length, heads: tl.constexpr, padded: tl.constexpr, width: tl.constexpr):
    """Which entries `[padded, block, filled]` of `places_of` are those of real heads, positions and channels."""
    inside = (positions < length)[None, :, None]
    if heads != padded:
        inside = inside & (tl.arange(0, padded) < heads)[:, None, None]
    if width != padded_width(width):
        inside = inside & (tl.arange(0, padded_width(width)) < width)[None, None, :]
    return inside


@triton.jit
def load_rows(
    rows,
    strides,
    item,
    positions,
    length,
    heads: tl.constexpr,
    share: tl.constexpr,
    padded: tl.constexpr,
    width: tl.constexpr,
):
    """Loads `[padded, block, filled]` of all heads; zero for padding, and for positions from `length` on."""
    place = places_of(rows, strides, item, positions, heads, share, padded, width)
    return tl.load(place, mask=are_inside(positions, length, heads, padded, width), other=0.0)


@triton.jit
def by_query(tiles):
    """Returns `[padded, block_t, block_s]` as `[block_t, block_s, padded]`."""
    return tl.permute(tiles, (1, 2, 0))


@triton.jit
def dcmha_fused_statistics(
    query,  # [items, H, T, D]
    key,  # [items, H_kv, S, D]
    lse,  # [items, H, T with padding], float32, written
    mixing,
    query_strides,
    key_strides,
    sizes,
    where,
    scaling,
    heads: tl.constexpr,
    share: tl.constexpr,
    width: tl.constexpr,
    padded: tl.constexpr,
    block_t: tl.constexpr,
    block_s: tl.constexpr,
    key_counts: tl.constexpr,
):
    """The log-sum-exp of each row of composed scores; zero where all keys are hidden."""
    dtype: tl.constexpr = tl.float32 if query.dtype.element_ty == tl.float32 else tl.float16
    here = make_patch(tl.arange(0, block_s), sizes, heads, block_t)
    real_queries, real_keys = original(where.real_queries), original(where.real_keys)
    queries = load_rows(query, query_strides, here.item, here.t, real_queries, heads, 1, padded, width)
    pre_query = load_matrices(mixing.pre_query, here.item, here.t, sizes.all_queries, padded)
    highest = tl.full([block_t, padded], float("-inf"), tl.float32)
    total = tl.zeros([block_t, padded], tl.float32)
    first, last = reached_keys(where, here, block_t, block_s)
    for start in range(bound(first), bound(last), block_s):
        patch = make_patch(start + tl.arange(0, block_s), sizes, heads, block_t)
        pre_key = load_key_terms(mixing.pre_key, patch, padded, key_counts[0])
        keys = load_rows(key, key_strides, patch.item, patch.s, real_keys, heads, share, padded, width)
        scores = by_query(rounded(product(queries, tl.permute(keys, (0, 2, 1))) * scaling, dtype))
        exponent = exponents(scores, pre_query, pre_key, where, patch)
        higher = tl.maximum(highest, tl.max(exponent, axis=1))
        reference = finite(higher)
        total = total * exp2(highest - reference) + tl.sum(exp2(exponent - reference[:, None, :]), axis=1)
        highest = higher
    head = tl.arange(0, padded)[None, :]
    place = lse + (here.item * heads + head) * sizes.all_queries + here.t[:, None]
    tl.store(place, finite((finite(highest) + tl.log2(total)) / LOG2_E), mask=head < heads)


@triton.jit
def dcmha_fused_output(
    query,  # [items, H, T, D]
    key,  # [items, H_kv, S, D]
    value,  # [items, H_kv, S, D]
    output,  # [items, H, T, D], written
    lse,  # [items, H, T with padding], float32
    mixing,
    query_strides,
    key_strides,
    value_strides,
    output_strides,
    sizes,
    where,
    scaling,
    heads: tl.constexpr,
    share: tl.constexpr,
    width: tl.constexpr,
    padded: tl.constexpr,
    block_t: tl.constexpr,
    block_s: tl.constexpr,
    key_counts: tl.constexpr,
):
    """The output of all queries."""
    dtype: tl.constexpr = tl.float32 if query.dtype.element_ty == tl.float32 else tl.float16
    here = make_patch(tl.arange(0, block_s), sizes, heads, block_t)
    real_queries, real_keys = original(where.real_queries), original(where.real_keys)
    queries = load_rows(query, query_strides, here.item, here.t, real_queries, heads, 1, padded, width)
    pre_query = load_matrices(mixing.pre_query, here.item, here.t, sizes.all_queries, padded)
    post_query = load_matrices(mixing.post_query, here.item, here.t, sizes.all_queries, padded)
    reference = load_of_queries(lse, here, padded, float("inf")) * LOG2_E
    total = tl.zeros([padded, block_t, padded_width(width)], tl.float32)
    first, last = reached_keys(where, here, block_t, block_s)
    for start in range(bound(first), bound(last), block_s):
        patch = make_patch(start + tl.arange(0, block_s), sizes, heads, block_t)
        pre_key = load_key_terms(mixing.pre_key, patch, padded, key_counts[0])
        post_key = load_key_terms(mixing.post_key, patch, padded, key_counts[1])
        keys = load_rows(key, key_strides, patch.item, patch.s, real_keys, heads, share, padded, width)
        scores = by_query(rounded(product(queries, tl.permute(keys, (0, 2, 1))) * scaling, dtype))
        probs = exp2(exponents(scores, pre_query, pre_key, where, patch) - reference[:, None, :])
        composed = compose(rounded(probs, dtype), probs, gather(probs, post_key), post_query, post_key)
        values = load_rows(value, value_strides, patch.item, patch.s, real_keys, heads, share, padded, width)
        total += product(tl.permute(rounded(composed, value.dtype.element_ty), (2, 0, 1)), values)
    place = places_of(output, output_strides, here.item, here.t, heads, 1, padded, width)
    inside = are_inside(here.t, real_queries, heads, padded, width)
    tl.store(place, rounded(total, output.dtype.element_ty), mask=inside)


FUSED_KERNELS = {"dcmha_fused_statistics": dcmha_fused_statistics, "dcmha_fused_output": dcmha_fused_output}
