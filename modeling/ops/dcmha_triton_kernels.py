"""The kernels of `dcmha_triton`: everything between the matrix products, for all heads of a patch of scores at once.

A patch is `block_t` queries by `block_s` keys of one batch item. Composition mixes heads for each (query, key) pair on
its own, so a program that sees a patch of *every* head needs nothing from its neighbours. For one stage, with factors
`down`, `up` and `gate` (those of the query and those of the key, summed), a map `z` per head and its composition `y`:

    hidden[r] = sum_h z[h] down[r, h]          y[h] = z[h] (1 + gate[h]) + sum_r hidden[r] up[r, h]

The transposed composition, from gradients of `y` to those of `z`, is the same with `down` and `up` swapped.

    dcmha_statistics     x = pre(s); the log-sum-exp of a row over this patch
    dcmha_merge          the log-sum-exp of a row over all patches
    dcmha_probs          p = exp(x - lse); a = post(p), written over s
    dcmha_backward_post  dp = post^T(da); writes a, the sums of p dp (delta) and the gradients of the post factors
    dcmha_backward_pre   dx = p (dp - delta); ds = pre^T(dx); writes ds and the gradients of the pre factors

The gradients of factors are, with `hz = down z` and `hg = up dy`, sums over keys for queries and over queries for keys:

    d down[r, h] = sum z[h] hg[r]      d up[r, h] = sum dy[h] hz[r]      d gate[h] = sum z[h] dy[h]

where `z` is `s` or `p` and `dy` is `dx` or `da`. Delta needs all heads of `dp`, so that, other than in plain attention,
it cannot come from the output, and the backward pass needs two sweeps.

Memory: heads are looped over, not held. A program reads its patch two or three times, one head's tile after the other,
so that registers hold the hidden maps only, whatever the number of heads; the repeated reads are meant to be served by
the first-level cache (16 heads of a 16 x 64 patch in half precision are 32 KiB). From the second level each kernel then
reads and writes a map once: 2 + 4 bytes for each (head, query, key) forward and 6 + 6 backward in half precision, where
the matrix products need another 4 and 10. Kernels that kept the scores of all heads in registers could do no better:
with the products done elsewhere this traffic is the floor.

A static matrix is a full mix of heads, a matrix product, and is left to the vendor's: `statics` has maps that it has
mixed already (scores; gradients of composed probabilities), read in place of the identity's term, and `plain`, where
kernels leave the tiles that it has yet to mix (p; dx). Each stage that has one costs two more maps written and read.

Head groups, whose low-rank terms are apart, come as items of the batch; `groups` items share one row of a mask.

Tiles are 2-D, and a thread holds the same entries of each, so that sums over heads stay in a thread. Sums over keys and
over queries do not; larger patches make them rarer, and registers bound the patches: `TILES` in
`dcmha_triton_workspace` has their sizes. Gradients of factors leave as one partial sum for each patch and are added up
in a fixed order: no atomics, the same result every time.
"""

from .dcmha_triton_tiles import (
    biased,
    compose,
    gather,
    hidden_maps,
    load,
    load_of_queries,
    log_sum_exp,
    make_patch,
    make_stage,
    make_visible,
    mixed,
    no_hidden,
    probability,
    store,
    store_of_factors,
    store_of_queries,
    transposed,
)

# What runs on the device is typed by Triton's compiler.
# mypy: disable-error-code="no-untyped-def"

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("implementation='triton' needs Triton: pip install triton, or use 'chunked'") from error


@triton.jit
def dcmha_statistics(
    scores,  # [items, H, c, n]
    partial_lse,  # [items, n / block_s, H, c], float32
    factors,
    sizes,
    where,
    statics,
    heads: tl.constexpr,
    rows: tl.constexpr,
    block_t: tl.constexpr,
    block_s: tl.constexpr,
):
    """The log-sum-exp of each row of composed scores over one patch; minus infinity where it hides all keys."""
    patch = make_patch(sizes, heads, block_t, block_s)
    pre = make_stage(factors.pre_query, factors.pre_key, patch, rows[0], rows[1])
    visible = make_visible(where, patch)
    hidden = hidden_maps(scores, pre, patch, heads, block_t, block_s)
    for head in range(heads):
        score = load(scores, patch, head)
        composed = compose(score, mixed(statics.scores, score, patch, head), hidden, pre, head)
        composed = tl.where(visible, biased(composed, where, visible, patch), float("-inf"))
        highest = tl.max(composed, axis=1)
        reference = tl.where(highest == float("-inf"), 0.0, highest)
        total = tl.sum(tl.exp(composed - reference[:, None]), axis=1)
        store_of_queries(partial_lse, reference + tl.log(total), head, heads, patch)


@triton.jit
def dcmha_merge(
    partial_lse,  # [items, blocks, H, c], float32
    lse,  # [items, H, c of T], float32, written
    blocks,
    queries,
    all_queries,
    block_t: tl.constexpr,
):
    """The log-sum-exp of each row, from those of its patches."""
    t, head, item = tl.program_id(0) * block_t + tl.arange(0, block_t), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    partial = partial_lse + (item * blocks * heads + head) * queries
    merged = log_sum_exp(partial, blocks, heads * queries, t, t < queries, block_t)
    tl.store(lse + (item * heads + head) * all_queries + t, merged, mask=t < queries)


@triton.jit
def dcmha_probs(
    scores,  # [items, H, c, n]
    probs,  # the same memory, in the dtype of the values
    lse,  # [items, H, c of T], float32
    factors,
    sizes,
    where,
    statics,
    heads: tl.constexpr,
    rows: tl.constexpr,
    block_t: tl.constexpr,
    block_s: tl.constexpr,
):
    """Replaces scores by composed probabilities."""
    patch = make_patch(sizes, heads, block_t, block_s)
    pre = make_stage(factors.pre_query, factors.pre_key, patch, rows[0], rows[1])
    post = make_stage(factors.post_query, factors.post_key, patch, rows[2], rows[3])
    softmax = (lse, make_visible(where, patch), where)
    hidden_scores = hidden_maps(scores, pre, patch, heads, block_t, block_s)
    hidden_probs = no_hidden(post, block_t, block_s)
    if len(hidden_probs) > 0:
        for head in range(heads):
            score = load(scores, patch, head)
            prob = probability(score, hidden_scores, pre, softmax, statics, patch, head)
            hidden_probs = gather(hidden_probs, prob, post[0], head)
    for head in range(heads):
        score = load(scores, patch, head)
        prob = probability(score, hidden_scores, pre, softmax, statics, patch, head)
        # Another thread may have loaded what this one stores.
        tl.debug_barrier()
        store(probs, compose(prob, prob, hidden_probs, post, head), patch, head)
        if statics.plain is not None:
            store(statics.plain, prob, patch, head)


@triton.jit
def dcmha_backward_post(
    scores,  # [items, H, c, n]
    grad_composed,  # [items, H, c, n], of the composed probabilities
    probs,  # [items, H, c, n], written: the composed probabilities
    partial_delta,  # [items, n / block_s, H, c], float32
    partial_query,  # [items, n / block_s, rows, H, c], float32
    partial_key,  # [items, c / block_t, rows, H, n], float32
    lse,  # [items, H, c of T], float32
    factors,
    sizes,
    where,
    statics,
    heads: tl.constexpr,
    rows: tl.constexpr,
    block_t: tl.constexpr,
    block_s: tl.constexpr,
):
    """First sweep of the backward pass: composed probabilities, delta, gradients of the factors after the softmax."""
    patch = make_patch(sizes, heads, block_t, block_s)
    pre = make_stage(factors.pre_query, factors.pre_key, patch, rows[0], rows[1])
    post = make_stage(factors.post_query, factors.post_key, patch, rows[2], rows[3])
    softmax = (lse, make_visible(where, patch), where)
    hidden_scores = hidden_maps(scores, pre, patch, heads, block_t, block_s)
    hidden_probs, hidden_grads = no_hidden(post, block_t, block_s), no_hidden(post, block_t, block_s)
    if len(hidden_probs) > 0:
        for head in range(heads):
            score = load(scores, patch, head)
            prob = probability(score, hidden_scores, pre, softmax, statics, patch, head)
            hidden_probs = gather(hidden_probs, prob, post[0], head)
            hidden_grads = gather(hidden_grads, load(grad_composed, patch, head), post[1], head)
    for head in range(heads):
        score = load(scores, patch, head)
        prob = probability(score, hidden_scores, pre, softmax, statics, patch, head)
        grad = load(grad_composed, patch, head)
        store(probs, compose(prob, prob, hidden_probs, post, head), patch, head)
        if statics.plain is not None:
            store(statics.plain, prob, patch, head)
        grad_prob = compose(grad, mixed(statics.grads, grad, patch, head), hidden_grads, transposed(post), head)
        delta = tl.sum(prob * grad_prob, axis=1)
        store_of_queries(partial_delta, delta, head, heads, patch)
        store_of_factors(
            partial_query, partial_key, prob, grad, hidden_probs, hidden_grads, patch, head, rows[2], rows[3]
        )


@triton.jit
def dcmha_backward_pre(
    scores,  # [items, H, c, n]
    grad_composed,  # [items, H, c, n], of the composed probabilities
    grad_scores,  # [items, H, c, n], written
    delta,  # [items, H, c of T], float32
    partial_query,  # [items, n / block_s, rows, H, c], float32
    partial_key,  # [items, c / block_t, rows, H, n], float32
    lse,  # [items, H, c of T], float32
    factors,
    sizes,
    where,
    statics,
    heads: tl.constexpr,
    rows: tl.constexpr,
    block_t: tl.constexpr,
    block_s: tl.constexpr,
):
    """Second sweep of the backward pass: gradients of the scores and of the factors before the softmax."""
    patch = make_patch(sizes, heads, block_t, block_s)
    pre = make_stage(factors.pre_query, factors.pre_key, patch, rows[0], rows[1])
    post = make_stage(factors.post_query, factors.post_key, patch, rows[2], rows[3])
    softmax = (lse, make_visible(where, patch), where)
    hidden_scores = hidden_maps(scores, pre, patch, heads, block_t, block_s)
    hidden_probs = hidden_maps(grad_composed, transposed(post), patch, heads, block_t, block_s)
    hidden_grads = no_hidden(pre, block_t, block_s)
    if len(hidden_grads) > 0:
        for head in range(heads):
            score, grad = load(scores, patch, head), load(grad_composed, patch, head)
            prob = probability(score, hidden_scores, pre, softmax, statics, patch, head)
            grad = compose(grad, mixed(statics.grads, grad, patch, head), hidden_probs, transposed(post), head)
            grad = prob * (grad - load_of_queries(delta, patch, head)[:, None])
            hidden_grads = gather(hidden_grads, grad, pre[1], head)
    for head in range(heads):
        score, grad = load(scores, patch, head), load(grad_composed, patch, head)
        prob = probability(score, hidden_scores, pre, softmax, statics, patch, head)
        grad = compose(grad, mixed(statics.grads, grad, patch, head), hidden_probs, transposed(post), head)
        grad = prob * (grad - load_of_queries(delta, patch, head)[:, None])
        store(grad_scores, compose(grad, grad, hidden_grads, transposed(pre), head), patch, head)
        if statics.plain is not None:
            store(statics.plain, grad, patch, head)
        store_of_factors(
            partial_query, partial_key, score, grad, hidden_scores, hidden_grads, patch, head, rows[0], rows[1]
        )


KERNELS = {
    "dcmha_statistics": dcmha_statistics,
    "dcmha_merge": dcmha_merge,
    "dcmha_probs": dcmha_probs,
    "dcmha_backward_post": dcmha_backward_post,
    "dcmha_backward_pre": dcmha_backward_pre,
}
