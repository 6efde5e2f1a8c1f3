/* The arguments of a pass over some items of the batch, and its keys packed by blocks.

   A block is BLOCK_KEYS keys of an item. Keys, values and the factors of keys are copied block by block into the order
   in which products and compositions read them, in float32 and padded with zeros. Strides count elements. */

#ifndef DYNATTN_PROBLEM_H
#define DYNATTN_PROBLEM_H

#include "elements.h"
#include "stage.h"

/* What passes_native.py passes: an array of long integers in the order of these members. */

/* A tensor [items, heads, tokens, width], whose last stride is 1. */
typedef struct {
    const void *data;
    long type, item_stride, head_stride, token_stride;
} heads_tensor;

/* Packed terms [items, tokens, terms, heads] of queries or keys. */
typedef struct {
    const void *data;
    long type, item_stride, token_stride, term_stride, head_stride;
    long terms; /* 0 where there are none */
} terms_tensor;

typedef struct {
    terms_tensor query, key;
    const float *matrix;                 /* the static matrix and the identity, [even_heads out, heads in]; or null */
    const float *transposed;             /* the same for the backward pass, [even_heads in, heads out] */
    compose_function *compose;           /* null where there are no terms */
    differentiate_function *differentiate;
} stage;

/* A mask [items, heads, queries, keys]; the stride of a dimension that is broadcast is 0. */
typedef struct {
    void *data; /* null: all keys are visible */
    long is_bool, item_stride, head_stride, query_stride, key_stride; /* float32 unless it is boolean */
} mask;

typedef struct {
    heads_tensor query, key, value, grad_out; /* the last is for the backward pass */
    stage pre, post;
    mask hiding, mask_sums; /* `mask_sums`: the gradient of `hiding`, to which the backward pass adds; or null */
    const long *first_keys; /* [items, queries], the first key that each query sees, or null */
    long items, heads, kv_heads, width, queries, keys;
    long offset, behind, ahead; /* query t sees the keys from t + offset - behind to t + offset + ahead */
    long chunk;                 /* queries of a chunk, even and at most MAX_CHUNK */
} problem;

INLINE long smaller(long a, long b) { return a < b ? a : b; }
INLINE long larger(long a, long b) { return a > b ? a : b; }
INLINE long blocks_of(const problem *given) { return (given->keys + BLOCK_KEYS - 1) / BLOCK_KEYS; }
INLINE long even_heads(const problem *given) { return (given->heads + 1) / 2 * 2; }
INLINE long padded_width(const problem *given) { return (given->width + LANES - 1) / LANES * LANES; }

/* Each of these has one part for each block of each item, and is null where a pass does not need it. */
typedef struct {
    float *key_columns, *value_columns; /* [kv_heads, width, BLOCK_KEYS] */
    float *key_rows, *value_rows;       /* [kv_heads, BLOCK_KEYS, padded_width] */
    float *pre_key, *post_key;          /* [terms, heads, BLOCK_KEYS] */
} packed_keys;

INLINE long columns_size(const problem *given) { return given->kv_heads * given->width * BLOCK_KEYS; }
INLINE long rows_size(const problem *given) { return given->kv_heads * BLOCK_KEYS * padded_width(given); }
INLINE long key_terms_size(const problem *given, const stage *by) { return by->key.terms * given->heads * BLOCK_KEYS; }

/* Takes `size` elements from the memory at `*next`. */
INLINE float *take(float **next, long size) {
    float *taken = *next;
    *next += size;
    return taken;
}

/* How many elements were taken from the memory that began at null, to find out how much is needed. */
INLINE long taken(const float *next) { return (long)((size_t)next / sizeof(float)); }

/* Where the packed keys of a pass are in its memory, which is advanced past them. */
static packed_keys place_packed(const problem *given, float **next, int is_backward) {
    long count = given->items * blocks_of(given);
    packed_keys packed = {.key_columns = take(next, count * columns_size(given))};
    if (is_backward) {
        packed.value_columns = take(next, count * columns_size(given));
        packed.key_rows = take(next, count * rows_size(given));
    } else {
        packed.value_rows = take(next, count * rows_size(given));
    }
    packed.pre_key = take(next, count * key_terms_size(given, &given->pre));
    packed.post_key = take(next, count * key_terms_size(given, &given->post));
    return packed;
}

INLINE void read_head(float *to, const heads_tensor *from, long item, long h, long token, long width) {
    long start = item * from->item_stride + h * from->head_stride + token * from->token_stride;
    read_elements(to, from->data, from->type, start, 1, width);
}

/* Copies a block of one head to either or both of the two orders. */
static void pack_head(float *columns, float *rows, const heads_tensor *from, long item, long h, long first, long count,
                      const problem *given) {
    float row[given->width];
    if (columns) memset(columns, 0, sizeof(float) * given->width * BLOCK_KEYS);
    if (rows) memset(rows, 0, sizeof(float) * padded_width(given) * BLOCK_KEYS);
    for (long s = 0; s < count; s++) {
        read_head(row, from, item, h, first + s, given->width);
        if (columns)
            for (long d = 0; d < given->width; d++) columns[d * BLOCK_KEYS + s] = row[d];
        if (rows) memcpy(rows + s * padded_width(given), row, sizeof(row));
    }
}

static void pack_key_terms(float *to, const terms_tensor *from, long item, long first, long count, long heads) {
    for (long term = 0; term < from->terms; term++)
        for (long h = 0; h < heads; h++, to += BLOCK_KEYS) {
            long start = item * from->item_stride + first * from->token_stride + term * from->term_stride;
            read_elements(to, from->data, from->type, start + h * from->head_stride, from->token_stride, count);
            memset(to + count, 0, sizeof(float) * (BLOCK_KEYS - count));
        }
}

/* Packs one block; `index` counts the blocks of all items. */
static void pack_block(const problem *given, packed_keys packed, long index) {
    long item = index / blocks_of(given), first = index % blocks_of(given) * BLOCK_KEYS;
    long count = smaller(given->keys - first, BLOCK_KEYS);
    for (long h = 0; h < given->kv_heads; h++) {
        long column = index * columns_size(given) + h * given->width * BLOCK_KEYS;
        long row = index * rows_size(given) + h * BLOCK_KEYS * padded_width(given);
        pack_head(packed.key_columns + column, packed.key_rows ? packed.key_rows + row : 0, &given->key, item, h, first,
                  count, given);
        pack_head(packed.value_columns ? packed.value_columns + column : 0,
                  packed.value_rows ? packed.value_rows + row : 0, &given->value, item, h, first, count, given);
    }
    pack_key_terms(packed.pre_key + index * key_terms_size(given, &given->pre), &given->pre.key, item, first, count,
                   given->heads);
    pack_key_terms(packed.post_key + index * key_terms_size(given, &given->post), &given->post.key, item, first, count,
                   given->heads);
}

#endif
