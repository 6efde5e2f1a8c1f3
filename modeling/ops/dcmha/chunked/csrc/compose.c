/* The composition of maps and its gradient, on patches: some queries and at most BLOCK_KEYS keys of one item.

   passes.c calls `compose` and `differentiate` of a library that was compiled for the terms of the stage; their types
   have to match those of `compose_function` and `differentiate_function` in stage.h. Maps are attention scores or
   probabilities. A term is a vector of HEADS elements: a query has QUERY_RANK "down" terms, as many "up" terms and, if
   QUERY_GATE is 1, a gate; a key likewise. Strides count elements.

   Memory bounds the speed, so the elements of a map are read from the second-level cache as seldom as possible. The
   factors of BLOCK_KEYS keys stay in the first-level cache while all queries of the patch pass by, BLOCK_QUERIES at a
   time. The hidden maps of LANES keys (sums over the heads, weighted by "down" terms) stay in registers.

   Macros from the compiler's command line: LANES (float32 elements in a register), HEADS, GROUPS (groups of heads that
   low-rank terms mix), QUERY_RANK, QUERY_GATE, KEY_RANK, KEY_GATE. */

#include "stage.h"
#include "vectors.h"

#define BLOCK_QUERIES (LANES == 16 ? 4 : 2) /* processors with 16 lanes have twice as many registers */
#define GROUP_HEADS (HEADS / GROUPS)
#define QUERY_TERMS (2 * QUERY_RANK + QUERY_GATE)
#define KEY_TERMS (2 * KEY_RANK + KEY_GATE)
#define AT_LEAST_1(count) ((count) > 0 ? (count) : 1) /* arrays in C have elements, even unused ones */

typedef float key_tile[AT_LEAST_1(KEY_TERMS)][HEADS][BLOCK_KEYS];
typedef vec hidden_maps[AT_LEAST_1(QUERY_RANK + KEY_RANK)][BLOCK_QUERIES];

#define MAP(maps, h, t, s) (*(vec *)((maps).data + (h) * (maps).head_stride + (t) * (maps).query_stride + (s)))
#define KEY(tile, term, h, s) (*(vec *)&(tile)[term][h][s])
#define QUERY(terms, t, term, h) ((terms)[((t) * QUERY_TERMS + (term)) * HEADS + (h)])

/* The hidden maps of the head group that starts at `first_head`: its heads, weighted by the terms that start at
   `query_term` and `key_term`, and summed. */
INLINE void sum_heads(hidden_maps hidden, map_view maps, const float *query, const key_tile key, int first_head,
                      int query_term, int key_term, int queries, long s) {
    for (int r = 0; r < QUERY_RANK + KEY_RANK; r++)
        for (int t = 0; t < queries; t++) hidden[r][t] = (vec){0};
    for (int h = first_head; h < first_head + GROUP_HEADS; h++)
        for (int t = 0; t < queries; t++) {
            vec map = MAP(maps, h, t, s);
            for (int r = 0; r < QUERY_RANK; r++) hidden[r][t] += map * QUERY(query, t, query_term + r, h);
            for (int r = 0; r < KEY_RANK; r++) hidden[QUERY_RANK + r][t] += map * KEY(key, key_term + r, h, s);
        }
}

/* out = base + what the terms add to `maps`, for `queries` queries and the keys from `begin` to `end`, whose number is
   a multiple of LANES. `out` may be `maps`. */
INLINE void compose_block(map_view out, map_view maps, map_view base, const float *query, const key_tile key,
                          int queries, long begin, long end) {
    for (int first = 0; first < HEADS; first += GROUP_HEADS)
        for (long s = begin; s < end; s += LANES) {
            hidden_maps hidden;
            sum_heads(hidden, maps, query, key, first, 0, 0, queries, s);
            for (int h = first; h < first + GROUP_HEADS; h++)
                for (int t = 0; t < queries; t++) {
                    vec map = MAP(maps, h, t, s), sum = MAP(base, h, t, s);
                    for (int r = 0; r < QUERY_RANK; r++) sum += hidden[r][t] * QUERY(query, t, QUERY_RANK + r, h);
                    for (int r = 0; r < KEY_RANK; r++) sum += hidden[QUERY_RANK + r][t] * KEY(key, KEY_RANK + r, h, s);
                    if (QUERY_GATE) sum += map * QUERY(query, t, 2 * QUERY_RANK, h);
                    if (KEY_GATE) sum += map * KEY(key, 2 * KEY_RANK, h, s);
                    MAP(out, h, t, s) = sum;
                }
        }
}

/* Hidden maps of a patch of some queries: `below` are those of the forward pass, maps weighted by "down" terms; `above`
   are gradients of composed maps, weighted by "up" terms. */
typedef struct {
    hidden_maps below[BLOCK_KEYS / LANES], above[BLOCK_KEYS / LANES];
} patch_maps;

/* Writes the gradients of one head of the queries' terms to `query_sums`; queries and keys as in `compose_block`. */
INLINE void differentiate_query_terms(float *query_sums, map_view grad, map_view maps, const patch_maps *hidden, int h,
                                      int queries, long begin, long end) {
    for (int t = 0; t < queries; t++) {
        vec sums[AT_LEAST_1(QUERY_TERMS)];
        for (int r = 0; r < QUERY_TERMS; r++) sums[r] = (vec){0};
        for (long s = begin; s < end; s += LANES) {
            vec map = MAP(maps, h, t, s), up = MAP(grad, h, t, s);
            for (int r = 0; r < QUERY_RANK; r++) {
                sums[r] += map * hidden->above[s / LANES][r][t];
                sums[QUERY_RANK + r] += up * hidden->below[s / LANES][r][t];
            }
            if (QUERY_GATE) sums[2 * QUERY_RANK] += map * up;
        }
        for (int r = 0; r < QUERY_TERMS; r++) QUERY(query_sums, t, r, h) = TOTAL(LANES)(sums[r]);
    }
}

/* Adds the gradients of one head of the keys' terms to `key_sums`, and turns that head of `grad` from the gradient of
   the composed maps into that of `maps`. */
INLINE void differentiate_keys(key_tile key_sums, map_view grad, map_view maps, map_view base, const float *query,
                               const key_tile key, const patch_maps *hidden, int h, int queries, long begin, long end) {
    for (long s = begin; s < end; s += LANES) {
        const vec(*below)[BLOCK_QUERIES] = hidden->below[s / LANES] + QUERY_RANK;
        const vec(*above)[BLOCK_QUERIES] = hidden->above[s / LANES];
        /* Copies, which the compiler keeps in registers: it cannot know that writing to `grad` changes no key. */
        vec sums[AT_LEAST_1(KEY_TERMS)], down[AT_LEAST_1(KEY_RANK)], gate = (vec){0};
        for (int r = 0; r < KEY_TERMS; r++) sums[r] = KEY(key_sums, r, h, s);
        for (int r = 0; r < KEY_RANK; r++) down[r] = KEY(key, r, h, s);
        if (KEY_GATE) gate = KEY(key, 2 * KEY_RANK, h, s);
        for (int t = 0; t < queries; t++) {
            vec map = MAP(maps, h, t, s), up = MAP(grad, h, t, s), sum = MAP(base, h, t, s);
            for (int r = 0; r < QUERY_RANK; r++) sum += above[r][t] * QUERY(query, t, r, h);
            for (int r = 0; r < KEY_RANK; r++) {
                sum += above[QUERY_RANK + r][t] * down[r];
                sums[r] += map * above[QUERY_RANK + r][t];
                sums[KEY_RANK + r] += up * below[r][t];
            }
            if (QUERY_GATE) sum += up * QUERY(query, t, 2 * QUERY_RANK, h);
            if (KEY_GATE) {
                sum += up * gate;
                sums[2 * KEY_RANK] += map * up;
            }
            MAP(grad, h, t, s) = sum;
        }
        for (int r = 0; r < KEY_TERMS; r++) KEY(key_sums, r, h, s) = sums[r];
    }
}

/* Turns `grad` from the gradient of the composed maps into that of `maps`, writes the gradients of the queries' terms
   to `query_sums` and adds those of the keys' terms to `key_sums`; queries and keys as in `compose_block`. */
INLINE void differentiate_block(map_view grad, map_view maps, map_view base, const float *query, const key_tile key,
                                float *query_sums, key_tile key_sums, int queries, long begin, long end) {
    for (int first = 0; first < HEADS; first += GROUP_HEADS) {
        patch_maps hidden;
        for (long s = begin; s < end; s += LANES) {
            sum_heads(hidden.below[s / LANES], maps, query, key, first, 0, 0, queries, s);
            sum_heads(hidden.above[s / LANES], grad, query, key, first, QUERY_RANK, KEY_RANK, queries, s);
        }
        for (int h = first; h < first + GROUP_HEADS; h++) {
            differentiate_query_terms(query_sums, grad, maps, &hidden, h, queries, begin, end);
            differentiate_keys(key_sums, grad, maps, base, query, key, &hidden, h, queries, begin, end);
        }
    }
}

#define KEYS_OF(terms) ((const float(*)[HEADS][BLOCK_KEYS])(terms))

/* Advances a view by some queries. */
INLINE map_view after(map_view maps, long queries) {
    return (map_view){maps.data + queries * maps.query_stride, maps.head_stride, maps.query_stride};
}

/* out = base + what the terms add to maps; any of the three may be the same memory. The views begin at the first key of
   a block, of which the keys from `begin` to `end` are worked on, both multiples of LANES; `queries` is even.

   query: [queries, QUERY_TERMS, HEADS]
   key: [KEY_TERMS, HEADS, BLOCK_KEYS] */
void compose(map_view out, map_view maps, map_view base, const float *query, const float *key, long queries, long begin,
             long end) {
    while (queries > 0) {
        long count = queries >= BLOCK_QUERIES ? BLOCK_QUERIES : 2;
        if (count == BLOCK_QUERIES)
            compose_block(out, maps, base, query, KEYS_OF(key), BLOCK_QUERIES, begin, end);
        else
            compose_block(out, maps, base, query, KEYS_OF(key), 2, begin, end);
        out = after(out, count), maps = after(maps, count), base = after(base, count);
        query += count * QUERY_TERMS * HEADS, queries -= count;
    }
}

/* The gradient of `compose`: turns `grad` from the gradient of its result into that of `maps`. `base` is the part of
   the gradient of `maps` that does not come through the terms. The other arguments are as in `compose`.

   query_sums: [queries, QUERY_TERMS, HEADS], which gets the gradients of `query`
   key_sums: [KEY_TERMS, HEADS, BLOCK_KEYS], to which the gradients of `key` are added */
void differentiate(map_view grad, map_view maps, map_view base, const float *query, const float *key, float *query_sums,
                   float *key_sums, long queries, long begin, long end) {
    float(*sums)[HEADS][BLOCK_KEYS] = (void *)key_sums;
    while (queries > 0) {
        long count = queries >= BLOCK_QUERIES ? BLOCK_QUERIES : 2;
        if (count == BLOCK_QUERIES)
            differentiate_block(grad, maps, base, query, KEYS_OF(key), query_sums, sums, BLOCK_QUERIES, begin, end);
        else
            differentiate_block(grad, maps, base, query, KEYS_OF(key), query_sums, sums, 2, begin, end);
        grad = after(grad, count), maps = after(maps, count), base = after(base, count);
        query += count * QUERY_TERMS * HEADS, query_sums += count * QUERY_TERMS * HEADS, queries -= count;
    }
}
