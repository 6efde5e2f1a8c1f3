"""Kernels of `dcmha_triton` that compose on the tensor cores: one matrix for each query and one for each key.

Composition is linear in the heads of a (query, key) pair. All its terms, low rank, gates and static, add up to

    y[t, :, s] = (Q[t] + K[s]) z[t, :, s]

with `[H, H]` matrices, `Q[t] = 1 + static + diag(gate[t]) + up[t] down[t]^T`, and `K[s]` likewise but for 1 and static.
For all heads of a patch of `block_t` queries by `block_s` keys that is a product `[H, H] @ [H, block_s]` for each query
and a product `[H, H] @ [H, block_t]` for each key: `2 H` multiplications for each (head, query, key), where low rank
needs about 10, on units that do 12 times as many. The gradients of matrices are products of the same size:

    dz[t, :, s] = (Q[t] + K[s])^T dy[t, :, s]
    dQ[t] = sum_s dy[t, :, s] z[t, :, s]^T        dK[s] = sum_t dy[t, :, s] z[t, :, s]^T

Two kernels go between terms and matrices, and four have their counterparts in `dcmha_triton_kernels`:

    dcmha_matrices              Q or K of one side, from its packed rows
    dcmha_matrix_rows           the gradients of packed rows, from partial sums of dQ or dK
    dcmha_matrix_statistics     x = pre(s); the log-sum-exp of a row over a block of keys
    dcmha_matrix_probs          p = exp(x - lse); a = post(p), written over s
    dcmha_matrix_backward_post  dp = post^T(da), written over da; a; the sums of p dp (delta); dQ and dK of post
    dcmha_matrix_backward_pre   dx = p (dp - delta); ds = pre^T(dx); dQ and dK of pre

A program holds a patch of all heads in registers, 16 or 32 of them; zeros make up for what is missing. It goes through
`turns` blocks of queries for one block of keys, whose matrices and their gradients stay with it, and passes over
patches that a causal mask or a window hides. The gradients of queries' matrices leave as one partial sum for each
patch, those of keys' as one for each program, and are added up in a fixed order.

Instructions: a thread's for each (head, query, key) of a turn, at 16 and 32 heads in bfloat16 without a mask, compiled
for sm_90 and counted in the assembly, not run (`python tests/modeling/test_triton_compile.py 90`), next to those of the
kernels that go through the heads, whatever the rank here:

                       16 heads    32 heads    rank 2, gates, head by head
    statistics         20          20          28
    probs              24          26          36
    backward_post      36          50          98
    backward_pre       33          45          86

At 29.6e12 a second (132 multiprocessors of 128 lanes at 1.75 GHz) those of 16 heads are 1.5 ps forward and 2.3 ps
backward if nothing waits: less than the memory's time. Between the product for queries and that for keys a patch turns
through shared memory, which takes more of them than arithmetic does.

Memory: each kernel reads and writes a map once, as in `dcmha_triton_kernels`: 2 + 4 bytes for each (head, query, key)
forward and 8 + 6 backward in half precision. Matrices come from the second-level cache, `2 H / block_s` bytes of
queries' and `2 H / (block_t turns)` of keys' for each (head, query, key) and stage, and as many leave in a backward
pass for queries, twice as many for keys.

Precision: scores, probabilities and the matrices that compose them are float16, gradients of maps and the matrices in
front of them bfloat16 for inputs of that dtype; all products add up in float32. In float32, for tests, all is float32.
"""

from .dcmha_triton_tiles import INTERPRETED, LOG2_E, Patch, exp2, finite, make_penalty, rounded

# What runs on the device is typed by Triton's compiler.
# mypy: disable-error-code="no-untyped-def"

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("implementation='triton' needs Triton: pip install triton, or use 'chunked'") from error


@triton.jit
def keys_of_program(block_s: tl.constexpr):
    """`[block_s]`, counted from the chunk's first key."""
    return tl.program_id(0) * block_s + tl.arange(0, block_s)


@triton.jit
def make_patch(turn, turns: tl.constexpr, s, sizes, heads: tl.constexpr, block_t: tl.constexpr):
    """A block of queries of this program with its keys."""
    t = (tl.program_id(1) * turns + turn) * block_t + tl.arange(0, block_t)
    return Patch(tl.program_id(2).to(tl.int64), t, s, heads, sizes)


@triton.jit
def is_reached(where, turn, turns: tl.constexpr, block_t: tl.constexpr, block_s: tl.constexpr):
    """Whether distance alone lets any query of the patch see any key of it."""
    back = (tl.program_id(1) * turns + turn) * block_t + where.distance - tl.program_id(0) * block_s
    return (back + block_t > -where.ahead) & (back - block_s < where.behind)


@triton.jit
def load_matrices(matrices, positions, length, padded: tl.constexpr):
    """`[block, padded, padded]` of a side's matrices, `[items, length, padded, padded]`; None if it has none."""
    found = None
    if matrices is not None:
        first = matrices + tl.program_id(2).to(tl.int64) * length * (padded * padded)
        found = tl.load(first + _entries(positions, padded))
    return found


@triton.jit
def store_matrices(partial, gradients, positions, part, length, padded: tl.constexpr):
    """Writes `[block, padded, padded]` as number `part` of `[.., length, padded, padded]`."""
    first = partial + part * length * (padded * padded)
    tl.store(first + _entries(positions, padded), rounded(gradients, partial.dtype.element_ty))


@triton.jit
def _entries(positions, padded: tl.constexpr):
    """`[block, padded, padded]`, where the matrices of these positions lie."""
    head = tl.arange(0, padded)
    return positions[:, None, None] * (padded * padded) + head[None, :, None] * padded + head[None, None, :]


@triton.jit
def _tiles(maps, patch, padded: tl.constexpr):
    """`[block_t, padded, block_s]`, where the patch lies in maps `[items, H, c, n]`."""
    plane = patch.sizes.queries * patch.sizes.keys
    first = maps + patch.item * patch.heads * plane
    inside = patch.t[:, None, None] * patch.sizes.keys + patch.s[None, None, :]
    return first + (tl.arange(0, padded)[None, :, None].to(tl.int64) * plane + inside)


@triton.jit
def load(maps, patch, padded: tl.constexpr):
    """A patch, in the dtype of its maps; heads that only fill up are zero."""
    if patch.heads == padded:
        tiles = tl.load(_tiles(maps, patch, padded))
    else:
        real = (tl.arange(0, padded) < patch.heads)[None, :, None]
        tiles = tl.load(_tiles(maps, patch, padded), mask=real, other=0.0)
    return tiles


@triton.jit
def store(maps, tiles, patch, padded: tl.constexpr):
    """Writes what `load` reads."""
    tiles = rounded(tiles, maps.dtype.element_ty)
    if patch.heads == padded:
        tl.store(_tiles(maps, patch, padded), tiles)
    else:
        tl.store(_tiles(maps, patch, padded), tiles, mask=(tl.arange(0, padded) < patch.heads)[None, :, None])


@triton.jit
def load_of_queries(numbers, patch, padded: tl.constexpr, other: tl.constexpr):
    """`[block_t, padded]` of the chunk's part of `[B, H, T]`; heads that only fill up have `other`."""
    head = tl.arange(0, padded)[None, :]
    place = numbers + (patch.item * patch.heads + head) * patch.sizes.all_queries + patch.t[:, None]
    return tl.load(place, mask=head < patch.heads, other=other)


@triton.jit
def store_of_queries(partial, numbers, patch, padded: tl.constexpr):
    """Writes `[block_t, padded]` as what this block of keys says about its queries, in `[items, blocks, H, c]`."""
    head = tl.arange(0, padded)[None, :]
    block = patch.item * tl.num_programs(0) + tl.program_id(0)
    place = partial + (block * patch.heads + head) * patch.sizes.queries + patch.t[:, None]
    tl.store(place, numbers, mask=head < patch.heads)


@triton.jit
def turned(tiles):
    """`[a, padded, b]` as `[b, padded, a]`."""
    return tl.permute(tiles, (2, 1, 0))


@triton.jit
def transposed(matrices, dtype: tl.constexpr):
    """The transposed matrices of a side, in the dtype of what they compose; None stays None."""
    found = None
    if matrices is not None:
        found = tl.permute(rounded(matrices.to(tl.float32), dtype), (0, 2, 1))
    return found


@triton.jit
def product(left, right):
    """A matrix product for each of the first axis, in float32; the interpreter would multiply bits of bfloat16."""
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def compose(tiles, of_queries, of_keys):
    """`(Q[t] + K[s]) z[t, :, s]` in float32, of matrices in the dtype of the tiles; without any, the tiles."""
    if of_queries is not None:
        composed = product(of_queries, tiles)
        if of_keys is not None:
            composed += turned(product(of_keys, turned(tiles)))
    elif of_keys is not None:
        composed = turned(product(of_keys, turned(tiles)))
    else:
        composed = tiles.to(tl.float32)
    return composed


@triton.jit
def exponents(score, of_queries, of_keys, where, patch):
    """Composed and masked scores in base 2."""
    return compose(score, of_queries, of_keys) * LOG2_E + make_penalty(where, patch)[:, None, :]


@triton.jit
def probabilities(score, of_queries, of_keys, lse, where, patch, padded: tl.constexpr):
    """The softmax over composed scores; zero for heads that only fill up."""
    reference = load_of_queries(lse, patch, padded, float("inf")) * LOG2_E
    return exp2(exponents(score, of_queries, of_keys, where, patch) - reference[:, :, None])


@triton.jit
def no_gradients(matrices, block: tl.constexpr, padded: tl.constexpr):
    """Zeros to add the gradients of a side's matrices to; None if it has none."""
    gradients = None
    if matrices is not None:
        gradients = tl.zeros([block, padded, padded], tl.float32)
    return gradients


@triton.jit
def store_query_gradients(partial, grad, tiles, patch, padded: tl.constexpr):
    """Writes `dQ[t] = sum_s dy[t, :, s] z[t, :, s]^T` of this patch, if queries have matrices."""
    if partial is not None:
        gradients = product(grad, tl.permute(tiles, (0, 2, 1)))
        block = patch.item * tl.num_programs(0) + tl.program_id(0)
        store_matrices(partial, gradients, patch.t, block, patch.sizes.queries, padded)


@triton.jit
def key_gradients(grad, tiles):
    """`dK[s] = sum_t dy[t, :, s] z[t, :, s]^T` of this patch."""
    return product(turned(grad), tl.permute(tiles, (2, 0, 1)))


@triton.jit
def leave_nothing(maps, partial_query, patch, padded: tl.constexpr):
    """What a backward pass leaves of a patch of hidden keys."""
    store(maps, tl.zeros([patch.t.shape[0], padded, patch.s.shape[0]], tl.float32), patch, padded)
    if partial_query is not None:
        block = patch.item * tl.num_programs(0) + tl.program_id(0)
        nothing = tl.zeros([patch.t.shape[0], padded, padded], tl.float32)
        store_matrices(partial_query, nothing, patch.t, block, patch.sizes.queries, padded)


@triton.jit
def dcmha_matrix_statistics(
    scores,  # [items, H, c, n]
    partial_lse,  # [items, n / block_s, H, c], float32
    matrices,
    sizes,
    where,
    heads: tl.constexpr,
    padded: tl.constexpr,
    block_t: tl.constexpr,
    block_s: tl.constexpr,
    turns: tl.constexpr,
):
    """The log-sum-exp of each row of composed scores over a block of keys; minus infinity where it hides all keys."""
    s = keys_of_program(block_s)
    pre_key = load_matrices(matrices.pre_key, s, sizes.all_keys, padded)
    for turn in range(turns):
        patch = make_patch(turn, turns, s, sizes, heads, block_t)
        if is_reached(where, turn, turns, block_t, block_s):
            pre_query = load_matrices(matrices.pre_query, patch.t, sizes.all_queries, padded)
            exponent = exponents(load(scores, patch, padded), pre_query, pre_key, where, patch)
            reference = finite(tl.max(exponent, axis=2))
            total = tl.sum(exp2(exponent - reference[:, :, None]), axis=2)
            store_of_queries(partial_lse, (reference + tl.log2(total)) / LOG2_E, patch, padded)
        else:
            store_of_queries(partial_lse, tl.full([block_t, padded], float("-inf"), tl.float32), patch, padded)


@triton.jit
def dcmha_matrix_probs(
    scores,  # [items, H, c, n]
    probs,  # the same memory, in the dtype of the values
    lse,  # [items, H, c of T], float32
    matrices,
    sizes,
    where,
    heads: tl.constexpr,
    padded: tl.constexpr,
    block_t: tl.constexpr,
    block_s: tl.constexpr,
    turns: tl.constexpr,
):
    """Replaces scores by composed probabilities."""
    s = keys_of_program(block_s)
    pre_key = load_matrices(matrices.pre_key, s, sizes.all_keys, padded)
    post_key = load_matrices(matrices.post_key, s, sizes.all_keys, padded)
    for turn in range(turns):
        patch = make_patch(turn, turns, s, sizes, heads, block_t)
        composed = tl.zeros([block_t, padded, block_s], tl.float32)
        if is_reached(where, turn, turns, block_t, block_s):
            pre_query = load_matrices(matrices.pre_query, patch.t, sizes.all_queries, padded)
            post_query = load_matrices(matrices.post_query, patch.t, sizes.all_queries, padded)
            prob = probabilities(load(scores, patch, padded), pre_query, pre_key, lse, where, patch, padded)
            composed = compose(rounded(prob, scores.dtype.element_ty), post_query, post_key)
        # Another thread may have loaded what this one stores.
        tl.debug_barrier()
        store(probs, composed, patch, padded)


@triton.jit
def dcmha_matrix_backward_post(
    scores,  # [items, H, c, n]
    grad_composed,  # [items, H, c, n], of the composed probabilities; written: those of the probabilities
    probs,  # [items, H, c, n], written: the composed probabilities
    partial_delta,  # [items, n / block_s, H, c], float32
    partial_query,  # [items, n / block_s, c, padded, padded]
    partial_key,  # [items, c / (block_t turns), n, padded, padded]
    lse,  # [items, H, c of T], float32
    matrices,
    sizes,
    where,
    heads: tl.constexpr,
    padded: tl.constexpr,
    block_t: tl.constexpr,
    block_s: tl.constexpr,
    turns: tl.constexpr,
):
    """First sweep of the backward pass: what comes after the softmax, and the gradients of the softmax's output."""
    dtype: tl.constexpr = grad_composed.dtype.element_ty
    s = keys_of_program(block_s)
    pre_key = load_matrices(matrices.pre_key, s, sizes.all_keys, padded)
    post_key = load_matrices(matrices.post_key, s, sizes.all_keys, padded)
    grad_key = no_gradients(matrices.post_key, block_s, padded)
    for turn in range(turns):
        patch = make_patch(turn, turns, s, sizes, heads, block_t)
        if is_reached(where, turn, turns, block_t, block_s):
            pre_query = load_matrices(matrices.pre_query, patch.t, sizes.all_queries, padded)
            post_query = load_matrices(matrices.post_query, patch.t, sizes.all_queries, padded)
            prob = probabilities(load(scores, patch, padded), pre_query, pre_key, lse, where, patch, padded)
            store(probs, compose(rounded(prob, scores.dtype.element_ty), post_query, post_key), patch, padded)
            grad = load(grad_composed, patch, padded)
            grad_prob = compose(grad, transposed(post_query, dtype), transposed(post_key, dtype))
            tl.debug_barrier()
            store(grad_composed, grad_prob, patch, padded)
            store_of_queries(partial_delta, tl.sum(prob * grad_prob, axis=2), patch, padded)
            store_query_gradients(partial_query, grad, rounded(prob, dtype), patch, padded)
            if grad_key is not None:
                grad_key += key_gradients(grad, rounded(prob, dtype))
        else:
            leave_nothing(probs, partial_query, patch, padded)
            store_of_queries(partial_delta, tl.zeros([block_t, padded], tl.float32), patch, padded)
    if grad_key is not None:
        part = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        store_matrices(partial_key, grad_key, s, part, sizes.keys, padded)


@triton.jit
def dcmha_matrix_backward_pre(
    scores,  # [items, H, c, n]
    grad_probs,  # [items, H, c, n], of the probabilities
    grad_scores,  # [items, H, c, n], written
    delta,  # [items, H, c of T], float32
    partial_query,  # [items, n / block_s, c, padded, padded]
    partial_key,  # [items, c / (block_t turns), n, padded, padded]
    lse,  # [items, H, c of T], float32
    matrices,
    sizes,
    where,
    heads: tl.constexpr,
    padded: tl.constexpr,
    block_t: tl.constexpr,
    block_s: tl.constexpr,
    turns: tl.constexpr,
):
    """Second sweep of the backward pass: gradients of the scores and of what composes them."""
    dtype: tl.constexpr = grad_probs.dtype.element_ty
    s = keys_of_program(block_s)
    pre_key = load_matrices(matrices.pre_key, s, sizes.all_keys, padded)
    grad_key = no_gradients(matrices.pre_key, block_s, padded)
    for turn in range(turns):
        patch = make_patch(turn, turns, s, sizes, heads, block_t)
        if is_reached(where, turn, turns, block_t, block_s):
            pre_query = load_matrices(matrices.pre_query, patch.t, sizes.all_queries, padded)
            score = load(scores, patch, padded)
            prob = probabilities(score, pre_query, pre_key, lse, where, patch, padded)
            mean = load_of_queries(delta, patch, padded, 0.0)
            grad = rounded(prob * (load(grad_probs, patch, padded) - mean[:, :, None]), dtype)
            store(grad_scores, compose(grad, transposed(pre_query, dtype), transposed(pre_key, dtype)), patch, padded)
            score = rounded(score.to(tl.float32), dtype)
            store_query_gradients(partial_query, grad, score, patch, padded)
            if grad_key is not None:
                grad_key += key_gradients(grad, score)
        else:
            leave_nothing(grad_scores, partial_query, patch, padded)
    if grad_key is not None:
        part = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        store_matrices(partial_key, grad_key, s, part, sizes.keys, padded)


@triton.jit
def dcmha_matrices(
    matrices,  # [items, all_positions, padded, padded], written
    rows,  # [items, positions, rows, H], packed
    constant,  # [H, H], float32, [out, in]: what is the same for all positions; None is zero
    positions,
    all_positions,
    heads: tl.constexpr,
    padded: tl.constexpr,
    count: tl.constexpr,
    block: tl.constexpr,
):
    """The matrices of one side of a stage; zero after the last position and head."""
    item, position = tl.program_id(1).to(tl.int64), tl.program_id(0) * block + tl.arange(0, block)
    rank: tl.constexpr = count // 2
    head, first = tl.arange(0, padded), item * positions * (count * heads)
    places = _places(first, position, positions, heads, padded, count)
    matrix = tl.zeros([block, padded, padded], tl.float32)
    for index in tl.static_range(rank):
        down, up = _row(rows, places, index, heads), _row(rows, places, rank + index, heads)
        matrix += up[:, :, None] * down[:, None, :]
    if count % 2:
        gate = _row(rows, places, count - 1, heads)
        matrix += tl.where((head[:, None] == head[None, :])[None, :, :], gate[:, :, None], 0.0)
    if constant is not None:
        inside = (head < heads)[:, None] & (head < heads)[None, :]
        matrix += tl.load(constant + head[:, None] * heads + head[None, :], mask=inside, other=0.0)[None, :, :]
    store_matrices(matrices, matrix, position, item, all_positions, padded)


@triton.jit
def _places(first, position, positions, heads: tl.constexpr, padded: tl.constexpr, count: tl.constexpr):
    """`[block, padded]`, where the first packed row of some positions lies, and what of it is there."""
    head = tl.arange(0, padded)[None, :]
    return first + position[:, None] * (count * heads) + head, (position < positions)[:, None] & (head < heads)


@triton.jit
def _row(rows, places, index: tl.constexpr, heads: tl.constexpr):
    """`[block, padded]`, one of the packed rows of some positions."""
    return tl.load(rows + places[0] + index * heads, mask=places[1], other=0.0).to(tl.float32)


@triton.jit
def _add_to_row(rows, places, index: tl.constexpr, heads: tl.constexpr, numbers):
    """Adds `[block, padded]` to one of the packed rows of some positions."""
    tl.store(rows + places[0] + index * heads, _row(rows, places, index, heads) + numbers, mask=places[1])


@triton.jit
def dcmha_matrix_rows(
    gradients,  # [items, positions of all, rows, H], float32, those of a chunk; added to
    rows,  # [items, positions of all, rows, H], packed
    partial,  # [items, parts, positions of the chunk, padded, padded]
    parts,
    positions,
    all_positions,
    last,
    heads: tl.constexpr,
    padded: tl.constexpr,
    count: tl.constexpr,
    block: tl.constexpr,
):
    """Adds what the partial sums of gradients of matrices say about the packed rows of one side of a stage."""
    item, position = tl.program_id(1).to(tl.int64), tl.program_id(0) * block + tl.arange(0, block)
    rank: tl.constexpr = count // 2
    head, first = tl.arange(0, padded), item * all_positions * (count * heads)
    places = _places(first, position, last, heads, padded, count)
    total = tl.zeros([block, padded, padded], tl.float32)
    for part in range(parts):
        some = partial + (item * parts + part) * positions * (padded * padded)
        total += tl.load(some + _entries(position, padded)).to(tl.float32)
    for index in tl.static_range(rank):
        down, up = _row(rows, places, index, heads), _row(rows, places, rank + index, heads)
        _add_to_row(gradients, places, index, heads, tl.sum(total * up[:, :, None], axis=1))
        _add_to_row(gradients, places, rank + index, heads, tl.sum(total * down[:, None, :], axis=2))
    if count % 2:
        diagonal = tl.where((head[:, None] == head[None, :])[None, :, :], total, 0.0)
        _add_to_row(gradients, places, count - 1, heads, tl.sum(diagonal, axis=2))


MATRIX_KERNELS = {
    "dcmha_matrices": dcmha_matrices,
    "dcmha_matrix_rows": dcmha_matrix_rows,
    "dcmha_matrix_statistics": dcmha_matrix_statistics,
    "dcmha_matrix_probs": dcmha_matrix_probs,
    "dcmha_matrix_backward_post": dcmha_matrix_backward_post,
    "dcmha_matrix_backward_pre": dcmha_matrix_backward_pre,
}
