"""Kernels of `dcmha_triton` that go through the heads one after the other, for a patch of a chunk's maps.

They serve where those of `tensor_cores` do not: in float32, and for few or many heads. `DESIGN.md`, "Head by head", has
their memory, their instructions and the reasons.

A patch is `block_t` queries by `block_s` keys of one item. Composition mixes heads for each (query, key) pair on its
own, so that a program with a patch of every head needs nothing from other programs. For one stage, with factors `down`,
`up` and `gate` (those of the query and those of the key, summed), a map `z` per head and its composition `y`:

    hidden[r] = sum_h z[h] down[r, h]          y[h] = z[h] (1 + gate[h]) + sum_r hidden[r] up[r, h]

The transposed composition, from gradients of `y` to those of `z`, is the same with `down` and `up` swapped.

    dcmha_statistics     x = pre(s); the log-sum-exp of a row over this patch
    dcmha_merge          the log-sum-exp of a row over all patches
    dcmha_probs          p = exp(x - lse); a = post(p), written over s
    dcmha_backward_post  dp = post^T(da); writes a, dp, the sums of p dp and p (delta) and the gradients of post factors
    dcmha_backward_pre   dx = p (dp - delta); ds = pre^T(dx); writes ds and the gradients of the pre factors

The gradients of factors are, with `hz = down z` and `hg = up dy`, sums over keys for queries and over queries for keys:

    d down[r, h] = sum z[h] hg[r]      d up[r, h] = sum dy[h] hz[r]      d gate[h] = sum z[h] dy[h]

where `z` is `s` or `p` and `dy` is `dx` or `da`.

With a bias by distance `s` or `x` has it added, with a gain `p` is multiplied before `post`. `pairs` gets what the
gradient of a table sums: `p` times the gradient of the gained probabilities, or `dx`.

All kernels but `dcmha_merge` take `factors` (`Factors`), `sizes` (`Sizes`), `where` (`Visibility`), `statics`
(`Statics`) and `tables` (`ColumnTables`), whose shapes are in `arguments`. `term_counts` are the numbers of terms: of
queries and of keys before the softmax, then after it.
"""

from .tiles import (
    LOG2_E,
    compose,
    composed_score,
    exp2,
    finite,
    gather,
    hidden_maps,
    load,
    load_of_queries,
    log_sum_exp,
    make_patch,
    make_penalty,
    make_stage,
    make_tables,
    mixed,
    no_hidden,
    plus,
    probability,
    rounded,
    store,
    store_of_factors,
    store_of_queries,
    times,
    tl,
    transposed,
    triton,
)

# What runs on the device is typed by Triton's compiler.
# mypy: disable-error-code="no-untyped-def"


@triton.jit
def dcmha_statistics(
    scores,  # [items, H, c, n]
    partial_lse,  # [items, n / block_s, H, c], float32
    factors,
    sizes,
    where,
    statics,
    tables,
    heads: tl.constexpr,
    term_counts: tl.constexpr,
    block_t: tl.constexpr,
    block_s: tl.constexpr,
):
    """The log-sum-exp of each row of composed scores over one patch; minus infinity where it hides all keys."""
    patch = make_patch(sizes, where, heads, block_t, block_s)
    of_patch = make_tables(tables, where, patch)
    pre = make_stage(factors.pre_query, factors.pre_key, patch, term_counts[0], term_counts[1])
    penalty = make_penalty(where, patch)
    hidden = hidden_maps(scores, of_patch.composed_bias, pre, patch, heads, block_t, block_s)
    for head in range(heads):
        composed = composed_score(scores, hidden, pre, statics, of_patch, patch, head)
        exponent = composed * LOG2_E + penalty
        reference = finite(tl.max(exponent, axis=1))
        total = tl.sum(exp2(exponent - reference[:, None]), axis=1)
        store_of_queries(partial_lse, (reference + tl.log2(total)) / LOG2_E, head, heads, patch)


@triton.jit
def dcmha_merge(
    partial_lse,  # [items, blocks, H, c], float32
    lse,  # [items, H, c of T], float32, written
    blocks,
    queries,
    all_queries,
    block_t: tl.constexpr,
):
    """The log-sum-exp of each row, from those of its patches; zero where all keys are hidden."""
    t, head, item = tl.program_id(0) * block_t + tl.arange(0, block_t), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    partial = partial_lse + (item * blocks * heads + head) * queries
    merged = log_sum_exp(partial, blocks, heads * queries, t, t < queries, block_t)
    tl.store(lse + (item * heads + head) * all_queries + t, finite(merged), mask=t < queries)


@triton.jit
def hidden_probabilities(
    scores,
    kept,  # [items, H, c, n], written: the probabilities
    lse,
    pre,
    post,
    where,
    statics,
    tables,
    patch,
    heads: tl.constexpr,
    block_t: tl.constexpr,
    block_s: tl.constexpr,
):
    """The hidden maps of the probabilities. These are written to `kept`, without the gain, to be read once more."""
    penalty = make_penalty(where, patch)
    hidden_scores = hidden_maps(scores, tables.composed_bias, pre, patch, heads, block_t, block_s)
    hidden = no_hidden(post, block_t, block_s)
    for head in range(heads):
        prob = probability(scores, hidden_scores, pre, (lse, penalty), statics, tables, patch, head)
        tl.debug_barrier()
        store(kept, prob, patch, head)
        hidden = gather(hidden, times(prob, tables.gain, patch, head), post[0], head)
    tl.debug_barrier()
    return hidden


@triton.jit
def dcmha_probs(
    scores,  # [items, H, c, n]
    probs,  # the same memory, in the dtype of the values
    lse,  # [items, H, c of T], float32
    factors,
    sizes,
    where,
    statics,
    tables,
    heads: tl.constexpr,
    term_counts: tl.constexpr,
    block_t: tl.constexpr,
    block_s: tl.constexpr,
):
    """Replaces scores by composed probabilities."""
    patch = make_patch(sizes, where, heads, block_t, block_s)
    of_patch = make_tables(tables, where, patch)
    pre = make_stage(factors.pre_query, factors.pre_key, patch, term_counts[0], term_counts[1])
    post = make_stage(factors.post_query, factors.post_key, patch, term_counts[2], term_counts[3])
    hidden = hidden_probabilities(
        scores, scores, lse, pre, post, where, statics, of_patch, patch, heads, block_t, block_s
    )
    for head in range(heads):
        prob = times(load(scores, patch, head), of_patch.gain, patch, head)
        # A thread may store where another one loads, so all of them have to load first.
        tl.debug_barrier()
        store(probs, compose(prob, prob, hidden, post, head), patch, head)
        if statics.plain is not None:
            store(statics.plain, prob, patch, head)


@triton.jit
def dcmha_backward_post(
    scores,  # [items, H, c, n]
    grad_composed,  # [items, H, c, n], of the composed probabilities
    kept,  # the memory of `probs`, in the dtype of the scores
    probs,  # [items, H, c, n], written: the composed probabilities
    grad_probs,  # [items, H, c, n], written; may be the memory of `grad_composed`, or of `statics.grads`
    partial_delta,  # [items, n / block_s, H, c], float32: the sums of p dp
    partial_total,  # the same of p
    partial_query,  # [items, c / block_t, n / block_s, H, terms, block_t], float32
    partial_key,  # [items, c / block_t, n / block_s, H, terms, block_s], float32
    lse,  # [items, H, c of T], float32
    factors,
    sizes,
    where,
    statics,
    tables,
    heads: tl.constexpr,
    term_counts: tl.constexpr,
    block_t: tl.constexpr,
    block_s: tl.constexpr,
):
    """First half of the backward pass: composed probabilities, gradients of probabilities and of the post factors."""
    patch = make_patch(sizes, where, heads, block_t, block_s)
    of_patch = make_tables(tables, where, patch)
    pre = make_stage(factors.pre_query, factors.pre_key, patch, term_counts[0], term_counts[1])
    post = make_stage(factors.post_query, factors.post_key, patch, term_counts[2], term_counts[3])
    hidden_probs = hidden_probabilities(
        scores, kept, lse, pre, post, where, statics, of_patch, patch, heads, block_t, block_s
    )
    hidden_grads = hidden_maps(grad_composed, (), transposed(post), patch, heads, block_t, block_s)
    for head in range(heads):
        prob, grad = load(kept, patch, head), load(grad_composed, patch, head)
        mixed_grad = mixed(statics.grads, (), grad, patch, head)
        gained = times(prob, of_patch.gain, patch, head)
        tl.debug_barrier()
        store(probs, compose(gained, gained, hidden_probs, post, head), patch, head)
        if statics.plain is not None:
            store(statics.plain, gained, patch, head)
        grad_gained = compose(grad, mixed_grad, hidden_grads, transposed(post), head)
        if tables.pairs is not None:
            store(tables.pairs, prob * grad_gained, patch, head)
        # `dcmha_backward_pre` subtracts delta, the mean of a row's gradients, from the stored gradients. So that equal
        # gradients cancel, the mean is of the stored (rounded) gradients, and is divided by the sum of probabilities,
        # which rounding keeps from being one.
        grad_prob = times(grad_gained, of_patch.gain, patch, head)
        grad_prob = rounded(grad_prob, grad_probs.dtype.element_ty).to(tl.float32)
        store(grad_probs, grad_prob, patch, head)
        store_of_queries(partial_delta, tl.sum(prob * grad_prob, axis=1), head, heads, patch)
        store_of_queries(partial_total, tl.sum(prob, axis=1), head, heads, patch)
        store_of_factors(
            partial_query,
            partial_key,
            gained,
            grad,
            hidden_probs,
            hidden_grads,
            patch,
            head,
            term_counts[2],
            term_counts[3],
        )


@triton.jit
def dcmha_backward_pre(
    scores,  # [items, H, c, n]
    grad_probs,  # [items, H, c, n], of the probabilities
    grad_scores,  # [items, H, c, n], written
    delta,  # [items, H, c of T], float32
    partial_query,  # [items, c / block_t, n / block_s, H, terms, block_t], float32
    partial_key,  # [items, c / block_t, n / block_s, H, terms, block_s], float32
    lse,  # [items, H, c of T], float32
    factors,
    sizes,
    where,
    statics,
    tables,
    heads: tl.constexpr,
    term_counts: tl.constexpr,
    block_t: tl.constexpr,
    block_s: tl.constexpr,
):
    """Second half of the backward pass: gradients of the scores and of the pre factors."""
    patch = make_patch(sizes, where, heads, block_t, block_s)
    of_patch = make_tables(tables, where, patch)
    pre = make_stage(factors.pre_query, factors.pre_key, patch, term_counts[0], term_counts[1])
    softmax = (lse, make_penalty(where, patch))
    hidden_scores = hidden_maps(scores, of_patch.composed_bias, pre, patch, heads, block_t, block_s)
    for head in range(heads):
        prob = probability(scores, hidden_scores, pre, softmax, statics, of_patch, patch, head)
        grad = prob * (load(grad_probs, patch, head) - load_of_queries(delta, patch, head)[:, None])
        store(grad_scores, grad, patch, head)
        if tables.pairs is not None:
            store(tables.pairs, grad, patch, head)
    tl.debug_barrier()
    hidden_grads = hidden_maps(grad_scores, (), transposed(pre), patch, heads, block_t, block_s)
    for head in range(heads):
        score = plus(load(scores, patch, head), of_patch.composed_bias, patch, head)
        grad = load(grad_scores, patch, head)
        tl.debug_barrier()
        store(grad_scores, compose(grad, grad, hidden_grads, transposed(pre), head), patch, head)
        if statics.plain is not None:
            store(statics.plain, grad, patch, head)
        store_of_factors(
            partial_query,
            partial_key,
            score,
            grad,
            hidden_scores,
            hidden_grads,
            patch,
            head,
            term_counts[0],
            term_counts[1],
        )


HEAD_BY_HEAD_KERNELS = {
    "dcmha_statistics": dcmha_statistics,
    "dcmha_merge": dcmha_merge,
    "dcmha_probs": dcmha_probs,
    "dcmha_backward_post": dcmha_backward_post,
    "dcmha_backward_pre": dcmha_backward_pre,
}
