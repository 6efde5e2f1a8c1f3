/* The backward pass, which computes all maps of a chunk again.

   Chunks of queries are worked on one after the other, and a task is one block of keys of an item. The gradients of
   keys, values and their terms are sums over chunks: only the task of their block adds to them. The gradients of
   queries, their terms and tables are sums over blocks: each block writes a part of its own, and the parts are added
   afterwards, in the order of the blocks. So no result depends on the number of threads. */

#ifndef DYNATTN_BACKWARD_H
#define DYNATTN_BACKWARD_H

#include "softmax.h"
#include "tables.h"
#include "threads.h"

#define MATRIX_TILE (LANES == 16 ? 4 : 2) /* processors with 16 lanes have twice as many registers */

/* Gradients of all inputs, to which the pass adds unless a comment says that it writes them; null where an input is
   absent. */
typedef struct {
    float *query;                    /* [items, heads, queries, width], which the pass writes */
    float *key, *value;              /* [items, kv_heads, blocks, BLOCK_KEYS, padded_width] */
    float *query_terms[STAGES];      /* [items, queries, terms, heads], which the pass writes */
    float *key_terms[STAGES];        /* [items, blocks, terms, heads, BLOCK_KEYS] */
    float *matrices[STAGES];         /* [items, blocks, heads in, heads out] */
    float *bias, *gain;              /* [items, heads, table_length] */
} gradients;

/* The gradients of the items from `item` on. */
static gradients gradients_from(const gradients *whole, long item, const problem *given) {
    long heads = given->heads, keys = given->kv_heads * blocks_of(given) * BLOCK_KEYS * padded_width(given);
    long size = sizeof(float), matrix = blocks_of(given) * heads * heads, table = heads * given->table_length;
    gradients part = {
        .query = address(whole->query, item * heads * given->queries * given->width, size),
        .key = address(whole->key, item * keys, size),
        .value = address(whole->value, item * keys, size),
        .bias = address(whole->bias, item * table, size),
        .gain = address(whole->gain, item * table, size),
    };
    for (int p = PRE; p < STAGES; p++) {
        part.query_terms[p] = address(whole->query_terms[p], item * given->queries * query_terms_size(given, p), size);
        part.key_terms[p] = address(whole->key_terms[p], item * blocks_of(given) * key_terms_size(given, p), size);
        part.matrices[p] = address(whole->matrices[p], item * matrix, size);
    }
    return part;
}

/* A chunk in the backward pass. */
typedef struct {
    chunk of;
    float *scores, *probs, *grad;              /* [blocks] tiles; the same memory for the first two without `pre` */
    float *grad_out;                           /* [heads, rows, row_slots] */
    float *query_tokens, *grad_out_tokens;     /* both as [heads, slots of rows, padded_width] */
    float *sums;                               /* [blocks, heads, MAX_CHUNK], see `sum_gradients` */
    float *query_parts[STAGES];                /* [blocks, rows, terms, heads], what each block adds to the gradients */
    float *bias_parts, *gain_parts;            /* [blocks, heads, STRIP], the same for tables */
} backward_chunk;

typedef struct {
    const problem *given;
    packed_keys packed;
    long most_blocks; /* that any chunk sees */
    gradients to;
    backward_chunk *chunks; /* [items] */
    float *memory;          /* of all items, and then of all threads */
    long item_memory, thread_memory;
    float scaling;
    long first; /* the first query of the chunks that are worked on now */
} backward_pass;

INLINE float *tile_of(const backward_chunk *part, float *tiles, long block) {
    return tiles + (block - part->of.begin_block) * tile_size(&part->of);
}

static backward_chunk place_backward_chunk(const problem *given, packed_keys packed, long blocks, long item,
                                           long first, float **next) {
    long rows = given->heads * given->chunk, tiles = blocks * rows * BLOCK_KEYS;
    backward_chunk new = {.of = place_chunk(given, packed, blocks, item, first, next)};
    new.probs = take(next, tiles), new.grad = take(next, tiles);
    new.scores = given->stages[PRE].compose || given->stages[PRE].matrix ? take(next, tiles) : new.probs;
    new.grad_out = take(next, rows * row_slots(given));
    /* Without pairs a slot is an element, and the rows have this layout already. */
    new.query_tokens = takes_pairs(given) ? take(next, rows / 2 * padded_width(given)) : new.of.query;
    new.grad_out_tokens = takes_pairs(given) ? take(next, rows / 2 * padded_width(given)) : new.grad_out;
    new.sums = take(next, blocks * given->heads * MAX_CHUNK);
    for (int p = PRE; p < STAGES; p++)
        new.query_parts[p] = take(next, blocks * given->chunk * query_terms_size(given, p));
    new.bias_parts = take(next, given->bias ? blocks * given->heads * STRIP : 0);
    new.gain_parts = take(next, given->gain ? blocks * given->heads * STRIP : 0);
    return new;
}

/* Copies a chunk's rows of queries or output gradients as pairs of neighbouring queries, [heads, slots of rows,
   padded_width], for products that sum over queries. */
static void read_query_pairs(float *to, const heads_tensor *from, const chunk *of) {
    long size = of->rows / 2 * padded_width(of->given);
    for (long h = 0; h < of->given->heads; h++)
        read_tokens(to + h * size, from, of->item, h, of->first, of->queries, of->given);
}

/* A head of a patch, transposed, as the left side of a product that sums over its first `count` queries. Where products
   take pairs, it is multiplied by `factor` and written to `pairs`. */
static left_matrix keys_by_queries(const chunk *of, pairs_of_tile pairs, float *tile, long h, patch at, long count,
                                   float factor) {
    float *row = tile_row(of, tile, h, at.first);
    if (!takes_pairs(of->given)) return (left_matrix){row + at.keys.begin, 1, BLOCK_KEYS, 0};
    for (long t = 0; t < count; t += 2, row += 2 * BLOCK_KEYS)
        for (long s = at.keys.begin; s < at.keys.end; s += LANES) {
            vec first = *(vec *)(row + s), second = t + 1 < count ? *(vec *)(row + BLOCK_KEYS + s) : (vec){0};
            write_pairs_of_two(pairs + t / 2 * BLOCK_KEYS + s, first * factor, second * factor);
        }
    return (left_matrix){pairs + at.keys.begin, 1, BLOCK_KEYS, 1};
}

/* Adds the product of a tile `left`, transposed, and `right` [heads, slots of rows, padded_width] to the gradient of
   the keys or values of a block; `sums` is [items, kv_heads, blocks, BLOCK_KEYS, padded_width]. `factor` multiplies
   the product where it is of pairs; without pairs `right` is scaled already. */
static void add_products(const chunk *of, float *sums, float *left, const float *right, float factor, long block) {
    long width = padded_width(of->given), repeats = of->given->heads / of->given->kv_heads;
    long head_size = blocks_of(of->given) * BLOCK_KEYS * width;
    sums += of->item * of->given->kv_heads * head_size + block * BLOCK_KEYS * width;
    for (long h = 0; h < of->given->heads; h++)
        EACH_PATCH(at, of, block) {
            long count = smaller(at.first + at.rows, of->queries) - at.first;
            pairs_of_tile pairs;
            left_matrix transposed = keys_by_queries(of, pairs, left, h, at, count, factor);
            const float *from = right + (h * slots(of->given, of->rows) + slots(of->given, at.first)) * width;
            add_transposed_product(sums + h / repeats * head_size + at.keys.begin * width, width, transposed, from,
                                   width, at.keys.end - at.keys.begin, width, slots(of->given, count));
        }
}

/* Adds what a tile contributes to the gradient of a static matrix [heads in, heads out]: for each pair of heads the sum
   of map times gradient. MATRIX_TILE heads on either side are in registers at a time; where fewer are left, the last
   head fills the tile and its surplus sums are dropped. */
static void add_matrix_gradient(const chunk *of, float *sums, float *maps, float *grad, long block) {
    long heads = of->given->heads;
    EACH_PATCH(at, of, block)
        for (long i = 0; i < heads; i += MATRIX_TILE)
            for (long o = 0; o < heads; o += MATRIX_TILE) {
                vec parts[MATRIX_TILE][MATRIX_TILE] = {0};
                for (long t = at.first; t < smaller(at.first + at.rows, of->queries); t++)
                    for (long s = at.keys.begin; s < at.keys.end; s += LANES)
                        for (int a = 0; a < MATRIX_TILE; a++) {
                            vec map = *(vec *)(tile_row(of, maps, smaller(i + a, heads - 1), t) + s);
                            for (int b = 0; b < MATRIX_TILE; b++)
                                parts[a][b] += map * *(vec *)(tile_row(of, grad, smaller(o + b, heads - 1), t) + s);
                        }
                for (long a = 0; a < smaller(heads - i, MATRIX_TILE); a++)
                    for (long b = 0; b < smaller(heads - o, MATRIX_TILE); b++)
                        sums[(i + a) * heads + o + b] += TOTAL(LANES)(parts[a][b]);
            }
}

/* Turns `grad` from the gradient of the result of stage `p` into that of `maps`, in place. Writes what the block adds
   to the gradients of the queries' terms, and adds to those of the keys' terms and the static matrix. */
static void stage_backward(const backward_chunk *part, const gradients *to, float *grad, float *maps, int p,
                           float *mixed, long block) {
    const chunk *of = &part->of;
    const stage *by = &of->given->stages[p];
    long heads = of->given->heads, index = block_index(of, block), query_size = query_terms_size(of->given, p);
    long key_terms = index * key_terms_size(of->given, p);
    float *query_parts = part->query_parts[p] + (block - of->begin_block) * of->rows * query_size;
    float *key_sums = address(to->key_terms[p], key_terms, sizeof(float));
    memset(query_parts, 0, sizeof(float) * of->rows * query_size);
    if (by->matrix) add_matrix_gradient(of, to->matrices[p] + index * heads * heads, maps, grad, block);
    EACH_PATCH(whole, of, block)
        for (long row = 0; row < whole.rows;) {
            patch at = next_part(whole, by, &row);
            map_view up = tile_view(of, grad, at.first);
            map_view base = mixed_part(mixed, of, up, by->transposed, at);
            if (by->differentiate)
                by->differentiate(up, tile_view(of, maps, at.first), base, of->query_terms[p] + at.first * query_size,
                                  of->packed.key_terms[p] + key_terms, query_parts + at.first * query_size,
                                  key_sums, at.rows, at.keys.begin, at.keys.end);
            else if (by->matrix)
                copy_maps(of, up, base, at);
        }
}

/* The chunk and the block of a task; no chunk where the block is beyond those of the item. */
static backward_chunk *find_block(const backward_pass *pass, long index, long *block) {
    backward_chunk *part = pass->chunks + index % pass->given->items;
    *block = part->of.begin_block + index / pass->given->items;
    return *block < part->of.end_block ? part : 0;
}

INLINE float *scratch_of(const backward_pass *pass, long thread) {
    return pass->memory + pass->given->items * pass->item_memory + thread * pass->thread_memory;
}

/* Task: computes the scores of a block again, composes them, and takes their exponentials. */
static void repeat_scores(const void *context, long index, long thread) {
    const backward_pass *pass = context;
    long block;
    backward_chunk *part = find_block(pass, index, &block);
    if (!part) return;
    float *scores = tile_of(part, part->scores, block), *probs = tile_of(part, part->probs, block);
    multiply_columns(&part->of, scores, part->of.query, pass->packed.key_columns, part->of.score_factor, block);
    add_bias(&part->of, scores, 1, block);
    compose_tile(&part->of, probs, scores, PRE, scratch_of(pass, thread), block);
    add_bias(&part->of, probs, 0, block);
    exponentiate(&part->of, probs, block);
}

/* How many elements of scratch memory the product of a block's probabilities and the gain needs. */
INLINE long gained_size(const problem *given) { return given->gain ? given->heads * given->chunk * BLOCK_KEYS : 0; }

/* Task: from the gradient of the output to that of a block's probabilities, and the gradient of its values. */
static void differentiate_probs(const void *context, long index, long thread) {
    const backward_pass *pass = context;
    long block;
    backward_chunk *part = find_block(pass, index, &block);
    if (!part) return;
    const chunk *of = &part->of;
    float *mixed = scratch_of(pass, thread), *composed = mixed + mixed_size(pass->given);
    float *probs = tile_of(part, part->probs, block), *grad = tile_of(part, part->grad, block);
    float *gained = pass->given->gain ? composed + pass->given->heads * pass->given->chunk * BLOCK_KEYS : probs;
    const stage *post = &pass->given->stages[POST];
    normalize(of, probs, block);
    multiply_gain(of, gained, probs, block);
    if (!post->compose && !post->matrix) composed = gained;
    compose_tile(of, composed, gained, POST, mixed, block);
    add_products(of, pass->to.value, composed, part->grad_out_tokens, 1, block);
    multiply_columns(of, grad, part->grad_out, pass->packed.value_columns, 1, block);
    stage_backward(part, &pass->to, grad, gained, POST, mixed, block);
    if (pass->given->gain) sum_by_distance(of, part->gain_parts, grad, probs, block);
    multiply_gain(of, grad, grad, block);
    sum_gradients(of, part->sums, grad, probs, block);
}

/* Task: from the gradient of a block's probabilities to that of its scores, and the gradient of its keys. */
static void differentiate_scores(const void *context, long index, long thread) {
    const backward_pass *pass = context;
    long block;
    backward_chunk *part = find_block(pass, index, &block);
    if (!part) return;
    const chunk *of = &part->of;
    float *grad = tile_of(part, part->grad, block);
    softmax_backward(of, grad, tile_of(part, part->probs, block), part->sums, block);
    add_mask_gradient(of, grad, block);
    int sums_bias = pass->given->bias != 0, composes_bias = pass->given->composes_bias;
    if (sums_bias && !composes_bias) sum_by_distance(of, part->bias_parts, grad, 0, block);
    stage_backward(part, &pass->to, grad, tile_of(part, part->scores, block), PRE, scratch_of(pass, thread), block);
    if (sums_bias && composes_bias) sum_by_distance(of, part->bias_parts, grad, 0, block);
    add_products(of, pass->to.key, grad, part->query_tokens, of->score_factor, block);
}

/* Writes the gradients of a stage's terms of a chunk's queries: the sums of the parts that its blocks wrote. */
static void join_query_terms(const backward_chunk *part, const gradients *to, int p) {
    const chunk *of = &part->of;
    const float *parts = part->query_parts[p];
    long size = query_terms_size(of->given, p);
    if (!size) return;
    float *out = to->query_terms[p] + (of->item * of->given->queries + of->first) * size;
    memset(out, 0, sizeof(float) * of->queries * size);
    for (long block = of->begin_block; block < of->end_block; block++, parts += of->rows * size)
        for (long i = 0; i < of->queries * size; i++) out[i] += parts[i];
}

/* Task: the gradients of a head's queries and tables; with the first head, also those of the queries' terms. */
static void differentiate_queries(const void *context, long index, long thread) {
    const backward_pass *pass = context;
    const problem *given = pass->given;
    backward_chunk *part = pass->chunks + index / given->heads;
    const chunk *of = &part->of;
    long h = index % given->heads, width = padded_width(given);
    float *out = scratch_of(pass, thread);
    memset(out, 0, sizeof(float) * of->rows * width);
    for (long block = of->begin_block; block < of->end_block; block++)
        add_rows(of, out, tile_of(part, part->grad, block), h, pass->packed.key_rows, block);
    for (long t = 0; t < of->queries; t++)
        for (long d = 0; d < given->width; d++)
            pass->to.query[((of->item * given->heads + h) * given->queries + of->first + t) * given->width + d] =
                out[t * width + d] * pass->scaling;
    if (given->bias) join_strips(of, pass->to.bias, part->bias_parts, h);
    if (given->gain) join_strips(of, pass->to.gain, part->gain_parts, h);
    for (int p = PRE; p < STAGES && h == 0; p++) join_query_terms(part, &pass->to, p);
}

/* Begins the next chunk of every item. This and `join_...` below are too little work to wake threads for. */
static void begin_chunks(const backward_pass *pass) {
    for (long item = 0; item < pass->given->items; item++) {
        float *next = pass->memory + item * pass->item_memory;
        backward_chunk *part = pass->chunks + item;
        *part = place_backward_chunk(pass->given, pass->packed, pass->most_blocks, item, pass->first, &next);
        read_queries(&part->of, pass->scaling);
        read_rows(part->grad_out, &pass->given->grad_out, &part->of);
        if (!takes_pairs(pass->given)) continue;
        read_query_pairs(part->query_tokens, &pass->given->query, &part->of);
        read_query_pairs(part->grad_out_tokens, &pass->given->grad_out, &part->of);
    }
}

/* Joins over blocks what the softmax needs: its maxima and sums, and then the sums that its gradient subtracts. */
static void join_maxima(const backward_pass *pass) {
    for (long item = 0; item < pass->given->items; item++)
        for (long h = 0; h < pass->given->heads; h++) find_factors(&pass->chunks[item].of, h);
}

static void join_gradients(const backward_pass *pass) {
    for (long item = 0; item < pass->given->items; item++)
        for (long h = 0; h < pass->given->heads; h++) join_sums(&pass->chunks[item].of, pass->chunks[item].sums, h);
}

#endif
