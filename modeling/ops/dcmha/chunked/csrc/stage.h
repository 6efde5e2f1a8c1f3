/* The interface between passes.c and compose.c, which is compiled to a library of its own for each kind of stage. */

#ifndef DYNATTN_STAGE_H
#define DYNATTN_STAGE_H

#define BLOCK_KEYS 64

/* A view of maps [heads, queries, keys] that starts at some query and key. */
typedef struct {
    float *data;
    long head_stride, query_stride; /* the stride of keys is 1 */
} map_view;

/* The types of `compose` and `differentiate`. */
typedef void compose_function(map_view out, map_view maps, map_view base, const float *query, const float *key,
                              long queries, long begin, long end);
typedef void differentiate_function(map_view grad, map_view maps, map_view base, const float *query, const float *key,
                                    float *query_sums, float *key_sums, long queries, long begin, long end);

#endif
