/* The softmax of a chunk, tile by tile, and its gradient. */

#ifndef DYNATTN_SOFTMAX_H
#define DYNATTN_SOFTMAX_H

#include "chunk.h"

/* The index in a mask of the element for a head, a query of the chunk and a key. */
INLINE long mask_index(const mask *of, const chunk *by, long h, long t, long key) {
    return by->item * of->item_stride + h * of->head_stride + (by->first + t) * of->query_stride + key * of->key_stride;
}

/* Adds the mask to a row of scores, whose first one is that of `key`. Hidden keys get minus infinity. */
static void hide_by_mask(float *row, const chunk *of, long h, long t, long key, long count) {
    const mask *hiding = &of->given->hiding;
    long start = mask_index(hiding, of, h, t, key), stride = hiding->key_stride;
    if (hiding->is_bool) {
        for (long s = 0; s < count; s++) row[s] = ((const char *)hiding->data)[start + s * stride] ? row[s] : -INFINITY;
        return;
    }
    for (long s = 0; s < count; s++) {
        float bias = ((const float *)hiding->data)[start + s * stride];
        row[s] = bias > -FLT_MAX ? row[s] + bias : -INFINITY;
    }
}

/* Replaces a row of scores by exp(score - maximum); returns the maximum in `top` and the sum of the row in `sum`. */
INLINE void exponentiate_row(float *row, span part, float *top, float *sum) {
    vec maxima = (vec){0} - INFINITY, sums = {0};
    for (long s = part.begin; s < part.end; s += LANES) maxima = maximum(*(vec *)(row + s), maxima);
    *top = LARGEST(LANES)(maxima);
    float base = *top == -INFINITY ? 0 : *top;
    for (long s = part.begin; s < part.end; s += LANES) {
        vec exponentials = exponential(*(vec *)(row + s) - base);
        *(vec *)(row + s) = exponentials;
        sums += exponentials;
    }
    *sum = TOTAL(LANES)(sums);
}

/* Replaces the scores of a tile by exp(score - maximum), with the maximum of each row; hidden keys get zero. Keeps the
   maxima and the sums of the rows. */
static void exponentiate(const chunk *of, float *tile, long block) {
    const problem *given = of->given;
    long heads = given->heads;
    float *maxima = statistic(of, of->maxima, block, 0), *sums = statistic(of, of->sums, block, 0);
    for (long i = 0; i < heads * MAX_CHUNK; i++) maxima[i] = -INFINITY, sums[i] = 0;
    EACH_PATCH(at, of, block)
        for (long t = at.first; t < smaller(at.first + at.rows, of->queries); t++) {
            span seen = in_block(seen_keys(given, of->item, of->first + t, 1), block);
            for (long h = 0; h < heads; h++) {
                float *row = tile_row(of, tile, h, t);
                for (long s = at.keys.begin; s < seen.begin; s++) row[s] = -INFINITY;
                if (given->hiding.data)
                    hide_by_mask(row + seen.begin, of, h, t, block * BLOCK_KEYS + seen.begin, seen.end - seen.begin);
                for (long s = larger(seen.end, at.keys.begin); s < at.keys.end; s++) row[s] = -INFINITY;
                exponentiate_row(row, at.keys, maxima + h * MAX_CHUNK + t, sums + h * MAX_CHUNK + t);
            }
        }
}

/* Replaces the maxima of a head's tiles by the factors that turn what `exponentiate` left in them into probabilities:
   exp(maximum of the tile - maximum of all) / sum of all. A factor is 0 if its query sees no key. */
static void find_factors(const chunk *of, long h) {
    for (long t = 0; t < of->rows; t += LANES) {
        vec top = (vec){0} - INFINITY, sum = {0};
        for (long block = of->begin_block; block < of->end_block; block++)
            top = maximum(*(vec *)(statistic(of, of->maxima, block, h) + t), top);
        top = finite_maxima(top);
        for (long block = of->begin_block; block < of->end_block; block++) {
            vec *factor = (vec *)(statistic(of, of->maxima, block, h) + t);
            *factor = exponential(*factor - top);
            sum += *(vec *)(statistic(of, of->sums, block, h) + t) * *factor;
        }
        int_vec none = sum == (vec){0};
        for (long block = of->begin_block; block < of->end_block; block++) {
            vec *factor = (vec *)(statistic(of, of->maxima, block, h) + t);
            *factor = (vec)((int_vec)(*factor / sum) & ~none);
        }
    }
}

/* Multiplies a tile by the factors of `find_factors`, to get probabilities. Rows beyond the queries get zero. */
static void normalize(const chunk *of, float *tile, long block) {
    EACH_PATCH(at, of, block)
        for (long h = 0; h < of->given->heads; h++)
            for (long t = at.first; t < at.first + at.rows; t++) {
                float *row = tile_row(of, tile, h, t);
                float factor = t < of->queries ? statistic(of, of->maxima, block, h)[t] : 0;
                for (long s = at.keys.begin; s < at.keys.end; s += LANES) *(vec *)(row + s) *= factor;
            }
}

/* Writes the sum of probability times gradient over each row of a tile to `out` [blocks, heads, MAX_CHUNK]. */
static void sum_gradients(const chunk *of, float *out, float *grad, float *probs, long block) {
    float *sums = statistic(of, out, block, 0);
    memset(sums, 0, sizeof(float) * of->given->heads * MAX_CHUNK);
    EACH_PATCH(at, of, block)
        for (long h = 0; h < of->given->heads; h++)
            for (long t = at.first; t < at.first + at.rows; t++) {
                float *row = tile_row(of, grad, h, t), *prob = tile_row(of, probs, h, t);
                vec sum = {0};
                for (long s = at.keys.begin; s < at.keys.end; s += LANES) sum += *(vec *)(row + s) * *(vec *)(prob + s);
                sums[h * MAX_CHUNK + t] = TOTAL(LANES)(sum);
            }
}

/* Adds the `sums` of all tiles of a head to those of the first tile. */
static void join_sums(const chunk *of, float *sums, long h) {
    for (long t = 0; t < of->rows; t++)
        for (long block = of->begin_block + 1; block < of->end_block; block++)
            statistic(of, sums, of->begin_block, h)[t] += statistic(of, sums, block, h)[t];
}

/* Turns the gradient of a tile's probabilities into that of its composed scores: probability * (gradient - sum), with
   the sum of `join_sums`. */
static void softmax_backward(const chunk *of, float *grad, float *probs, float *sums, long block) {
    EACH_PATCH(at, of, block)
        for (long h = 0; h < of->given->heads; h++)
            for (long t = at.first; t < at.first + at.rows; t++) {
                float *row = tile_row(of, grad, h, t), *prob = tile_row(of, probs, h, t);
                float sum = statistic(of, sums, of->begin_block, h)[t];
                for (long s = at.keys.begin; s < at.keys.end; s += LANES)
                    *(vec *)(row + s) = (*(vec *)(row + s) - sum) * *(vec *)(prob + s);
            }
}

/* Adds the gradient of a tile's composed scores to that of the mask. */
static void add_mask_gradient(const chunk *of, float *grad, long block) {
    const mask *sums = &of->given->mask_sums;
    if (!sums->data) return;
    EACH_PATCH(at, of, block)
        for (long h = 0; h < of->given->heads; h++)
            for (long t = at.first; t < smaller(at.first + at.rows, of->queries); t++)
                for (long s = at.keys.begin; s < smaller(at.keys.end, of->given->keys - block * BLOCK_KEYS); s++)
                    ((float *)sums->data)[mask_index(sums, of, h, t, block * BLOCK_KEYS + s)] +=
                        tile_row(of, grad, h, t)[s];
}

#endif
