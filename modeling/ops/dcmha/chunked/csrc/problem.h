/* The arguments of a pass over the items of a batch, and its keys packed by blocks.

   A block is BLOCK_KEYS keys of an item. Keys, values and the terms of keys are copied block by block into the order in
   which products and compositions read them, padded with zeros. They are copied as float32 elements; or, for products
   of bfloat16, as pairs of elements that are neighbours in the dimension that the product sums over. A slot is 32 bits:
   one float32 element or one such pair. Strides count elements. */

#ifndef DYNATTN_PROBLEM_H
#define DYNATTN_PROBLEM_H

#include "pairs.h"
#include "stage.h"

/* What native_problem.py makes: an array of long integers in the order of these members. */

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

/* The two stages of a call: before and after the softmax. */
enum { PRE, POST, STAGES };

/* A mask [items, heads, queries, keys]; the stride of a dimension that is broadcast is 0. */
typedef struct {
    void *data; /* null: all keys are visible */
    long is_bool, item_stride, head_stride, query_stride, key_stride; /* float32 unless it is boolean */
} mask;

typedef struct {
    heads_tensor query, key, value, grad_out; /* the last is for the backward pass */
    stage stages[STAGES];
    mask hiding, mask_sums; /* `mask_sums`: the gradient of `hiding`, to which the backward pass adds, if it has data */
    const long *first_keys; /* [items, queries], the first key that each query sees, or null */
    long items, heads, kv_heads, width, queries, keys;
    long offset, behind, ahead; /* query t sees the keys from t + offset - behind to t + offset + ahead */
    long chunk;                 /* queries of a chunk, even and at most MAX_CHUNK */
    const float *bias, *gain;   /* tables by distance [heads, table_length], or null */
    long table_length, farthest; /* element `farthest - d` is for distance d; tiles read no element outside the table */
    long composes_bias;         /* whether the bias is added before the first composition */
} problem;

/* Where the element of an index lies in memory; null stays null. */
INLINE void *address(const void *data, long index, long size) { return data ? (char *)data + index * size : 0; }

/* The same tensor, from an item on. */
static heads_tensor heads_from(heads_tensor of, long item) {
    of.data = address(of.data, item * of.item_stride, element_size(of.type));
    return of;
}

static terms_tensor terms_from(terms_tensor of, long item) {
    of.data = address(of.data, item * of.item_stride, element_size(of.type));
    return of;
}

static mask mask_from(mask of, long item) {
    of.data = address(of.data, item * of.item_stride, of.is_bool ? 1 : sizeof(float));
    return of;
}

/* Some items of a problem as a problem of their own: at most `count` items from `first` on. */
static problem items_from(const problem *whole, long first, long count) {
    problem part = *whole;
    part.query = heads_from(whole->query, first), part.key = heads_from(whole->key, first);
    part.value = heads_from(whole->value, first), part.grad_out = heads_from(whole->grad_out, first);
    for (int p = PRE; p < STAGES; p++) {
        part.stages[p].query = terms_from(whole->stages[p].query, first);
        part.stages[p].key = terms_from(whole->stages[p].key, first);
    }
    part.hiding = mask_from(whole->hiding, first), part.mask_sums = mask_from(whole->mask_sums, first);
    part.first_keys = address(whole->first_keys, first * whole->queries, sizeof(long));
    part.items = smaller(count, whole->items - first);
    return part;
}

INLINE long blocks_of(const problem *given) { return (given->keys + BLOCK_KEYS - 1) / BLOCK_KEYS; }
INLINE long even_heads(const problem *given) { return (given->heads + 1) / 2 * 2; }
INLINE long padded_width(const problem *given) { return (given->width + LANES - 1) / LANES * LANES; }

/* Whether products multiply pairs of bfloat16 elements. */
INLINE int takes_pairs(const problem *given) {
    int is_bfloat16 = given->query.type == BFLOAT16 && given->key.type == BFLOAT16 && given->value.type == BFLOAT16;
    return PAIRS && is_bfloat16 && (!given->grad_out.data || given->grad_out.type == BFLOAT16);
}

/* How many slots `count` elements take in the dimension that a product sums over. */
INLINE long slots(const problem *given, long count) { return takes_pairs(given) ? (count + 1) / 2 : count; }

/* Packed keys, values and terms: each array has one part for each block of each item, of the shape given here. It is
   null where a pass does not need it. Columns serve products that sum over the width, rows those that sum over keys. */
typedef struct {
    const problem *given;
    float *key_columns, *value_columns; /* [kv_heads, slots of width, BLOCK_KEYS] */
    float *key_rows, *value_rows;       /* [kv_heads, slots of BLOCK_KEYS, padded_width] */
    float *key_terms[STAGES];           /* [terms, heads, BLOCK_KEYS] */
} packed_keys;

INLINE long column_size(const problem *given) { return slots(given, given->width) * BLOCK_KEYS; }
INLINE long row_size(const problem *given) { return slots(given, BLOCK_KEYS) * padded_width(given); }
INLINE long columns_size(const problem *given) { return given->kv_heads * column_size(given); }
INLINE long rows_size(const problem *given) { return given->kv_heads * row_size(given); }
INLINE long query_terms_size(const problem *given, int p) { return given->stages[p].query.terms * given->heads; }
INLINE long key_terms_size(const problem *given, int p) {
    return given->stages[p].key.terms * given->heads * BLOCK_KEYS;
}

/* Takes `size` elements from the memory at `*next`. The sum is one of integers, because C leaves sums with a null
   pointer, where a dry run begins, undefined. */
INLINE float *take(float **next, long size) {
    float *taken = *next;
    *next = (float *)((size_t)taken + size * sizeof(float));
    return taken;
}

/* How many elements were taken from memory that begins at null: a dry run, which finds out how much is needed. */
INLINE long taken(const float *next) { return (long)((size_t)next / sizeof(float)); }

/* Gives the packed keys of a pass room in the memory at `*next`, which is advanced past them. */
static packed_keys place_packed(const problem *given, float **next, int is_backward) {
    long count = given->items * blocks_of(given);
    packed_keys packed = {.given = given, .key_columns = take(next, count * columns_size(given))};
    if (is_backward) {
        packed.value_columns = take(next, count * columns_size(given));
        packed.key_rows = take(next, count * rows_size(given));
    } else {
        packed.value_rows = take(next, count * rows_size(given));
    }
    for (int p = PRE; p < STAGES; p++) packed.key_terms[p] = take(next, count * key_terms_size(given, p));
    return packed;
}

INLINE long head_start(const heads_tensor *from, long item, long h, long token) {
    return item * from->item_stride + h * from->head_stride + token * from->token_stride;
}

/* Reads one head of a token: float32 elements, or pairs of neighbouring channels where products take pairs. */
INLINE void read_head(float *to, const heads_tensor *from, long item, long h, long token, const problem *given) {
    long start = head_start(from, item, h, token);
    if (!takes_pairs(given)) {
        read_elements(to, from->data, from->type, start, 1, given->width);
        return;
    }
    to[slots(given, given->width) - 1] = 0; /* half of this slot stays zero if the width is odd */
    memcpy(to, (const short *)from->data + start, sizeof(short) * given->width);
}

/* Reads one head of two tokens as pairs of the same channel; with a `count` of 1, zeros stand for the second token. */
INLINE void read_token_pair(float *to, const heads_tensor *from, long item, long h, long token, long count,
                            long width) {
    const unsigned short *first = (const unsigned short *)from->data + head_start(from, item, h, token);
    const unsigned short *second = first + (count > 1 ? from->token_stride : 0);
    unsigned mask = count > 1 ? 0xffff : 0;
    for (long d = 0; d < width; d++) {
        unsigned pair = first[d] | (second[d] & mask) << 16;
        memcpy(to + d, &pair, sizeof(pair));
    }
}

/* Reads one head of `count` tokens to [slots of tokens, padded_width]. */
static void read_tokens(float *to, const heads_tensor *from, long item, long h, long token, long count,
                        const problem *given) {
    long step = takes_pairs(given) ? 2 : 1;
    for (long end = token + count; token < end; token += step, to += padded_width(given)) {
        if (step == 2)
            read_token_pair(to, from, item, h, token, smaller(end - token, 2), given->width);
        else
            read_head(to, from, item, h, token, given);
        memset(to + given->width, 0, sizeof(float) * (padded_width(given) - given->width));
    }
}

/* Copies one head of a block to [slots of width, BLOCK_KEYS]. */
static void pack_columns(float *columns, const heads_tensor *from, long item, long h, long first, long count,
                         const problem *given) {
    long depth = slots(given, given->width);
    float row[depth];
    if (count < BLOCK_KEYS) memset(columns, 0, sizeof(float) * column_size(given));
    for (long s = 0; s < count; s++) {
        read_head(row, from, item, h, first + s, given);
        for (long d = 0; d < depth; d++) columns[d * BLOCK_KEYS + s] = row[d];
    }
}

/* Copies one head of a block to [slots of BLOCK_KEYS, padded_width]. */
static void pack_rows(float *rows, const heads_tensor *from, long item, long h, long first, long count,
                      const problem *given) {
    if (count < BLOCK_KEYS) memset(rows, 0, sizeof(float) * row_size(given));
    read_tokens(rows, from, item, h, first, count, given);
}

static void pack_key_terms(float *to, const terms_tensor *from, long item, long first, long count, long heads) {
    for (long term = 0; term < from->terms; term++)
        for (long h = 0; h < heads; h++, to += BLOCK_KEYS) {
            long start = item * from->item_stride + first * from->token_stride + term * from->term_stride;
            read_elements(to, from->data, from->type, start + h * from->head_stride, from->token_stride, count);
            memset(to + count, 0, sizeof(float) * (BLOCK_KEYS - count));
        }
}

/* Task: packs one block of `packed_keys`; `index` counts the blocks of all items. */
static void pack_block(const void *context, long index, long thread) {
    const packed_keys *packed = context;
    const problem *given = packed->given;
    (void)thread;
    long item = index / blocks_of(given), first = index % blocks_of(given) * BLOCK_KEYS;
    long count = smaller(given->keys - first, BLOCK_KEYS);
    for (long h = 0; h < given->kv_heads; h++) {
        long column = index * columns_size(given) + h * column_size(given);
        long row = index * rows_size(given) + h * row_size(given);
        pack_columns(packed->key_columns + column, &given->key, item, h, first, count, given);
        if (packed->value_columns)
            pack_columns(packed->value_columns + column, &given->value, item, h, first, count, given);
        if (packed->key_rows) pack_rows(packed->key_rows + row, &given->key, item, h, first, count, given);
        if (packed->value_rows) pack_rows(packed->value_rows + row, &given->value, item, h, first, count, given);
    }
    for (int p = PRE; p < STAGES; p++)
        pack_key_terms(packed->key_terms[p] + index * key_terms_size(given, p), &given->stages[p].key, item, first,
                       count, given->heads);
}

#endif
