/* Tables by distance: a bias on the scores of a tile and a gain on its probabilities, and the gradients of both.

   Neighbouring keys of a query read neighbouring elements of a table, and the next query reads one element earlier. */

#ifndef DYNATTN_TABLES_H
#define DYNATTN_TABLES_H

#include "chunk.h"

/* The number of neighbouring elements of a table that a tile can read: one for each difference of a key of its block
   and a query of its chunk, at `key - query + MAX_CHUNK`. Element 0 belongs to no pair. */
#define STRIP (MAX_CHUNK + BLOCK_KEYS)

/* The index in a head of a table for the first key of a block and the first query of a chunk. */
INLINE long table_index(const chunk *of, long block) {
    return of->given->farthest - of->given->offset - of->first + block * BLOCK_KEYS;
}

/* The elements of a table for a head and a query of a chunk, from the first key of a block on. */
INLINE const float *table_row(const chunk *of, const float *table, long h, long t, long block) {
    return table + h * of->given->table_length + table_index(of, block) - t;
}

/* Adds the bias to a tile of scores, if it belongs where this is called: `is_before` the first composition (1) or after
   it (0). A row that only fills up an even number of queries gets none: minus infinity would make it NaN. */
static void add_bias(const chunk *of, float *tile, int is_before, long block) {
    const problem *given = of->given;
    if (!given->bias || given->composes_bias != is_before) return;
    EACH_PATCH(at, of, block)
        for (long h = 0; h < given->heads; h++)
            for (long t = at.first; t < smaller(at.first + at.rows, of->queries); t++) {
                float *row = tile_row(of, tile, h, t);
                const float *bias = table_row(of, given->bias, h, t, block);
                for (long s = at.keys.begin; s < at.keys.end; s += LANES) *(vec *)(row + s) += *(const vec *)(bias + s);
            }
}

/* out = tile times the gain; `out` may be `tile`. */
static void multiply_gain(const chunk *of, float *out, float *tile, long block) {
    if (!of->given->gain) return;
    EACH_PATCH(at, of, block)
        for (long h = 0; h < of->given->heads; h++)
            for (long t = at.first; t < at.first + at.rows; t++) {
                float *row = tile_row(of, tile, h, t), *to = tile_row(of, out, h, t);
                const float *gain = table_row(of, of->given->gain, h, t, block);
                for (long s = at.keys.begin; s < at.keys.end; s += LANES)
                    *(vec *)(to + s) = *(vec *)(row + s) * *(const vec *)(gain + s);
            }
}

/* Writes what a tile adds to the gradient of a table, [heads, STRIP]: for each distance the sum of `grad`, or of `grad`
   times `probs` unless that is null. The pair of query t and key s belongs to element s - t + MAX_CHUNK. */
static void sum_by_distance(const chunk *of, float *strips, float *grad, float *probs, long block) {
    strips += (block - of->begin_block) * of->given->heads * STRIP;
    memset(strips, 0, sizeof(float) * of->given->heads * STRIP);
    EACH_PATCH(at, of, block)
        for (long h = 0; h < of->given->heads; h++)
            for (long t = at.first; t < smaller(at.first + at.rows, of->queries); t++) {
                float *row = tile_row(of, grad, h, t), *prob = probs ? tile_row(of, probs, h, t) : 0;
                float *sums = strips + h * STRIP + MAX_CHUNK - t;
                for (long s = at.keys.begin; s < at.keys.end; s += LANES)
                    *(vec *)(sums + s) += prob ? *(vec *)(row + s) * *(vec *)(prob + s) : *(vec *)(row + s);
            }
}

/* Adds the strips of all blocks of a chunk to one head of the gradient of a table, [items, heads, table_length]. */
static void join_strips(const chunk *of, float *sums, const float *strips, long h) {
    const problem *given = of->given;
    sums += (of->item * given->heads + h) * given->table_length;
    for (long block = of->begin_block; block < of->end_block; block++) {
        const float *strip = strips + ((block - of->begin_block) * given->heads + h) * STRIP;
        float *to = sums + table_index(of, block) - MAX_CHUNK;
        for (long i = 1; i < STRIP; i++) to[i] += strip[i];
    }
}

#endif
