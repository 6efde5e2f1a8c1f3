/* What one chunk of queries needs between its matrix products: composition of maps, its gradient, and softmax.

   composers/native.py calls `compose`, `differentiate`, `softmax` and `softmax_backward`; its argument types have to
   match the signatures here. Maps are attention scores or probabilities. An item is a row of the batch. A term is one
   packed vector of HEADS factors: a query has QUERY_RANK "down" terms, as many "up" terms and, if QUERY_GATE is 1, a
   gate; a key likewise. Strides count elements.

   Memory bounds the speed, so the elements of a map are read from the second-level cache as seldom as possible. The
   factors of BLOCK_KEYS keys stay in the first-level cache while all queries of the chunk pass by, BLOCK_QUERIES at a
   time. The hidden maps of LANES keys (sums over the heads, weighted by "down" terms) stay in registers.

   Threads are those of PyTorch's OpenMP runtime. They share the keys of a chunk or, in softmax, the rows of its maps.
   Results do not depend on their number, except for the order of one sum: the gradients of query terms.

   Macros from the compiler's command line: LANES (float32 elements in a register), HEADS, GROUPS (groups of heads that
   low-rank terms mix), QUERY_RANK, QUERY_GATE, KEY_RANK, KEY_GATE. */

#include "vectors.h"

#define BLOCK_QUERIES (LANES == 16 ? 4 : 2) /* processors with 16 lanes have twice as many registers */
#define BLOCK_KEYS 64
#define GROUP_HEADS (HEADS / GROUPS)
#define QUERY_TERMS (2 * QUERY_RANK + QUERY_GATE)
#define KEY_TERMS (2 * KEY_RANK + KEY_GATE)
#define AT_LEAST_1(count) ((count) > 0 ? (count) : 1) /* arrays in C have elements, even unused ones */
#ifdef _OPENMP
int omp_get_thread_num(void);
#define THREAD omp_get_thread_num()
#else
#define THREAD 0
#endif

typedef float key_tile[AT_LEAST_1(KEY_TERMS)][HEADS][BLOCK_KEYS];
typedef vec hidden_maps[AT_LEAST_1(QUERY_RANK + KEY_RANK)][BLOCK_QUERIES];

/* A view of maps [HEADS, queries, keys] that starts at some query and key. */
typedef struct {
    float *data;
    long head_stride, query_stride; /* the stride of keys is 1 */
} map_view;

#define MAP(maps, h, t, s) (*(vec *)((maps).data + (h) * (maps).head_stride + (t) * (maps).query_stride + (s)))
#define KEY(tile, term, h, s) (*(vec *)&(tile)[term][h][s])
#define QUERY(terms, t, term, h) ((terms)[((t) * QUERY_TERMS + (term)) * HEADS + (h)])
#define QUERY_SUM(sums, t, term, h) (*(vec *)((sums) + (((t) * QUERY_TERMS + (term)) * HEADS + (h)) * LANES))

/* The view that starts at query `t` and key `s` of an item; `keys` is the length of a row of maps. */
static map_view view_of(const float *maps, long head_stride, long keys, long item, long t, long s) {
    return (map_view){(float *)maps + item * HEADS * head_stride + t * keys + s, head_stride, keys};
}

/* The hidden maps of the head group that starts at `first_head`: its heads, weighted by the terms that start at
   `query_term` and `key_term`, and summed. */
INLINE void sum_heads(hidden_maps hidden, map_view maps, const float *query, key_tile key, int first_head,
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
INLINE void compose_block(map_view out, map_view maps, map_view base, const float *query, key_tile key, int queries,
                          long begin, long end) {
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

/* Turns `grad` from the gradient of the composed maps into that of `maps`, and adds the gradients of the terms to
   `query_sums` and `key_sums`; queries and keys as in `compose_block`. Hidden maps `below` are those of the forward
   pass, `maps` weighted by "down" terms; hidden maps `above` are `grad` weighted by "up" terms. */
INLINE void differentiate_block(map_view grad, map_view maps, map_view base, const float *query, key_tile key,
                                float *query_sums, key_tile key_sums, int queries, long begin, long end) {
    for (int first = 0; first < HEADS; first += GROUP_HEADS) {
        hidden_maps all_below[BLOCK_KEYS / LANES], all_above[BLOCK_KEYS / LANES];
        for (long s = begin; s < end; s += LANES) {
            sum_heads(all_below[s / LANES], maps, query, key, first, 0, 0, queries, s);
            sum_heads(all_above[s / LANES], grad, query, key, first, QUERY_RANK, KEY_RANK, queries, s);
        }
        for (int h = first; h < first + GROUP_HEADS; h++) {
            vec for_query[BLOCK_QUERIES][AT_LEAST_1(QUERY_TERMS)];
            for (int t = 0; t < queries; t++)
                for (int r = 0; r < QUERY_TERMS; r++) for_query[t][r] = QUERY_SUM(query_sums, t, r, h);
            for (long s = begin; s < end; s += LANES) {
                vec(*below)[BLOCK_QUERIES] = all_below[s / LANES], (*above)[BLOCK_QUERIES] = all_above[s / LANES];
                vec for_key[AT_LEAST_1(KEY_TERMS)];
                for (int r = 0; r < KEY_TERMS; r++) for_key[r] = KEY(key_sums, r, h, s);
                for (int t = 0; t < queries; t++) {
                    vec map = MAP(maps, h, t, s), up = MAP(grad, h, t, s), sum = MAP(base, h, t, s);
                    for (int r = 0; r < QUERY_RANK; r++) {
                        sum += above[r][t] * QUERY(query, t, r, h);
                        for_query[t][r] += map * above[r][t];
                        for_query[t][QUERY_RANK + r] += up * below[r][t];
                    }
                    for (int r = 0; r < KEY_RANK; r++) {
                        sum += above[QUERY_RANK + r][t] * KEY(key, r, h, s);
                        for_key[r] += map * above[QUERY_RANK + r][t];
                        for_key[KEY_RANK + r] += up * below[QUERY_RANK + r][t];
                    }
                    if (QUERY_GATE) {
                        sum += up * QUERY(query, t, 2 * QUERY_RANK, h);
                        for_query[t][2 * QUERY_RANK] += map * up;
                    }
                    if (KEY_GATE) {
                        sum += up * KEY(key, 2 * KEY_RANK, h, s);
                        for_key[2 * KEY_RANK] += map * up;
                    }
                    MAP(grad, h, t, s) = sum;
                }
                for (int r = 0; r < KEY_TERMS; r++) KEY(key_sums, r, h, s) = for_key[r];
            }
            for (int t = 0; t < queries; t++)
                for (int r = 0; r < QUERY_TERMS; r++) QUERY_SUM(query_sums, t, r, h) = for_query[t][r];
        }
    }
}

/* Copies the terms of `width` keys into a tile, padded with zeros; `stride` lies between the heads of the terms. */
static void read_keys(key_tile tile, const float *terms, long stride, long width) {
    memset(tile, 0, sizeof(key_tile));
    for (int term = 0; term < KEY_TERMS; term++)
        for (int h = 0; h < HEADS; h++)
            memcpy(tile[term][h], terms + (term * HEADS + h) * stride, sizeof(float) * width);
}

/* A copy of one query's keys from `begin` to `width`, which are too few to fill a register, followed by zeros. */
typedef float padded_keys[HEADS][LANES];

static map_view pad(padded_keys copy, map_view maps, long begin, long width) {
    memset(copy, 0, sizeof(padded_keys));
    for (int h = 0; h < HEADS; h++)
        memcpy(copy[h], maps.data + h * maps.head_stride + begin, sizeof(float) * (width - begin));
    return (map_view){&copy[0][0] - begin, LANES, 0};
}

static void unpad(padded_keys copy, map_view maps, long begin, long width) {
    for (int h = 0; h < HEADS; h++)
        memcpy(maps.data + h * maps.head_stride + begin, copy[h], sizeof(float) * (width - begin));
}

/* out = base + what the terms add to maps; any of the three may be the same memory.

   out, maps, base: [items, HEADS, queries, keys], with `head_stride` between heads
   query: [items, queries, QUERY_TERMS, HEADS], with `query_item_stride` between items
   key: [items, KEY_TERMS, HEADS, keys], with `key_item_stride` between items and `key_head_stride` between heads */
void compose(float *out, const float *maps, const float *base, const float *query, const float *key,
             long query_item_stride, long key_item_stride, long key_head_stride, long head_stride, long items,
             long queries, long keys, long threads) {
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
    for (long item = 0; item < items; item++)
        for (long s = 0; s < keys; s += BLOCK_KEYS) {
            long width = keys - s < BLOCK_KEYS ? keys - s : BLOCK_KEYS, whole = width / LANES * LANES;
            key_tile key_terms;
            read_keys(key_terms, key + item * key_item_stride + s, key_head_stride, width);
            for (long t = 0; t < queries;) {
                map_view to = view_of(out, head_stride, keys, item, t, s);
                map_view from = view_of(maps, head_stride, keys, item, t, s);
                map_view plus = view_of(base, head_stride, keys, item, t, s);
                const float *query_terms = query + item * query_item_stride + t * QUERY_TERMS * HEADS;
                if (width == BLOCK_KEYS && queries - t >= BLOCK_QUERIES) {
                    compose_block(to, from, plus, query_terms, key_terms, BLOCK_QUERIES, 0, BLOCK_KEYS);
                    t += BLOCK_QUERIES;
                    continue;
                }
                compose_block(to, from, plus, query_terms, key_terms, 1, 0, whole);
                if (whole < width) {
                    padded_keys copies[3];
                    map_view target = pad(copies[0], to, whole, width);
                    compose_block(target, pad(copies[1], from, whole, width), pad(copies[2], plus, whole, width),
                                  query_terms, key_terms, 1, whole, whole + 1);
                    unpad(copies[0], to, whole, width);
                }
                t++;
            }
        }
}

/* The gradient of `compose`: turns `grad` from the gradient of its result into that of `maps`, and adds to the
   gradients of the terms. `base` is the part of the gradient of `maps` that does not come through the terms.

   grad, maps, base, query, key: as in `compose`
   query_sums, key_sums: as query and key, with the same strides
   partial_sums: workspace [threads, items, queries, QUERY_TERMS, HEADS, LANES] */
void differentiate(float *grad, const float *maps, const float *base, const float *query, const float *key,
                   float *partial_sums, float *query_sums, float *key_sums, long query_item_stride,
                   long key_item_stride, long key_head_stride, long head_stride, long items, long queries, long keys,
                   long threads) {
    long item_size = queries * QUERY_TERMS * HEADS;
    if (item_size) /* without terms there is no workspace, and memset takes no null pointer, not even for no bytes */
        memset(partial_sums, 0, sizeof(vec) * threads * items * item_size);
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
    for (long item = 0; item < items; item++)
        for (long s = 0; s < keys; s += BLOCK_KEYS) {
            long width = keys - s < BLOCK_KEYS ? keys - s : BLOCK_KEYS, whole = width / LANES * LANES;
            float *own_sums = partial_sums + (THREAD * items + item) * item_size * LANES;
            key_tile key_terms, tile_sums = {0};
            read_keys(key_terms, key + item * key_item_stride + s, key_head_stride, width);
            for (long t = 0; t < queries;) {
                map_view up = view_of(grad, head_stride, keys, item, t, s);
                map_view from = view_of(maps, head_stride, keys, item, t, s);
                map_view plus = view_of(base, head_stride, keys, item, t, s);
                const float *query_terms = query + item * query_item_stride + t * QUERY_TERMS * HEADS;
                float *sums = own_sums + t * QUERY_TERMS * HEADS * LANES;
                if (width == BLOCK_KEYS && queries - t >= BLOCK_QUERIES) {
                    differentiate_block(up, from, plus, query_terms, key_terms, sums, tile_sums, BLOCK_QUERIES, 0,
                                        BLOCK_KEYS);
                    t += BLOCK_QUERIES;
                    continue;
                }
                differentiate_block(up, from, plus, query_terms, key_terms, sums, tile_sums, 1, 0, whole);
                if (whole < width) {
                    padded_keys copies[3];
                    map_view target = pad(copies[0], up, whole, width);
                    differentiate_block(target, pad(copies[1], from, whole, width), pad(copies[2], plus, whole, width),
                                        query_terms, key_terms, sums, tile_sums, 1, whole, whole + 1);
                    unpad(copies[0], up, whole, width);
                }
                t++;
            }
            float *block_sums = key_sums + item * key_item_stride + s;
            for (int row = 0; row < KEY_TERMS * HEADS; row++)
                for (long i = 0; i < width; i++)
                    block_sums[row * key_head_stride + i] += (&tile_sums[0][0][0])[row * BLOCK_KEYS + i];
        }
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
    for (long item = 0; item < items; item++)
        for (long i = 0; i < item_size; i++) {
            vec sum = {0};
            for (long thread = 0; thread < threads; thread++)
                sum += ((vec *)partial_sums)[(thread * items + item) * item_size + i];
            query_sums[item * query_item_stride + i] += TOTAL(LANES)(sum);
        }
}

/* The last `count` elements of a row, which are too few to fill a register, followed by `filler`. */
static vec read_tail(const float *row, long count, float filler) {
    vec tail = (vec){0} + filler;
    memcpy(&tail, row, sizeof(float) * count);
    return tail;
}

static long larger(long a, long b) { return a > b ? a : b; }

/* The keys that query t sees: [*begin, *end) is the part of [t + offset - behind, t + offset + ahead] that lies in the
   chunk's `keys` keys, without the keys before first_keys[t]. `first_keys` may be null. */
static void visible_keys(long t, const long *first_keys, long keys, long offset, long behind, long ahead, long *begin,
                         long *end) {
    *begin = larger(larger(t + offset - behind, 0), first_keys ? first_keys[t] : 0);
    *begin = *begin < keys ? *begin : keys;
    *end = t + offset + ahead + 1 < keys ? t + offset + ahead + 1 : keys;
    *end = larger(*end, *begin);
}

static void softmax_row(float *row, long count) {
    long whole = count / LANES * LANES, left = count - whole;
    vec maxima = (vec){0} - INFINITY, sums = {0};
    for (long s = 0; s < whole; s += LANES) maxima = maximum(*(vec *)(row + s), maxima);
    maxima = maximum(read_tail(row + whole, left, -INFINITY), maxima);
    float top = -INFINITY;
    for (int i = 0; i < LANES; i++) top = maxima[i] > top ? maxima[i] : top;
    top = top == -INFINITY ? 0 : top;
    for (long s = 0; s < whole; s += LANES) {
        vec power = exponential(*(vec *)(row + s) - top);
        *(vec *)(row + s) = power;
        sums += power;
    }
    vec power = exponential(read_tail(row + whole, left, -INFINITY) - top);
    memcpy(row + whole, &power, sizeof(float) * left);
    float sum = TOTAL(LANES)(sums + power);
    float factor = sum == 0 ? 0 : 1 / sum;
    for (long s = 0; s < count; s++) row[s] *= factor;
}

/* Softmax over the keys that each query sees, in place. All other keys, and queries that see none, get zeros.

   maps: [items, heads, queries, keys], with `head_stride` between heads
   first_keys: [items, queries], or null
   offset, behind, ahead: as in `visible_keys` */
void softmax(float *maps, const long *first_keys, long offset, long behind, long ahead, long heads, long head_stride,
             long items, long queries, long keys, long threads) {
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
    for (long h = 0; h < items * heads; h++)
        for (long t = 0; t < queries; t++) {
            long begin, end, item_offset = h / heads * queries;
            visible_keys(t, first_keys ? first_keys + item_offset : 0, keys, offset, behind, ahead, &begin, &end);
            float *row = maps + h * head_stride + t * keys;
            memset(row, 0, sizeof(float) * begin);
            memset(row + end, 0, sizeof(float) * (keys - end));
            softmax_row(row + begin, end - begin);
        }
}

static void softmax_backward_row(float *grad, const float *probs, long count) {
    long whole = count / LANES * LANES;
    vec sums = read_tail(grad + whole, count - whole, 0) * read_tail(probs + whole, count - whole, 0);
    for (long s = 0; s < whole; s += LANES) sums += *(vec *)(grad + s) * *(vec *)(probs + s);
    float sum = TOTAL(LANES)(sums);
    for (long s = 0; s < count; s++) grad[s] = (grad[s] - sum) * probs[s];
}

/* Turns `grad` from the gradient of the probabilities into that of the scores. Arguments as in `softmax`. */
void softmax_backward(float *grad, const float *probs, const long *first_keys, long offset, long behind, long ahead,
                      long heads, long head_stride, long items, long queries, long keys, long threads) {
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
    for (long h = 0; h < items * heads; h++)
        for (long t = 0; t < queries; t++) {
            long begin, end, item_offset = h / heads * queries;
            visible_keys(t, first_keys ? first_keys + item_offset : 0, keys, offset, behind, ahead, &begin, &end);
            float *row = grad + h * head_stride + t * keys;
            memset(row, 0, sizeof(float) * begin);
            memset(row + end, 0, sizeof(float) * (keys - end));
            softmax_backward_row(row + begin, probs + h * head_stride + t * keys + begin, end - begin);
        }
}
