"""The parts of the kernels in `tensor_cores`: tiles `[block_t, block_s, padded]` of all heads.

They are composed by one matrix for each query and by the terms of each key. Tiles are in the layout of the results of
products, in which a thread has some heads of a pair and its neighbours have the others: sums over heads and over
queries need no shared memory. Terms of keys are `(down, up, gate)`, tuples of `[1, block_s, padded]` in float32.
Kernels turn the gradients of queries' matrices into those of their terms before they write them.
"""

from .tiles import LOG2_E, Patch, exp2, make_penalty, original, product, rounded, shift_of, tl, triton

# What runs on the device is typed by Triton's compiler.
# mypy: disable-error-code="no-untyped-def,assignment"


@triton.jit
def make_patch(
    turn, turns: tl.constexpr, sizes, where, heads: tl.constexpr, block_t: tl.constexpr, block_s: tl.constexpr
):
    """The patch of one turn of this program: a block `[block_t]` of queries, and the same keys `[block_s]` in each."""
    t = (tl.program_id(1) * turns + turn) * block_t + tl.arange(0, block_t)
    s = tl.program_id(0) * block_s + tl.arange(0, block_s)
    shift = shift_of(where, tl.program_id(1) * turns * block_t)
    return Patch(tl.program_id(2).to(tl.int64), t, s, shift, heads, sizes)


@triton.jit
def reached_turns(where, patch, turns: tl.constexpr, block_t: tl.constexpr, block_s: tl.constexpr):
    """The turns, from a first one up to an end, whose queries are near enough to see a key of the program.

    The third result is the number of all turns of the program, which the last one of a chunk may have fewer of.
    """
    count = tl.minimum(turns, patch.sizes.queries // block_t - tl.program_id(1) * turns)
    key = tl.program_id(0) * block_s + patch.shift + original(where.start)
    query = tl.program_id(1) * turns * block_t + original(where.position)
    first = tl.minimum(tl.maximum(key - where.ahead - query, 0) // block_t, count)
    last = tl.minimum(tl.cdiv(tl.maximum(key + block_s + where.behind - query, 0), block_t), count)
    return first, tl.maximum(first, last), count


@triton.jit
def load_matrices(matrices, item, positions, length, padded: tl.constexpr):
    """Loads `[block, padded, padded]` from a side's matrices `[items, length, padded, padded]`; None if it has none."""
    found = None
    if matrices is not None:
        first = matrices + item * length * (padded * padded)
        found = tl.load(first + _entries(positions, padded))
    return found


@triton.jit
def store_matrices(matrices, values, item, positions, length, padded: tl.constexpr):
    """Writes `[block, padded, padded]` where `load_matrices` reads it."""
    first = matrices + item * length * (padded * padded)
    tl.store(first + _entries(positions, padded), rounded(values, matrices.dtype.element_ty))


@triton.jit
def _entries(positions, padded: tl.constexpr):
    """Offsets `[block, padded, padded]` of the matrices of these positions."""
    head = tl.arange(0, padded)
    return positions[:, None, None] * (padded * padded) + head[None, :, None] * padded + head[None, None, :]


@triton.jit
def _tiles(maps, patch, padded: tl.constexpr):
    """Pointers `[block_t, block_s, padded]` to the patch in maps `[items, H, c, n]`."""
    plane = patch.sizes.queries * patch.sizes.keys
    first = maps + patch.item * patch.heads * plane
    inside = patch.t[:, None, None] * patch.sizes.keys + patch.s[None, :, None]
    return first + (tl.arange(0, padded)[None, None, :].to(tl.int64) * plane + inside)


@triton.jit
def load(maps, patch, padded: tl.constexpr):
    """Loads a patch `[block_t, block_s, padded]` of maps `[items, H, c, n]`, in their dtype; padding heads are zero."""
    if patch.heads == padded:
        tiles = tl.load(_tiles(maps, patch, padded))
    else:
        real = (tl.arange(0, padded) < patch.heads)[None, None, :]
        tiles = tl.load(_tiles(maps, patch, padded), mask=real, other=0.0)
    return tiles


@triton.jit
def store(maps, tiles, patch, padded: tl.constexpr):
    """Writes `[block_t, block_s, padded]` where `load` reads it."""
    tiles = rounded(tiles, maps.dtype.element_ty)
    if patch.heads == padded:
        tl.store(_tiles(maps, patch, padded), tiles)
    else:
        tl.store(_tiles(maps, patch, padded), tiles, mask=(tl.arange(0, padded) < patch.heads)[None, None, :])


@triton.jit
def load_of_queries(elements, patch, padded: tl.constexpr, other: tl.constexpr):
    """Loads `[block_t, padded]` from the chunk's part of `[B, H, T]`; padding heads have `other`."""
    head = tl.arange(0, padded)[None, :]
    place = elements + (patch.item * patch.heads + head) * patch.sizes.all_queries + patch.t[:, None]
    return tl.load(place, mask=head < patch.heads, other=other)


@triton.jit
def store_of_queries(partial, elements, patch, padded: tl.constexpr):
    """Writes `[block_t, padded]` as this block of keys' part of `[items, blocks, H, c]`."""
    head = tl.arange(0, padded)[None, :]
    block = patch.item * tl.num_programs(0) + tl.program_id(0)
    place = partial + (block * patch.heads + head) * patch.sizes.queries + patch.t[:, None]
    tl.store(place, elements, mask=head < patch.heads)


@triton.jit
def gained(tiles, tables, where, patch, padded: tl.constexpr):
    """Multiplies `[block_t, block_s, padded]` by a gain by distance, if there is one."""
    if tables.gain is not None:
        tiles *= _by_distance(tables.gain, tables, where, patch, padded)
    return tiles


@triton.jit
def _by_distance(rows, tables, where, patch, padded: tl.constexpr):
    """Loads `[block_t, block_s, padded]` of a table: one element for each distance and head; zero for padding heads."""
    head = tl.arange(0, padded)[None, None, :]
    first = rows + patch.item % where.groups * patch.heads * original(tables.columns) + original(tables.first)
    place = head * original(tables.columns) + (patch.s[None, :, None] + patch.shift - patch.t[:, None, None])
    return tl.load(first + place, mask=head < patch.heads, other=0.0)


@triton.jit
def widened(tiles):
    """Tiles in float32, exactly: a product with the identity has the layout of products without another exchange."""
    block_t: tl.constexpr = tiles.shape[0]
    padded: tl.constexpr = tiles.shape[2]
    head = tl.arange(0, padded)
    identity = tl.where(head[:, None] == head[None, :], 1.0, 0.0).to(tiles.dtype)
    return product(tiles, tl.broadcast_to(identity[None, :, :], (block_t, padded, padded)))


@triton.jit
def load_key_terms(terms, patch, padded: tl.constexpr, count: tl.constexpr):
    """The terms of a patch's keys, from packed terms `[items, S, count, H]`; empty tuples without any."""
    down, up, gate = (), (), ()
    if terms is not None:
        places = terms_of(terms, patch.item, patch.sizes.all_keys, patch.s + patch.shift, patch.heads, padded, count)
        rank: tl.constexpr = count // 2
        for index in tl.static_range(rank):
            down += (tl.permute(load_term(places, index, patch.heads), (1, 0, 2)),)
            up += (tl.permute(load_term(places, rank + index, patch.heads), (1, 0, 2)),)
        if count % 2:
            gate += (tl.permute(load_term(places, count - 1, patch.heads), (1, 0, 2)),)
    return down, up, gate


@triton.jit
def transposed(matrices, dtype: tl.constexpr):
    """The transposed matrices `[block, padded, padded]` of queries in the dtype of the maps; None stays None."""
    found = None
    if matrices is not None:
        found = tl.permute(rounded(matrices.to(tl.float32), dtype), (0, 2, 1))
    return found


@triton.jit
def transposed_terms(of_keys):
    """The terms whose composition is the transpose of that of these terms."""
    return of_keys[1], of_keys[0], of_keys[2]


@triton.jit
def gather(tiles, of_keys):
    """Sums over the heads of tiles times their down factors: `[block_t, block_s, 1]` for each rank of the keys."""
    hidden = ()
    for rank in tl.static_range(len(of_keys[0])):
        hidden += (tl.sum(tiles * of_keys[0][rank], axis=2, keep_dims=True),)
    return hidden


@triton.jit
def compose(rounded_tiles, tiles, hidden, of_queries, of_keys):
    """`(Q[t] + K[s]) z[t, s, :]` in float32; without a matrix `Q` of queries the identity takes its place.

    Args:
        rounded_tiles: `z` in the dtype of the matrices.
        tiles: `z` in float32.
        hidden: `gather(tiles, of_keys)`.
    """
    composed = tiles
    if of_queries is not None:
        composed = product(rounded_tiles, of_queries)
    for rank in tl.static_range(len(hidden)):
        composed += hidden[rank] * of_keys[1][rank]
    for index in tl.static_range(len(of_keys[2])):
        composed += tiles * of_keys[2][index]
    return composed


@triton.jit
def exponents(score, of_queries, of_keys, where, tables, patch, padded: tl.constexpr):
    """Composed, masked and biased scores `[block_t, block_s, padded]` times log2(e), as `exp2` needs them."""
    tiles = widened(score)
    composed = compose(score, tiles, gather(tiles, of_keys), of_queries, of_keys)
    exponent = composed * LOG2_E + make_penalty(where, patch)[:, :, None]
    if tables.bias is not None:
        exponent += _by_distance(tables.bias, tables, where, patch, padded) * LOG2_E
    return exponent


@triton.jit
def probabilities(score, of_queries, of_keys, lse, where, tables, patch, padded: tl.constexpr):
    """The softmax over composed scores, `[block_t, block_s, padded]`; zero for padding heads."""
    reference = load_of_queries(lse, patch, padded, float("inf")) * LOG2_E
    return exp2(exponents(score, of_queries, of_keys, where, tables, patch, padded) - reference[:, None, :])


@triton.jit
def no_key_gradients(of_keys, block_t: tl.constexpr, block_s: tl.constexpr, padded: tl.constexpr):
    """Zeros `[block_t, block_s, padded]` for each down term of the keys, each up term and the gate."""
    gradients = ()
    for _ in tl.static_range(2 * len(of_keys[0]) + len(of_keys[2])):
        gradients += (tl.zeros([block_t, block_s, padded], tl.float32),)
    return gradients


@triton.jit
def add_key_gradients(gradients, grad, tiles, hidden, hidden_grads):
    """Adds a patch's part of the gradients of its keys' terms, which are still to be summed over the queries.

    `tiles` `[block_t, block_s, padded]` is the composition's input and `grad` the gradient of its output.
    """
    rank: tl.constexpr = len(hidden)
    added = ()
    for index in tl.static_range(rank):
        added += (gradients[index] + tiles * hidden_grads[index],)
    for index in tl.static_range(rank):
        added += (gradients[rank + index] + grad * hidden[index],)
    if len(gradients) > 2 * rank:
        added += (gradients[2 * rank] + grad * tiles,)
    return added


@triton.jit
def gradients_of_queries(grad, tiles):
    """`dQ[t] = sum_s dy[t, s, :] z[t, s, :]^T` of a patch, `[block_t, padded, padded]`."""
    return product(tl.permute(grad, (0, 2, 1)), tiles)


@triton.jit
def terms_of(terms, part, length, positions, heads: tl.constexpr, padded: tl.constexpr, count: tl.constexpr):
    """Pointers `[block, 1, padded]` to the first terms of positions in `[.., length, count, H]`, and the real heads."""
    head = tl.arange(0, padded)[None, None, :]
    return terms + part * length * (count * heads) + (positions[:, None, None] * (count * heads) + head), head < heads


@triton.jit
def load_term(places, index: tl.constexpr, heads: tl.constexpr):
    """Loads a term `[block, 1, padded]` in float32; zero for padding heads."""
    return tl.load(places[0] + index * heads, mask=places[1], other=0.0).to(tl.float32)


@triton.jit
def store_term(places, index: tl.constexpr, term, heads: tl.constexpr):
    """Writes a term `[block, 1, padded]`."""
    tl.store(places[0] + index * heads, rounded(term, places[0].dtype.element_ty), mask=places[1])


@triton.jit
def store_term_gradients(target, source, gradients, heads: tl.constexpr, count: tl.constexpr, dtype: tl.constexpr):
    """Writes the gradients of terms, given those of their matrices, `[block, padded, padded]`.

    With terms as rows, `d down = up dM` and `d up = down dM^T`; the gradient of a gate is the diagonal of `dM`.
    `target` and `source` are results of `terms_of`. Products have the precision of `dtype`, whatever that of the terms.
    """
    padded: tl.constexpr = gradients.shape[2]
    if count > 1:
        # Both products have all down and up terms on the left, and half of each result is dropped: matrix instructions
        # need at least 16 rows anyway.
        rank: tl.constexpr = count // 2
        term = tl.arange(0, triton.next_power_of_2(max(2 * rank, 16)))[None, :, None]
        real = (term < 2 * rank) & source[1]
        factors = tl.load(source[0] + term * heads, mask=real, other=0.0)
        of_up = _factors_product(factors, tl.permute(gradients, (0, 2, 1)), dtype)
        of_down = _factors_product(factors, gradients, dtype)
        place = target[0] + tl.where(term < rank, term + rank, term - rank) * heads
        tl.store(place, rounded(tl.where(term < rank, of_up, of_down), target[0].dtype.element_ty), mask=real)
    if count % 2:
        head = tl.arange(0, padded)
        diagonal = tl.where((head[:, None] == head[None, :])[None, :, :], gradients, 0.0)
        store_term(target, count - 1, tl.sum(diagonal, axis=2)[:, None, :], heads)


@triton.jit
def _factors_product(factors, gradients, dtype: tl.constexpr):
    """`factors @ gradients` in the precision of a dtype; for float16 that is tf32, which has more range."""
    factors = factors.to(tl.float32)
    if dtype == tl.bfloat16:
        result = product(rounded(factors, dtype), rounded(gradients, dtype))
    elif dtype == tl.float16:
        result = tl.dot(factors, gradients, input_precision="tf32")
    else:
        result = product(factors, gradients)
    return result


@triton.jit
def store_gradients_of_query_terms(partial, terms, grad, tiles, patch, padded: tl.constexpr, count: tl.constexpr):
    """Writes a patch's part of the gradients of its queries' terms, if they have any."""
    if terms is not None:
        source = terms_of(terms, patch.item, patch.sizes.all_queries, patch.t, patch.heads, padded, count)
        target = _places_of_queries(partial, patch, padded, count)
        store_term_gradients(target, source, gradients_of_queries(grad, tiles), patch.heads, count, grad.dtype)


@triton.jit
def store_no_gradients_of_query_terms(partial, patch, padded: tl.constexpr, count: tl.constexpr):
    """Writes zeros as the part of a patch whose keys are all hidden."""
    if partial is not None:
        target = _places_of_queries(partial, patch, padded, count)
        for term in tl.static_range(count):
            store_term(target, term, tl.zeros([patch.t.shape[0], 1, padded], tl.float32), patch.heads)


@triton.jit
def _places_of_queries(partial, patch, padded: tl.constexpr, count: tl.constexpr):
    """Where a patch writes gradients of its queries' terms: in `[items, blocks, c, count, H]`."""
    block = patch.item * tl.num_programs(0) + tl.program_id(0)
    return terms_of(partial, block, patch.sizes.queries, patch.t, patch.heads, padded, count)


@triton.jit
def add_gradients_of_key_terms(partial, gradients, patch, padded: tl.constexpr):
    """Adds a program's part of the gradients of its keys' terms to `partial.key`."""
    if partial.key is not None:
        count: tl.constexpr = len(gradients)
        slots = original(partial.slots)
        # Programs that share a slot have other keys, or come one after the other. Each element has one thread.
        slot = patch.item * slots + tl.program_id(1) % slots
        keys = patch.s + patch.shift
        target = terms_of(partial.key, slot, patch.sizes.all_keys, keys, patch.heads, padded, count)
        for index in tl.static_range(count):
            added = tl.sum(gradients[index], axis=0)[:, None, :]
            store_term(target, index, load_term(target, index, patch.heads) + added, patch.heads)


@triton.jit
def no_static_gradient(partial, block_t: tl.constexpr, padded: tl.constexpr):
    """A tuple of zeros `[block_t, padded, padded]`; empty without a static matrix."""
    gradient = ()
    if partial is not None:
        gradient += (tl.zeros([block_t, padded, padded], tl.float32),)
    return gradient


@triton.jit
def add_static_gradient(gradient, grad, tiles):
    """Adds a patch's part of the gradient of the static matrix, which is still to be summed over the queries."""
    added = ()
    for index in tl.static_range(len(gradient)):
        added += (gradient[index] + gradients_of_queries(grad, tiles),)
    return added


@triton.jit
def store_static_gradient(partial, gradient, padded: tl.constexpr):
    """Writes a program's part `[padded, padded]` of the gradient of the static matrix, if there is one."""
    if partial is not None:
        program = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
        place = partial + _entries(program + tl.arange(0, 1), padded)
        tl.store(place, tl.sum(gradient[0], axis=0, keep_dims=True))
