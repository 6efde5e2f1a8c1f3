"""Kernels of `dcmha_triton` that compose queries' terms on the tensor cores, by one matrix for each query.

Composition is linear in the heads of a (query, key) pair:

    y[t, s, :] = (Q[t] + K[s]) z[t, s, :]

with `[H, H]` matrices, `Q[t] = 1 + static^T + diag(gate[t]) + up[t] down[t]^T`, and `K[s]` alike without 1 and static.
For all heads of a patch of `block_t` queries by `block_s` keys the matrices of queries are products `[block_s, H] @
[H, H]` on the tensor cores. The matrices of keys would be multiplied along another axis, and transposing a patch in
between takes longer than both products. The terms of keys are therefore applied one by one, to the layout that the
products of queries leave:

    hidden[t, s] = sum_h down[s, h] z[t, s, h]        K[s] z[t, s, :] = hidden[t, s] up[s, :] + gate[s, :] z[t, s, :]

The gradient of a query's matrix is a product too, and those of its terms follow from it. Those of keys' terms are sums
over queries, which each thread adds up by itself:

    dz[t, s, :] = (Q[t] + K[s])^T dy[t, s, :]         dhidden[t, s] = sum_h up[s, h] dy[t, s, h]
    dQ[t] = sum_s dy[t, s, :] z[t, s, :]^T
    d up[t] = dQ[t] down[t]    d down[t] = dQ[t]^T up[t]    d gate[t] = diag(dQ[t])    d static = sum_t dQ[t]^T
    d up[s] = sum_t hidden[t, s] dy[t, s, :]    d down[s] = sum_t dhidden[t, s] z[t, s, :]
    d gate[s, h] = sum_t dy[t, s, h] z[t, s, h]

One kernel makes the matrices, and four have their counterparts in `head_by_head`:

    dcmha_matrices              Q of one stage, from its packed terms
    dcmha_matrix_statistics     x = pre(s); the log-sum-exp of a row over a block of keys
    dcmha_matrix_probs          p = exp(x - lse); a = post(p), written over s
    dcmha_matrix_backward_post  dp = post^T(da), written over da; a; the sums of p dp (delta); gradients of post's terms
    dcmha_matrix_backward_pre   dx = p (dp - delta); ds = pre^T(dx); gradients of pre's terms

A program holds a patch of all heads in registers, 16 or 32 of them with padding. It goes through `turns` blocks of
queries for one block of keys, whose terms and their gradients it keeps, and skips patches that a causal mask or a
window hides.

The four kernels take `mixing` (`Mixing`), `sizes` (`Sizes`), `where` (`Visibility`) and `tables` (`ColumnTables`),
whose shapes are in `arguments`, and `key_counts`, the numbers of keys' terms before and after the softmax. Tables enter
as in `head_by_head`, but no bias comes before the composition.
`DESIGN.md`, "On the tensor cores", has their memory, their instructions and the reasons.
"""

from .matrix_tiles import (
    add_gradients_of_key_terms,
    add_key_gradients,
    add_static_gradient,
    compose,
    exponents,
    gained,
    gather,
    load,
    load_key_terms,
    load_matrices,
    load_of_queries,
    load_term,
    make_patch,
    no_key_gradients,
    no_static_gradient,
    probabilities,
    reached_turns,
    store,
    store_gradients_of_query_terms,
    store_matrices,
    store_no_gradients_of_query_terms,
    store_of_queries,
    store_static_gradient,
    terms_of,
    transposed,
    transposed_terms,
    widened,
)
from .tiles import LOG2_E, bound, exp2, finite, rounded, tl, triton

# What runs on the device is typed by Triton's compiler.
# mypy: disable-error-code="no-untyped-def"


@triton.jit
def dcmha_matrix_statistics(
    scores,  # [items, H, c, n]
    partial_lse,  # [items, n / block_s, H, c], float32
    mixing,
    sizes,
    where,
    tables,
    heads: tl.constexpr,
    padded: tl.constexpr,
    block_t: tl.constexpr,
    block_s: tl.constexpr,
    turns: tl.constexpr,
    key_counts: tl.constexpr,
):
    """The log-sum-exp of each row of composed scores over a block of keys; minus infinity where it hides all keys."""
    here = make_patch(0, turns, sizes, where, heads, block_t, block_s)
    pre_key = load_key_terms(mixing.pre_key, here, padded, key_counts[0])
    first, last, count = reached_turns(where, here, turns, block_t, block_s)
    for turn in range(bound(first), bound(last)):
        patch = make_patch(turn, turns, sizes, where, heads, block_t, block_s)
        pre_query = load_matrices(mixing.pre_query, patch.item, patch.t, sizes.all_queries, padded)
        exponent = exponents(load(scores, patch, padded), pre_query, pre_key, where, tables, patch, padded)
        reference = finite(tl.max(exponent, axis=1))
        total = tl.sum(exp2(exponent - reference[:, None, :]), axis=1)
        store_of_queries(partial_lse, (reference + tl.log2(total)) / LOG2_E, patch, padded)
    for turn in range(bound(count)):
        if (turn < first) | (turn >= last):
            patch = make_patch(turn, turns, sizes, where, heads, block_t, block_s)
            store_of_queries(partial_lse, tl.full([block_t, padded], float("-inf"), tl.float32), patch, padded)


@triton.jit
def dcmha_matrix_probs(
    scores,  # [items, H, c, n]
    probs,  # the same memory, in the dtype of the values
    lse,  # [items, H, c of T], float32
    mixing,
    sizes,
    where,
    tables,
    heads: tl.constexpr,
    padded: tl.constexpr,
    block_t: tl.constexpr,
    block_s: tl.constexpr,
    turns: tl.constexpr,
    key_counts: tl.constexpr,
):
    """Replaces scores by composed probabilities."""
    here = make_patch(0, turns, sizes, where, heads, block_t, block_s)
    pre_key = load_key_terms(mixing.pre_key, here, padded, key_counts[0])
    post_key = load_key_terms(mixing.post_key, here, padded, key_counts[1])
    first, last, count = reached_turns(where, here, turns, block_t, block_s)
    for turn in range(bound(first), bound(last)):
        patch = make_patch(turn, turns, sizes, where, heads, block_t, block_s)
        pre_query = load_matrices(mixing.pre_query, patch.item, patch.t, sizes.all_queries, padded)
        post_query = load_matrices(mixing.post_query, patch.item, patch.t, sizes.all_queries, padded)
        prob = probabilities(load(scores, patch, padded), pre_query, pre_key, lse, where, tables, patch, padded)
        weight = gained(prob, tables, where, patch, padded)
        # Probabilities overwrite scores safely: exactly one thread loads an element, since a tile has at least as
        # many as there are threads, and what is stored at its place depends on that load.
        half = rounded(weight, scores.dtype.element_ty)
        store(probs, compose(half, weight, gather(weight, post_key), post_query, post_key), patch, padded)
    for turn in range(bound(count)):
        if (turn < first) | (turn >= last):
            patch = make_patch(turn, turns, sizes, where, heads, block_t, block_s)
            store(probs, tl.zeros([block_t, block_s, padded], tl.float32), patch, padded)


@triton.jit
def dcmha_matrix_backward_post(
    scores,  # [items, H, c, n]
    grad_composed,  # [items, H, c, n], of the composed probabilities; written: those of the probabilities
    probs,  # [items, H, c, n], written: the composed probabilities
    partial_delta,  # [items, n / block_s, H, c], float32
    partial,  # `TermGradients`, written and added to
    terms,  # [items, c of T, terms, H], those of queries after the softmax, or None
    lse,  # [items, H, c of T], float32
    mixing,
    sizes,
    where,
    tables,
    heads: tl.constexpr,
    padded: tl.constexpr,
    block_t: tl.constexpr,
    block_s: tl.constexpr,
    turns: tl.constexpr,
    key_counts: tl.constexpr,
    query_count: tl.constexpr,
):
    """First half of the backward pass: composed probabilities, gradients of the probabilities and of the post terms."""
    dtype: tl.constexpr = grad_composed.dtype.element_ty
    here = make_patch(0, turns, sizes, where, heads, block_t, block_s)
    pre_key = load_key_terms(mixing.pre_key, here, padded, key_counts[0])
    post_key = load_key_terms(mixing.post_key, here, padded, key_counts[1])
    key_gradients = no_key_gradients(post_key, block_t, block_s, padded)
    static_gradient = no_static_gradient(partial.static, block_t, padded)
    first, last, count = reached_turns(where, here, turns, block_t, block_s)
    for turn in range(bound(first), bound(last)):
        patch = make_patch(turn, turns, sizes, where, heads, block_t, block_s)
        pre_query = load_matrices(mixing.pre_query, patch.item, patch.t, sizes.all_queries, padded)
        post_query = load_matrices(mixing.post_query, patch.item, patch.t, sizes.all_queries, padded)
        prob = probabilities(load(scores, patch, padded), pre_query, pre_key, lse, where, tables, patch, padded)
        weight = gained(prob, tables, where, patch, padded)
        hidden, half = gather(weight, post_key), rounded(weight, scores.dtype.element_ty)
        store(probs, compose(half, weight, hidden, post_query, post_key), patch, padded)
        half_grad = load(grad_composed, patch, padded)
        grad = widened(half_grad)
        hidden_grads = gather(grad, transposed_terms(post_key))
        grad_prob = compose(half_grad, grad, hidden_grads, transposed(post_query, dtype), transposed_terms(post_key))
        if tables.pairs is not None:
            store(tables.pairs, prob * grad_prob, patch, padded)
        # Delta sums the gradients as they are stored, for the same reason as in `dcmha_backward_post`.
        grad_prob = gained(grad_prob, tables, where, patch, padded)
        grad_prob = rounded(grad_prob, dtype).to(tl.float32)
        # Gradients overwrite gradients safely, for the same reason as probabilities do in `dcmha_matrix_probs`.
        store(grad_composed, grad_prob, patch, padded)
        store_of_queries(partial_delta, tl.sum(prob * grad_prob, axis=1), patch, padded)
        key_gradients = add_key_gradients(key_gradients, grad, weight, hidden, hidden_grads)
        half = rounded(weight, dtype)
        store_gradients_of_query_terms(partial.query, terms, half_grad, half, patch, padded, query_count)
        static_gradient = add_static_gradient(static_gradient, half_grad, half)
    for turn in range(bound(count)):
        if (turn < first) | (turn >= last):
            patch = make_patch(turn, turns, sizes, where, heads, block_t, block_s)
            store(probs, tl.zeros([block_t, block_s, padded], tl.float32), patch, padded)
            if tables.pairs is not None:
                store(tables.pairs, tl.zeros([block_t, block_s, padded], tl.float32), patch, padded)
            store_no_gradients_of_query_terms(partial.query, patch, padded, query_count)
            store_of_queries(partial_delta, tl.zeros([block_t, padded], tl.float32), patch, padded)
    add_gradients_of_key_terms(partial, key_gradients, here, padded)
    store_static_gradient(partial.static, static_gradient, padded)


@triton.jit
def dcmha_matrix_backward_pre(
    scores,  # [items, H, c, n]
    grad_probs,  # [items, H, c, n], of the probabilities
    grad_scores,  # [items, H, c, n], written
    delta,  # [items, H, c of T], float32
    partial,  # `TermGradients`, written and added to
    terms,  # [items, c of T, terms, H], those of queries before the softmax, or None
    lse,  # [items, H, c of T], float32
    mixing,
    sizes,
    where,
    tables,
    heads: tl.constexpr,
    padded: tl.constexpr,
    block_t: tl.constexpr,
    block_s: tl.constexpr,
    turns: tl.constexpr,
    key_counts: tl.constexpr,
    query_count: tl.constexpr,
):
    """Second half of the backward pass: gradients of the scores and of the pre terms."""
    dtype: tl.constexpr = grad_probs.dtype.element_ty
    here = make_patch(0, turns, sizes, where, heads, block_t, block_s)
    pre_key = load_key_terms(mixing.pre_key, here, padded, key_counts[0])
    key_gradients = no_key_gradients(pre_key, block_t, block_s, padded)
    static_gradient = no_static_gradient(partial.static, block_t, padded)
    first, last, count = reached_turns(where, here, turns, block_t, block_s)
    for turn in range(bound(first), bound(last)):
        patch = make_patch(turn, turns, sizes, where, heads, block_t, block_s)
        pre_query = load_matrices(mixing.pre_query, patch.item, patch.t, sizes.all_queries, padded)
        score = load(scores, patch, padded)
        prob = probabilities(score, pre_query, pre_key, lse, where, tables, patch, padded)
        mean = load_of_queries(delta, patch, padded, 0.0)
        grad = prob * (widened(load(grad_probs, patch, padded)) - mean[:, None, :])
        if tables.pairs is not None:
            store(tables.pairs, grad, patch, padded)
        hidden_grads, half_grad = gather(grad, transposed_terms(pre_key)), rounded(grad, dtype)
        composed = compose(half_grad, grad, hidden_grads, transposed(pre_query, dtype), transposed_terms(pre_key))
        store(grad_scores, composed, patch, padded)
        tiles = widened(score)
        key_gradients = add_key_gradients(key_gradients, grad, tiles, gather(tiles, pre_key), hidden_grads)
        half = rounded(tiles, dtype)
        store_gradients_of_query_terms(partial.query, terms, half_grad, half, patch, padded, query_count)
        static_gradient = add_static_gradient(static_gradient, half_grad, half)
    for turn in range(bound(count)):
        if (turn < first) | (turn >= last):
            patch = make_patch(turn, turns, sizes, where, heads, block_t, block_s)
            store(grad_scores, tl.zeros([block_t, block_s, padded], tl.float32), patch, padded)
            if tables.pairs is not None:
                store(tables.pairs, tl.zeros([block_t, block_s, padded], tl.float32), patch, padded)
            store_no_gradients_of_query_terms(partial.query, patch, padded, query_count)
    add_gradients_of_key_terms(partial, key_gradients, here, padded)
    store_static_gradient(partial.static, static_gradient, padded)


@triton.jit
def dcmha_matrices(
    matrices,  # [items, length, padded, padded], written
    terms,  # [items, length, count, H], packed; None without terms
    static,  # [H, H], [in, out], or None
    length,
    heads: tl.constexpr,
    padded: tl.constexpr,
    count: tl.constexpr,
    block: tl.constexpr,
):
    """The queries' matrices `[items, length, padded, padded]` of a stage, [in, out]; zero for padding heads."""
    item, positions = tl.program_id(1).to(tl.int64), tl.program_id(0) * block + tl.arange(0, block)
    rank: tl.constexpr = count // 2
    head = tl.arange(0, padded)
    is_diagonal = head[:, None] == head[None, :]
    identity = tl.where(is_diagonal & (head < heads)[None, :], 1.0, 0.0)[None, :, :]
    matrix = tl.zeros([block, padded, padded], tl.float32) + identity
    if terms is not None:
        places = terms_of(terms, item, length, positions, heads, padded, count)
        for index in tl.static_range(rank):
            down, up = load_term(places, index, heads), load_term(places, rank + index, heads)
            matrix += tl.permute(down, (0, 2, 1)) * up
        if count % 2:
            matrix += tl.where(is_diagonal[None, :, :], load_term(places, count - 1, heads), 0.0)
    if static is not None:
        inside = (head < heads)[:, None] & (head < heads)[None, :]
        mixed = tl.load(static + head[:, None] * heads + head[None, :], mask=inside, other=0.0)
        matrix += mixed.to(tl.float32)[None, :, :]
    store_matrices(matrices, matrix, item, positions, length, padded)


TENSOR_CORE_KERNELS = {
    "dcmha_matrices": dcmha_matrices,
    "dcmha_matrix_statistics": dcmha_matrix_statistics,
    "dcmha_matrix_probs": dcmha_matrix_probs,
    "dcmha_matrix_backward_post": dcmha_matrix_backward_post,
    "dcmha_matrix_backward_pre": dcmha_matrix_backward_pre,
}
