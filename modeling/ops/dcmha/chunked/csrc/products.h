/* Matrix products of small matrices in the first two levels of the cache.

   `multiply` writes or adds `a` [rows, depth] times `b` [depth, width] to `out` [rows, width]. Rows come ROW_TILE at a
   time and then two at a time, so that their number has to be even; `width` has to be a multiple of LANES. A tile of
   `out` stays in registers while `depth` passes by. Every element is summed in the order of `depth`, in whatever tile
   it lies, so that results do not depend on how rows are divided. */

#ifndef DYNATTN_PRODUCTS_H
#define DYNATTN_PRODUCTS_H

#include "vectors.h"

#define ROW_TILE 6
#define TILE_VECTORS (LANES == 16 ? 4 : 2) /* processors with 16 lanes have twice as many registers */

typedef struct {
    const float *data;
    long row_stride, depth_stride;
} left_matrix;

INLINE void multiply_tile(float *out, long out_stride, left_matrix a, const float *b, long b_stride, long depth,
                          const int rows, const int vectors, const int adds) {
    vec sums[ROW_TILE][TILE_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sums[r][v] = adds ? *(const vec *)(out + r * out_stride + v * LANES) : (vec){0};
    for (long k = 0; k < depth; k++) {
        vec row[TILE_VECTORS];
        for (int v = 0; v < vectors; v++) row[v] = *(const vec *)(b + k * b_stride + v * LANES);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) sums[r][v] += row[v] * a.data[r * a.row_stride + k * a.depth_stride];
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) *(vec *)(out + r * out_stride + v * LANES) = sums[r][v];
}

INLINE void multiply_rows(float *out, long out_stride, left_matrix a, const float *b, long b_stride, const int rows,
                          long width, long depth, const int adds) {
    long column = 0;
    for (; column + TILE_VECTORS * LANES <= width; column += TILE_VECTORS * LANES)
        multiply_tile(out + column, out_stride, a, b + column, b_stride, depth, rows, TILE_VECTORS, adds);
    for (; column < width; column += LANES)
        multiply_tile(out + column, out_stride, a, b + column, b_stride, depth, rows, 1, adds);
}

INLINE void multiply(float *out, long out_stride, left_matrix a, const float *b, long b_stride, long rows, long width,
                     long depth, const int adds) {
    long row = 0;
    for (; row + ROW_TILE <= rows; row += ROW_TILE, a.data += ROW_TILE * a.row_stride)
        multiply_rows(out + row * out_stride, out_stride, a, b, b_stride, ROW_TILE, width, depth, adds);
    for (; row < rows; row += 2, a.data += 2 * a.row_stride)
        multiply_rows(out + row * out_stride, out_stride, a, b, b_stride, 2, width, depth, adds);
}

#endif
