"""The C source of `dcmha_chunked_native`: what `dcmha_chunked_core` does between its matrix products.

Its speed is that of memory, so every number is fetched from the second-level cache as seldom as possible. The factors
of `KEYS` keys stay in the first-level cache while all queries of the chunk pass by, `ROWS` at a time; the hidden maps
of `LANES` keys stay in registers. Threads, which are PyTorch's own, share the keys of a chunk, or its rows.
Results do not depend on how many there are, but for the order of one sum: that of the gradients of a query's factors.

Macros set by the compiler's command line: `LANES` (numbers in a register), `HEADS`, `GROUPS`, `QUERY_RANK`,
`QUERY_GATE`, `KEY_RANK`, `KEY_GATE`.
"""

# Registers of `LANES` float32 numbers, and what is done with them. `FLOATS(n)` is a type of n numbers, `TOTAL(n)` sums
# them: written as loops over the numbers it would not stay in registers.
VECTORS = r"""
#include <float.h>
#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define PASTE(name, lanes) name##lanes
#define FLOATS(lanes) PASTE(floats, lanes)
#define TOTAL(lanes) PASTE(total, lanes)
#define FOLD(lanes, half)                                                             \
    typedef float floats##lanes __attribute__((vector_size(4 * lanes), aligned(4)));  \
    INLINE float total##lanes(floats##lanes numbers) {                                \
        floats##half low, high;                                                       \
        memcpy(&low, &numbers, sizeof(low));                                          \
        memcpy(&high, (char *)&numbers + sizeof(low), sizeof(high));                  \
        return total##half(low + high);                                               \
    }

typedef float floats1 __attribute__((vector_size(4), aligned(4)));
INLINE float total1(floats1 number) { return number[0]; }
FOLD(2, 1)
FOLD(4, 2)
FOLD(8, 4)
FOLD(16, 8)

typedef FLOATS(LANES) vec;
typedef int ints __attribute__((vector_size(4 * LANES), aligned(4)));

/* e to the x, for x <= 0, by Cody and Waite's reduction and a polynomial: within 2 units in the last place; 0 below
   the smallest normal number. */
INLINE vec exponential(vec x) {
    const float round = 12582912.0f;
    ints tiny = x < (vec){0} - 87.33f;
    vec power = (x * 1.44269504088896341f + round) - round;
    vec rest = x - power * 0.693359375f + power * 2.12194440e-4f;
    vec sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * (rest * rest) + rest + 1.0f;
    ints exponent = (__builtin_convertvector(power, ints) + 127) << 23;
    return (vec)((ints)(sum * (vec)exponent) & ~tiny);
}

INLINE vec largest(vec a, vec b) {
    ints greater = a > b;
    return (vec)(((ints)a & greater) | ((ints)b & ~greater));
}
"""

SOURCE = (
    VECTORS
    + r"""
#define ROWS (LANES == 16 ? 4 : 2) /* with 16 lanes there are 32 registers */
#define KEYS 64
#define GROUP (HEADS / GROUPS)
#define QUERY_ROWS (2 * QUERY_RANK + QUERY_GATE)
#define KEY_ROWS (2 * KEY_RANK + KEY_GATE)
#define SOME(count) ((count) > 0 ? (count) : 1)
#ifdef _OPENMP
int omp_get_thread_num(void);
#define THREAD omp_get_thread_num()
#else
#define THREAD 0
#endif

typedef float key_tile[SOME(KEY_ROWS)][HEADS][KEYS];
typedef vec hidden_maps[SOME(QUERY_RANK + KEY_RANK)][ROWS];

/* Maps [HEADS, queries, keys] from some query and key on; strides count numbers. */
typedef struct {
    float *at;
    long head, query;
} block;

#define MAP(maps, h, t, s) (*(vec *)((maps).at + (h) * (maps).head + (t) * (maps).query + (s)))
#define KEY(tile, row, h, s) (*(vec *)&(tile)[row][h][s])
#define QUERY(rows, t, row, h) ((rows)[((t) * QUERY_ROWS + (row)) * HEADS + (h)])
#define SUM(sums, t, row, h) (*(vec *)((sums) + (((t) * QUERY_ROWS + (row)) * HEADS + (h)) * LANES))

static block part(const float *maps, long head, long keys, long item, long t, long s) {
    return (block){(float *)maps + item * HEADS * head + t * keys + s, head, keys};
}

/* One head group's hidden maps: heads weighted by rows of factors, which start at `query_row` and `key_row`. */
INLINE void gather(hidden_maps hidden, block maps, const float *query, key_tile key, int first, int query_row,
                   int key_row, int rows, long s) {
    for (int r = 0; r < QUERY_RANK + KEY_RANK; r++)
        for (int t = 0; t < rows; t++) hidden[r][t] = (vec){0};
    for (int h = first; h < first + GROUP; h++)
        for (int t = 0; t < rows; t++) {
            vec map = MAP(maps, h, t, s);
            for (int r = 0; r < QUERY_RANK; r++) hidden[r][t] += map * QUERY(query, t, query_row + r, h);
            for (int r = 0; r < KEY_RANK; r++) hidden[QUERY_RANK + r][t] += map * KEY(key, key_row + r, h, s);
        }
}

/* `rows` queries by the keys from `begin` to `end`, a multiple of LANES; `out` may be `maps`. */
INLINE void compose_block(block out, block maps, block base, const float *query, key_tile key, int rows, long begin,
                          long end) {
    for (int first = 0; first < HEADS; first += GROUP)
        for (long s = begin; s < end; s += LANES) {
            hidden_maps hidden;
            gather(hidden, maps, query, key, first, 0, 0, rows, s);
            for (int h = first; h < first + GROUP; h++)
                for (int t = 0; t < rows; t++) {
                    vec map = MAP(maps, h, t, s), sum = MAP(base, h, t, s);
                    for (int r = 0; r < QUERY_RANK; r++) sum += hidden[r][t] * QUERY(query, t, QUERY_RANK + r, h);
                    for (int r = 0; r < KEY_RANK; r++) sum += hidden[QUERY_RANK + r][t] * KEY(key, KEY_RANK + r, h, s);
                    if (QUERY_GATE) sum += map * QUERY(query, t, 2 * QUERY_RANK, h);
                    if (KEY_GATE) sum += map * KEY(key, 2 * KEY_RANK, h, s);
                    MAP(out, h, t, s) = sum;
                }
        }
}

/* Turns `grad` into the gradient of `maps` and adds to those of the rows of factors. */
INLINE void differentiate_block(block grad, block maps, block base, const float *query, key_tile key,
                                float *query_sums, key_tile key_sums, int rows, long begin, long end) {
    for (int first = 0; first < HEADS; first += GROUP) {
        hidden_maps all_below[KEYS / LANES], all_above[KEYS / LANES];
        for (long s = begin; s < end; s += LANES) {
            gather(all_below[s / LANES], maps, query, key, first, 0, 0, rows, s);
            gather(all_above[s / LANES], grad, query, key, first, QUERY_RANK, KEY_RANK, rows, s);
        }
        for (int h = first; h < first + GROUP; h++) {
            vec for_query[ROWS][SOME(QUERY_ROWS)];
            for (int t = 0; t < rows; t++)
                for (int r = 0; r < QUERY_ROWS; r++) for_query[t][r] = SUM(query_sums, t, r, h);
            for (long s = begin; s < end; s += LANES) {
                vec(*below)[ROWS] = all_below[s / LANES], (*above)[ROWS] = all_above[s / LANES];
                vec for_key[SOME(KEY_ROWS)];
                for (int r = 0; r < KEY_ROWS; r++) for_key[r] = KEY(key_sums, r, h, s);
                for (int t = 0; t < rows; t++) {
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
                for (int r = 0; r < KEY_ROWS; r++) KEY(key_sums, r, h, s) = for_key[r];
            }
            for (int t = 0; t < rows; t++)
                for (int r = 0; r < QUERY_ROWS; r++) SUM(query_sums, t, r, h) = for_query[t][r];
        }
    }
}

static void read_keys(key_tile tile, const float *rows, long stride, long width) {
    memset(tile, 0, sizeof(key_tile));
    for (int row = 0; row < KEY_ROWS; row++)
        for (int h = 0; h < HEADS; h++) memcpy(tile[row][h], rows + (row * HEADS + h) * stride, sizeof(float) * width);
}

/* The keys of one query that do not fill a register: a copy that does, with zeros behind them. */
typedef float padded[HEADS][LANES];

static block pad(padded copy, block maps, long begin, long width) {
    memset(copy, 0, sizeof(padded));
    for (int h = 0; h < HEADS; h++)
        memcpy(copy[h], maps.at + h * maps.head + begin, sizeof(float) * (width - begin));
    return (block){&copy[0][0] - begin, LANES, 0};
}

static void unpad(padded copy, block maps, long begin, long width) {
    for (int h = 0; h < HEADS; h++)
        memcpy(maps.at + h * maps.head + begin, copy[h], sizeof(float) * (width - begin));
}

/* Maps [items, HEADS, queries, keys], `head` from head to head; query [items, queries, rows, HEADS], `query_item` from
   item to item; key [items, rows, HEADS, keys], `key_item` from item to item and `stride` from head to head.
   out = base + what the factors add to maps; all three may be one. */
void compose(float *out, const float *maps, const float *base, const float *query, const float *key, long query_item,
             long key_item, long stride, long head, long items, long queries, long keys, long threads) {
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
    for (long item = 0; item < items; item++)
        for (long s = 0; s < keys; s += KEYS) {
            long width = keys - s < KEYS ? keys - s : KEYS, even = width / LANES * LANES;
            key_tile rows;
            read_keys(rows, key + item * key_item + s, stride, width);
            for (long t = 0; t < queries;) {
                block to = part(out, head, keys, item, t, s), of = part(maps, head, keys, item, t, s);
                block plus = part(base, head, keys, item, t, s);
                const float *here = query + item * query_item + t * QUERY_ROWS * HEADS;
                if (width == KEYS && queries - t >= ROWS) {
                    compose_block(to, of, plus, here, rows, ROWS, 0, KEYS);
                    t += ROWS;
                    continue;
                }
                compose_block(to, of, plus, here, rows, 1, 0, even);
                if (even < width) {
                    padded copies[3];
                    block target = pad(copies[0], to, even, width);
                    compose_block(target, pad(copies[1], of, even, width), pad(copies[2], plus, even, width), here,
                                  rows, 1, even, even + 1);
                    unpad(copies[0], to, even, width);
                }
                t++;
            }
        }
}

/* As above; overwrites grad, adds to query_sums and key_sums, which lie as query and key do. Works in parts
   [threads, items, queries, rows, HEADS, LANES]. */
void differentiate(float *grad, const float *maps, const float *base, const float *query, const float *key,
                   float *parts, float *query_sums, float *key_sums, long query_item, long key_item, long stride,
                   long head, long items, long queries, long keys, long threads) {
    long all_rows = queries * QUERY_ROWS * HEADS;
    memset(parts, 0, sizeof(vec) * threads * items * all_rows);
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
    for (long item = 0; item < items; item++)
        for (long s = 0; s < keys; s += KEYS) {
            long width = keys - s < KEYS ? keys - s : KEYS, even = width / LANES * LANES;
            float *own_parts = parts + (THREAD * items + item) * all_rows * LANES;
            key_tile rows, sums = {0};
            read_keys(rows, key + item * key_item + s, stride, width);
            for (long t = 0; t < queries;) {
                block up = part(grad, head, keys, item, t, s), of = part(maps, head, keys, item, t, s);
                block plus = part(base, head, keys, item, t, s);
                const float *here = query + item * query_item + t * QUERY_ROWS * HEADS;
                float *sums_here = own_parts + t * QUERY_ROWS * HEADS * LANES;
                if (width == KEYS && queries - t >= ROWS) {
                    differentiate_block(up, of, plus, here, rows, sums_here, sums, ROWS, 0, KEYS);
                    t += ROWS;
                    continue;
                }
                differentiate_block(up, of, plus, here, rows, sums_here, sums, 1, 0, even);
                if (even < width) {
                    padded copies[3];
                    block target = pad(copies[0], up, even, width);
                    differentiate_block(target, pad(copies[1], of, even, width), pad(copies[2], plus, even, width),
                                        here, rows, sums_here, sums, 1, even, even + 1);
                    unpad(copies[0], up, even, width);
                }
                t++;
            }
            float *key_sums_here = key_sums + item * key_item + s;
            for (int row = 0; row < KEY_ROWS * HEADS; row++)
                for (long i = 0; i < width; i++) key_sums_here[row * stride + i] += (&sums[0][0][0])[row * KEYS + i];
        }
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
    for (long item = 0; item < items; item++)
        for (long row = 0; row < all_rows; row++) {
            vec sum = {0};
            for (long thread = 0; thread < threads; thread++)
                sum += ((vec *)parts)[(thread * items + item) * all_rows + row];
            query_sums[item * query_item + row] += TOTAL(LANES)(sum);
        }
}

/* The last numbers of a row, which do not fill a register, and `rest` behind them. */
static vec tail(const float *row, long count, float rest) {
    vec numbers = (vec){0} + rest;
    memcpy(&numbers, row, sizeof(float) * count);
    return numbers;
}

static long larger(long a, long b) { return a > b ? a : b; }

/* The keys that query t sees: from `distance` + t - `behind` to `distance` + t + `ahead`, and none before its number in
   `first_keys`, if there are any. */
static void seen(long t, const long *first_keys, long keys, long distance, long behind, long ahead, long *first,
                 long *last) {
    *first = larger(larger(t + distance - behind, 0), first_keys ? first_keys[t] : 0);
    *first = *first < keys ? *first : keys;
    *last = t + distance + ahead + 1 < keys ? t + distance + ahead + 1 : keys;
    *last = larger(*last, *first);
}

static void normalize(float *row, long count) {
    long even = count / LANES * LANES, left = count - even;
    vec top = (vec){0} - INFINITY, sums = {0};
    for (long s = 0; s < even; s += LANES) top = largest(*(vec *)(row + s), top);
    top = largest(tail(row + even, left, -INFINITY), top);
    float most = -INFINITY;
    for (int i = 0; i < LANES; i++) most = top[i] > most ? top[i] : most;
    most = most == -INFINITY ? 0 : most;
    for (long s = 0; s < even; s += LANES) {
        vec power = exponential(*(vec *)(row + s) - most);
        *(vec *)(row + s) = power;
        sums += power;
    }
    vec power = exponential(tail(row + even, left, -INFINITY) - most);
    memcpy(row + even, &power, sizeof(float) * left);
    float sum = TOTAL(LANES)(sums + power);
    float factor = sum == 0 ? 0 : 1 / sum;
    for (long s = 0; s < count; s++) row[s] *= factor;
}

/* Softmax over the keys that each query sees, in place; zero for all others, and in rows without any. */
void softmax(float *maps, const long *first_keys, long distance, long behind, long ahead, long heads, long head,
             long items, long queries, long keys, long threads) {
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
    for (long h = 0; h < items * heads; h++)
        for (long t = 0; t < queries; t++) {
            long begin, end, row_of_item = h / heads * queries;
            seen(t, first_keys ? first_keys + row_of_item : 0, keys, distance, behind, ahead, &begin, &end);
            float *row = maps + h * head + t * keys;
            memset(row, 0, sizeof(float) * begin);
            memset(row + end, 0, sizeof(float) * (keys - end));
            normalize(row + begin, end - begin);
        }
}

static void denormalize(float *grad, const float *probs, long count) {
    long even = count / LANES * LANES;
    vec sums = tail(grad + even, count - even, 0) * tail(probs + even, count - even, 0);
    for (long s = 0; s < even; s += LANES) sums += *(vec *)(grad + s) * *(vec *)(probs + s);
    float sum = TOTAL(LANES)(sums);
    for (long s = 0; s < count; s++) grad[s] = (grad[s] - sum) * probs[s];
}

/* Turns the gradient of the probabilities into that of the scores. */
void softmax_backward(float *grad, const float *probs, const long *first_keys, long distance, long behind, long ahead,
                      long heads, long head, long items, long queries, long keys, long threads) {
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
    for (long h = 0; h < items * heads; h++)
        for (long t = 0; t < queries; t++) {
            long begin, end, row_of_item = h / heads * queries;
            seen(t, first_keys ? first_keys + row_of_item : 0, keys, distance, behind, ahead, &begin, &end);
            float *row = grad + h * head + t * keys;
            memset(row, 0, sizeof(float) * begin);
            memset(row + end, 0, sizeof(float) * (keys - end));
            denormalize(row + begin, probs + h * head + t * keys + begin, end - begin);
        }
}
"""
)
