/* Products of small matrices that are in the first two levels of the cache.

   `out` [rows, width] is the product of `a` [rows, depth] and `b` [depth, width]. `a` and `b` are float32, or they are
   slots with pairs of bfloat16 elements (pairs.h) that are neighbours in `depth`, which then counts slots. Rows are
   multiplied ROW_TILE at a time and then two at a time, so their number has to be even; `width` has to be a multiple of
   LANES. A tile of `out` stays in registers during the loop over `depth`. Every element is summed in the order of
   `depth`, whichever tile it is in, so that results do not depend on how rows are divided. */

#ifndef DYNATTN_PRODUCTS_H
#define DYNATTN_PRODUCTS_H

#include "pairs.h"

#define ROW_TILE 6
#define TILE_VECTORS (LANES == 16 ? 4 : 2) /* processors with 16 lanes have twice as many registers */

typedef struct {
    const float *data;
    long row_stride, depth_stride; /* one of them is 1 */
    int in_pairs;                  /* whether `a` and `b` are in pairs */
} left_matrix;

INLINE void multiply_tile(float *out, long out_stride, left_matrix a, const float *b, long b_stride, long depth,
                          float factor, const int rows, const int vectors, const int adds) {
    vec sums[ROW_TILE][TILE_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sums[r][v] = adds ? *(const vec *)(out + r * out_stride + v * LANES) : (vec){0};
    for (long k = 0; k < depth; k++) {
        vec row[TILE_VECTORS];
        for (int v = 0; v < vectors; v++) row[v] = *(const vec *)(b + k * b_stride + v * LANES);
        for (int r = 0; r < rows; r++) {
            const float *left = a.data + r * a.row_stride + k * a.depth_stride;
            for (int v = 0; v < vectors; v++)
                sums[r][v] = a.in_pairs ? add_pairs(sums[r][v], row[v], left) : sums[r][v] + row[v] * *left;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            *(vec *)(out + r * out_stride + v * LANES) = factor == 1 ? sums[r][v] : sums[r][v] * factor;
}

INLINE void multiply_rows(float *out, long out_stride, left_matrix a, const float *b, long b_stride, const int rows,
                          long width, long depth, float factor, const int adds) {
    long column = 0;
    for (; column + TILE_VECTORS * LANES <= width; column += TILE_VECTORS * LANES)
        multiply_tile(out + column, out_stride, a, b + column, b_stride, depth, factor, rows, TILE_VECTORS, adds);
    for (; column < width; column += LANES)
        multiply_tile(out + column, out_stride, a, b + column, b_stride, depth, factor, rows, 1, adds);
}

INLINE void multiply_all(float *out, long out_stride, left_matrix a, const float *b, long b_stride, long rows,
                         long width, long depth, float factor, const int adds) {
    long row = 0;
    for (; row + ROW_TILE <= rows; row += ROW_TILE, a.data += ROW_TILE * a.row_stride)
        multiply_rows(out + row * out_stride, out_stride, a, b, b_stride, ROW_TILE, width, depth, factor, adds);
    for (; row < rows; row += 2, a.data += 2 * a.row_stride)
        multiply_rows(out + row * out_stride, out_stride, a, b, b_stride, 2, width, depth, factor, adds);
}

/* Returns `a` with constants in place of what is known about it, so that the compiler generates a loop of its own for
   pairs, for float32, and for a transposed matrix. */
INLINE left_matrix of_kind(left_matrix a, const int in_pairs, const int transposed) {
    a.in_pairs = in_pairs;
    *(transposed ? &a.row_stride : &a.depth_stride) = 1;
    return a;
}

/* The functions below are not inline, because their loops take long to compile and would be compiled at every call. */

/* Writes `factor` times the product; `depth_stride` is 1. */
static void multiply(float *out, long out_stride, left_matrix a, const float *b, long b_stride, long rows, long width,
                     long depth, float factor) {
    if (PAIRS && a.in_pairs)
        multiply_all(out, out_stride, of_kind(a, 1, 0), b, b_stride, rows, width, depth, factor, 0);
    else
        multiply_all(out, out_stride, of_kind(a, 0, 0), b, b_stride, rows, width, depth, factor, 0);
}

/* Adds the product; `depth_stride` is 1. */
static void add_product(float *out, long out_stride, left_matrix a, const float *b, long b_stride, long rows,
                        long width, long depth) {
    if (PAIRS && a.in_pairs)
        multiply_all(out, out_stride, of_kind(a, 1, 0), b, b_stride, rows, width, depth, 1, 1);
    else
        multiply_all(out, out_stride, of_kind(a, 0, 0), b, b_stride, rows, width, depth, 1, 1);
}

/* Adds the product; `row_stride` is 1. */
static void add_transposed_product(float *out, long out_stride, left_matrix a, const float *b, long b_stride, long rows,
                                   long width, long depth) {
    if (PAIRS && a.in_pairs)
        multiply_all(out, out_stride, of_kind(a, 1, 1), b, b_stride, rows, width, depth, 1, 1);
    else
        multiply_all(out, out_stride, of_kind(a, 0, 1), b, b_stride, rows, width, depth, 1, 1);
}

#endif
