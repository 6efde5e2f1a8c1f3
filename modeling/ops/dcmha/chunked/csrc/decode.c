/* A decoding step: attention with composed heads for one query per item, in one call.

   decode_native.py calls `attend` and `workspace_size` and fills `decode_problem`. An item is a row of the batch. Maps
   are scores or probabilities, here [keys, HEADS]. Strides and lengths count elements.

   Memory bounds the speed, so keys, values and factors are read once, in the order in which they are stored. A task is
   a span of an item's keys with all heads, so that composition works in the first-level cache. Spans are joined as in
   an online softmax: each has its own maxima, sums and part of the output. How keys are divided into spans depends on
   their number alone, so results do not depend on the number of threads.

   Macros from the compiler's command line: LANES (elements of a register that holds heads; it divides the heads of a
   group), WIDTH_LANES (32-bit elements of a register that holds one head of a key or value, or a part of it),
   HEADS, KV_HEADS, GROUPS (groups of heads that low-rank terms mix), WIDTH (D, elements of a head), ELEMENT_BYTES (4:
   float32, 2: bfloat16 or float16), IS_FLOAT16. */

#include "elements.h"
#include "threads.h"

#define BLOCK_KEYS 64 /* their maps stay in the first-level cache */
#define MAX_SPANS 16  /* of one item */
#define REPEATS (HEADS / KV_HEADS)
#define GROUP_HEADS (HEADS / GROUPS)
#define HEAD_VECTORS (HEADS / LANES)
/* A row of WIDTH elements is read in chunks of CHUNK elements, each of which becomes PARTS float32 registers. The last
   chunk ends where the row ends, so it may overlap the one before it. */
#define PARTS (4 / ELEMENT_BYTES)
#define CHUNK (WIDTH_LANES * PARTS)
#define CHUNKS ((WIDTH + CHUNK - 1) / CHUNK)
#define ROW_VECTORS (CHUNKS * PARTS)
#define CHUNK_START(chunk) ((chunk) * CHUNK < WIDTH - CHUNK ? (chunk) * CHUNK : WIDTH - CHUNK)
/* Where element `i` of a chunk is among the float32 elements of a row in registers. */
#define UNPACKED_INDEX(chunk, i) (((chunk) * PARTS + (i) % PARTS) * WIDTH_LANES + (i) / PARTS)
/* How many of the heads that share a key are scored together, and how many of those that share a value sum it together:
   as many as the registers have room for. */
#define SCORED_HEADS (REPEATS <= 8 ? REPEATS : REPEATS % 4 == 0 ? 4 : REPEATS % 2 == 0 ? 2 : 1)
#define SUMMED_HEADS (ROW_VECTORS * REPEATS <= 16 ? REPEATS : REPEATS % 2 == 0 && ROW_VECTORS <= 8 ? 2 : 1)
#define AT(row, v) (((vec *)(row))[v])
#define EACH_HEAD_VECTOR(v) for (int v = 0; v < HEAD_VECTORS; v++)

typedef FLOATS(WIDTH_LANES) width_vec;
typedef unsigned width_bits __attribute__((vector_size(4 * WIDTH_LANES), aligned(2)));
typedef unsigned bits __attribute__((vector_size(4 * LANES), aligned(4)));
typedef unsigned short half_bits __attribute__((vector_size(2 * LANES), aligned(2)));

/* Reading and writing elements. A chunk of 2-byte elements becomes two registers, of its even and of its odd ones. */
#if ELEMENT_BYTES == 2
typedef unsigned short element;

INLINE void read_chunk(width_vec *parts, const element *chunk) {
    width_bits pairs = *(const width_bits *)chunk;
    parts[0] = IS_FLOAT16 ? (width_vec)WIDEN_FLOAT16(width_vec, width_bits, pairs & 0xffffu) : (width_vec)(pairs << 16);
    parts[1] = IS_FLOAT16 ? (width_vec)WIDEN_FLOAT16(width_vec, width_bits, pairs >> 16)
                          : (width_vec)(pairs & 0xffff0000u);
}

INLINE vec read_heads(const element *heads) {
    bits wider = __builtin_convertvector(*(const half_bits *)heads, bits);
    return IS_FLOAT16 ? (vec)WIDEN_FLOAT16(vec, bits, wider) : (vec)(wider << 16);
}

INLINE element round_element(float from) { return IS_FLOAT16 ? to_float16(from) : to_bfloat16(from); }
#else
typedef float element;

INLINE void read_chunk(width_vec *parts, const element *chunk) { parts[0] = *(const width_vec *)chunk; }
INLINE vec read_heads(const element *heads) { return *(const vec *)heads; }
INLINE element round_element(float from) { return from; }
#endif

/* What decode_native.py passes to `attend`: an array of long integers in the order of these members. */

/* A query, key or value [items, heads, keys, WIDTH], whose last stride is 1. */
typedef struct {
    const element *data;
    long item_stride, head_stride, key_stride;
} decode_tensor;

/* Factors of queries or keys [items, 1 or keys, terms, HEADS], whose last stride is 1. A gate is one term; its
   `term_stride` and `terms` are not read. */
typedef struct {
    const element *data; /* null where the composition has no such factors */
    long item_stride, key_stride, term_stride, terms;
} factor;

typedef struct {
    long composes; /* 0: the heads of this stage stay as they are, and nothing else here is read */
    factor query_down, query_up, query_gate, key_down, key_up, key_gate;
    const element *static_matrix; /* [HEADS, HEADS], indexed [in, out], or null */
    long static_stride;           /* between its rows */
} decode_stage;

/* A boolean mask or an additive one, [items, heads, keys]; the stride of a dimension that is broadcast is 0. */
typedef struct {
    const void *data; /* null: all keys are visible */
    long is_bool, element_bytes, item_stride, head_stride, key_stride;
} decode_mask;

/* A table by distance [length, HEADS]. */
typedef struct {
    const float *data; /* null where there is none */
    long length;
} table;

typedef struct {
    table bias, gain;
    long composes_bias; /* whether the bias is added before the first composition */
} tables;

typedef struct {
    decode_tensor query, key, value;
    decode_mask hiding;
    decode_stage pre, post;
    long items, keys;
    tables by_distance;
    long position; /* of the query among the keys, from which distances are counted */
} decode_problem;

/* The results that the three phases of `attend` pass to one another. A span has `span_length` keys; the last one of an
   item may have fewer. */
typedef struct {
    float (*maps)[HEADS];                       /* [items * keys] */
    vec (*maxima)[HEAD_VECTORS];                /* [items * spans], of the composed scores */
    vec (*sums)[HEAD_VECTORS];                  /* [items * spans], of exp(score - maximum) */
    width_vec (*outputs)[HEADS][ROW_VECTORS];   /* [items * spans] */
    long span_length, spans;
} workspace;

static workspace divide(float *memory, long items, long keys) {
    workspace work;
    work.span_length = ((keys + MAX_SPANS - 1) / MAX_SPANS + BLOCK_KEYS - 1) / BLOCK_KEYS * BLOCK_KEYS;
    work.spans = (keys + work.span_length - 1) / work.span_length;
    /* Sums of integers, because C leaves sums with a null pointer, which `workspace_size` passes, undefined. */
    size_t next = (size_t)memory, parts = items * work.spans;
    work.outputs = (void *)next, next += parts * sizeof(*work.outputs);
    work.maxima = (void *)next, next += parts * sizeof(*work.maxima);
    work.sums = (void *)next, next += parts * sizeof(*work.sums);
    work.maps = (void *)next;
    return work;
}

/* How many float32 elements of workspace `attend` needs. */
long workspace_size(long items, long keys) {
    return (size_t)divide(0, items, keys).maps / sizeof(float) + items * keys * HEADS;
}

/* The scaled query in registers, in the chunks that `read_chunk` makes of a key. Elements of the last chunk that the
   one before it also has are zero, so that they count once. */
static void pack_query(width_vec *packed, const element *query, float scaling) {
    float *last = (float *)(packed + ROW_VECTORS - PARTS);
    for (int c = 0; c < CHUNKS; c++) read_chunk(packed + c * PARTS, query + CHUNK_START(c));
    for (int i = 0; i < ROW_VECTORS; i++) packed[i] *= scaling;
    for (int i = 0; i < CHUNKS * CHUNK - WIDTH; i++) last[UNPACKED_INDEX(0, i)] = 0;
}

/* Scores of `count` keys of one key head for the REPEATS query heads that share it. */
static void score_keys(float *maps, width_vec (*query)[ROW_VECTORS], const element *key, long key_stride, long count) {
    for (long s = 0; s < count; s++, key += key_stride, maps += HEADS)
        for (int first = 0; first < REPEATS; first += SCORED_HEADS) {
            width_vec sums[SCORED_HEADS] = {0};
            for (int c = 0; c < CHUNKS; c++) {
                width_vec parts[PARTS];
                read_chunk(parts, key + CHUNK_START(c));
                for (int h = 0; h < SCORED_HEADS; h++)
                    for (int p = 0; p < PARTS; p++) sums[h] += parts[p] * query[first + h][c * PARTS + p];
            }
            for (int h = 0; h < SCORED_HEADS; h++) maps[first + h] = TOTAL(WIDTH_LANES)(sums[h]);
        }
}

/* Adds `count` values of one value head, weighted by maps, to the outputs of the REPEATS heads that share it. */
static void add_values(width_vec (*outputs)[ROW_VECTORS], const float *maps, const element *value, long key_stride,
                       long count) {
    for (int first = 0; first < REPEATS; first += SUMMED_HEADS) {
        width_vec sums[SUMMED_HEADS][ROW_VECTORS];
        memcpy(sums, outputs + first, sizeof(sums));
        for (long s = 0; s < count; s++)
            for (int c = 0; c < CHUNKS; c++) {
                width_vec parts[PARTS];
                read_chunk(parts, value + s * key_stride + CHUNK_START(c));
                for (int h = 0; h < SUMMED_HEADS; h++)
                    for (int p = 0; p < PARTS; p++) sums[h][c * PARTS + p] += parts[p] * maps[s * HEADS + first + h];
            }
        memcpy(outputs + first, sums, sizeof(sums));
    }
}

INLINE const element *term_of(const factor *from, long item, long s, long r) {
    return from->data + item * from->item_stride + s * from->key_stride + r * from->term_stride;
}

/* Adds one low-rank term: maps weighted by `down` and summed over the heads of each group, times `up`. */
INLINE void add_low_rank(vec *sum, const vec *maps, const element *down, const element *up) {
    for (int first = 0; first < HEAD_VECTORS; first += GROUP_HEADS / LANES) {
        vec hidden = {0};
        for (int v = first; v < first + GROUP_HEADS / LANES; v++) hidden += maps[v] * read_heads(down + v * LANES);
        float total = TOTAL(LANES)(hidden);
        for (int v = first; v < first + GROUP_HEADS / LANES; v++) sum[v] += total * read_heads(up + v * LANES);
    }
}

/* Composes the maps [count, HEADS] of an item's keys from `start` on, in place. */
static void compose(float (*maps)[HEADS], const decode_stage *by, long item, long start, long count) {
    for (long s = start; s < start + count; s++, maps++) {
        vec map[HEAD_VECTORS], sum[HEAD_VECTORS];
        memcpy(map, maps, sizeof(map));
        memcpy(sum, maps, sizeof(sum));
        for (int side = 0; side < 2; side++) {
            const factor *down = side ? &by->key_down : &by->query_down, *up = down + 1, *gate = down + 2;
            long position = side ? s : 0;
            for (long r = 0; r < down->terms; r++)
                add_low_rank(sum, map, term_of(down, item, position, r), term_of(up, item, position, r));
            if (gate->data) {
                const element *gates = term_of(gate, item, position, 0);
                EACH_HEAD_VECTOR(v) sum[v] += map[v] * read_heads(gates + v * LANES);
            }
        }
        if (by->static_matrix)
            for (int h = 0; h < HEADS; h++)
                EACH_HEAD_VECTOR(v)
                    sum[v] += maps[0][h] * read_heads(by->static_matrix + h * by->static_stride + v * LANES);
        memcpy(maps, sum, sizeof(sum));
    }
}

/* What a mask adds to a score. The lowest finite value of its type stands for minus infinity: it hides the key. */
INLINE float bias_of(const decode_mask *hiding, long item, long h, long s) {
    long index = item * hiding->item_stride + h * hiding->head_stride + s * hiding->key_stride;
    if (hiding->is_bool) return ((const char *)hiding->data)[index] ? 0 : -INFINITY;
    unsigned pattern = hiding->element_bytes == 2 ? (unsigned)((const unsigned short *)hiding->data)[index] << 16
                                                  : ((const unsigned *)hiding->data)[index];
    float lowest = hiding->element_bytes == 2 ? -0x1.fep127f : -FLT_MAX, bias;
    memcpy(&bias, &pattern, sizeof(bias));
    return bias > lowest ? bias : -INFINITY;
}

/* Whether a mask hides all of `count` keys of an item. A mask that differs between heads is not searched: the answer is
   no. */
static int hides_all(const decode_mask *hiding, long item, long start, long count) {
    if (!hiding->data || hiding->head_stride) return 0;
    for (long s = start; s < start + count; s++)
        if (bias_of(hiding, item, 0, s) != -INFINITY) return 0;
    return 1;
}

/* Adds the mask to the maps of an item's keys from `start` on. A hidden key gets minus infinity even if its score is
   NaN or infinite. */
static void add_mask(float (*maps)[HEADS], const decode_mask *hiding, long item, long start, long count) {
    for (long s = start; s < start + count; s++, maps++) {
        float bias[HEADS];
        for (int h = 0; h < HEADS; h++)
            bias[h] = h == 0 || hiding->head_stride ? bias_of(hiding, item, h, s) : bias[0];
        for (int h = 0; h < HEADS; h++) maps[0][h] = bias[h] == -INFINITY ? -INFINITY : maps[0][h] + bias[h];
    }
}

/* The row of a table for a distance. Only hidden keys are at distances without a row; they read the nearest one. */
INLINE const vec *table_row(const table *from, long distance) {
    return (const vec *)(from->data + smaller(larger(distance, 0), from->length - 1) * HEADS);
}

/* Adds the bias to the scores of `count` keys, the first of which is `distance` before the query, if it belongs where
   this is called: `is_before` the first composition (1) or after it (0). */
static void add_bias(float (*maps)[HEADS], const tables *by, int is_before, long distance, long count) {
    if (!by->bias.data || by->composes_bias != is_before) return;
    for (long s = 0; s < count; s++) EACH_HEAD_VECTOR(v) AT(maps[s], v) += table_row(&by->bias, distance - s)[v];
}

/* Multiplies the probabilities of `count` keys, the first of which is `distance` before the query, by the gain, if
   there is one. */
static void multiply_gain(float (*maps)[HEADS], const tables *by, long distance, long count) {
    if (!by->gain.data) return;
    for (long s = 0; s < count; s++) EACH_HEAD_VECTOR(v) AT(maps[s], v) *= table_row(&by->gain, distance - s)[v];
}

/* Composed and masked scores of `count` keys of an item from `start` on. */
static void score_block(float (*maps)[HEADS], const decode_problem *given, width_vec (*query)[ROW_VECTORS], long item,
                        long start, long count) {
    decode_tensor keys = given->key;
    if (hides_all(&given->hiding, item, start, count)) {
        for (long s = 0; s < count; s++) EACH_HEAD_VECTOR(v) AT(maps[s], v) = (vec){0} - INFINITY;
        return;
    }
    for (int h = 0; h < KV_HEADS; h++) {
        const element *key = keys.data + item * keys.item_stride + h * keys.head_stride + start * keys.key_stride;
        score_keys(maps[0] + h * REPEATS, query + h * REPEATS, key, keys.key_stride, count);
    }
    add_bias(maps, &given->by_distance, 1, given->position - start, count);
    if (given->pre.composes) compose(maps, &given->pre, item, start, count);
    add_bias(maps, &given->by_distance, 0, given->position - start, count);
    if (given->hiding.data) add_mask(maps, &given->hiding, item, start, count);
}

/* Raises the maxima of a span to those of the scores of `count` keys. */
INLINE void raise_maxima(vec *maxima, float (*maps)[HEADS], long count) {
    for (long s = 0; s < count; s++) EACH_HEAD_VECTOR(v) maxima[v] = maximum(AT(maps[s], v), maxima[v]);
}

/* Replaces the scores of a span's `count` keys by exp(score - maximum), and keeps the maxima and the sums of these. */
static void exponentiate(workspace work, float (*maps)[HEADS], const vec *maxima, long count, long item, long span) {
    vec sums[HEAD_VECTORS] = {0};
    for (long s = 0; s < count; s++)
        EACH_HEAD_VECTOR(v) {
            AT(maps[s], v) = exponential(AT(maps[s], v) - finite_maxima(maxima[v]));
            sums[v] += AT(maps[s], v);
        }
    memcpy(work.maxima[item * work.spans + span], maxima, sizeof(sums));
    memcpy(work.sums[item * work.spans + span], sums, sizeof(sums));
}

/* First phase: exp(score - maximum) for the keys of a span, with the span's own maxima, and the sums of these. */
static void attend_to_keys(workspace work, const decode_problem *given, float scaling, long item, long span) {
    long begin = span * work.span_length, end = smaller(begin + work.span_length, given->keys);
    float(*maps)[HEADS] = work.maps + item * given->keys;
    vec maxima[HEAD_VECTORS];
    decode_tensor queries = given->query;
    width_vec query[HEADS][ROW_VECTORS];
    for (int h = 0; h < HEADS; h++)
        pack_query(query[h], queries.data + item * queries.item_stride + h * queries.head_stride, scaling);
    EACH_HEAD_VECTOR(v) maxima[v] = (vec){0} - INFINITY;
    for (long start = begin; start < end; start += BLOCK_KEYS) {
        long count = smaller(end - start, BLOCK_KEYS);
        score_block(maps + start, given, query, item, start, count);
        raise_maxima(maxima, maps + start, count);
    }
    exponentiate(work, maps + begin, maxima, end - begin, item, span);
}

/* The factors that turn a span's exp(score - maximum) into probabilities over all spans; 0 where no key is visible. */
static void find_normalizers(vec *factors, workspace work, long item, long span) {
    vec(*maxima)[HEAD_VECTORS] = work.maxima + item * work.spans, (*sums)[HEAD_VECTORS] = work.sums + item * work.spans;
    EACH_HEAD_VECTOR(v) {
        vec top = (vec){0} - INFINITY, sum = {0};
        for (long i = 0; i < work.spans; i++) top = maximum(maxima[i][v], top);
        top = finite_maxima(top);
        for (long i = 0; i < work.spans; i++) sum += sums[i][v] * exponential(maxima[i][v] - top);
        int_vec none = sum == (vec){0};
        factors[v] = (vec)((int_vec)(exponential(maxima[span][v] - top) / sum) & ~none);
    }
}

/* Second phase: a span's part of the output, the sum of its values times their composed probabilities. */
static void attend_to_values(workspace work, const decode_problem *given, long item, long span) {
    long begin = span * work.span_length, end = smaller(begin + work.span_length, given->keys);
    float(*maps)[HEADS] = work.maps + item * given->keys;
    width_vec(*outputs)[ROW_VECTORS] = work.outputs[item * work.spans + span];
    vec factors[HEAD_VECTORS];
    find_normalizers(factors, work, item, span);
    memset(outputs, 0, sizeof(width_vec) * HEADS * ROW_VECTORS);
    for (long start = begin; start < end; start += BLOCK_KEYS) {
        long count = smaller(end - start, BLOCK_KEYS);
        if (hides_all(&given->hiding, item, start, count)) continue;
        for (long s = start; s < start + count; s++) EACH_HEAD_VECTOR(v) AT(maps[s], v) *= factors[v];
        multiply_gain(maps + start, &given->by_distance, given->position - start, count);
        if (given->post.composes) compose(maps + start, &given->post, item, start, count);
        for (int h = 0; h < KV_HEADS; h++) {
            decode_tensor values = given->value;
            const element *value =
                values.data + item * values.item_stride + h * values.head_stride + start * values.key_stride;
            add_values(outputs + h * REPEATS, maps[start] + h * REPEATS, value, values.key_stride, count);
        }
    }
}

/* Third phase: the sum of all spans' parts, rounded to the element type. */
static void join_outputs(element *out, workspace work, long item, int h) {
    width_vec sums[ROW_VECTORS];
    memcpy(sums, work.outputs[item * work.spans][h], sizeof(sums));
    for (long span = 1; span < work.spans; span++)
        for (int i = 0; i < ROW_VECTORS; i++) sums[i] += work.outputs[item * work.spans + span][h][i];
    for (int c = 0; c < CHUNKS; c++)
        for (int i = 0; i < CHUNK; i++)
            out[CHUNK_START(c) + i] = round_element(((float *)sums)[UNPACKED_INDEX(c, i)]);
}

typedef struct {
    workspace work;
    const decode_problem *given;
    element *out;
    float scaling;
} step;

/* Tasks: each phase over the spans, or the heads, of all items. */
static void score_span(const void *context, long index, long thread) {
    const step *of = context;
    (void)thread;
    attend_to_keys(of->work, of->given, of->scaling, index / of->work.spans, index % of->work.spans);
}

static void add_span(const void *context, long index, long thread) {
    const step *of = context;
    (void)thread;
    attend_to_values(of->work, of->given, index / of->work.spans, index % of->work.spans);
}

static void join_head(const void *context, long index, long thread) {
    const step *of = context;
    (void)thread;
    join_outputs(of->out + index * WIDTH, of->work, index / HEADS, index % HEADS);
}

/* Writes the attention output [items, HEADS, WIDTH] to `out`; `memory` has `workspace_size` float32 elements. */
void attend(element *out, float *memory, const decode_problem *given, float scaling, long threads) {
    long items = given->items;
    step of = {divide(memory, items, given->keys), given, out, scaling};
    for_each_task(score_span, &of, items * of.work.spans, threads);
    for_each_task(add_span, &of, items * of.work.spans, threads);
    for_each_task(join_head, &of, items * HEADS, threads);
}
