/* A decoding step: attention with composed heads for one query per item, in one call.

   decode_native.py calls `attend` and `workspace_size`; it and paged_decode_native.py fill `decode_problem`. An item is
   a row of the batch, or a request whose keys and values are rows in the pages of a serving engine. Maps are scores or
   probabilities, here [keys, HEADS]. Strides and lengths count elements.

   Memory bounds the speed, so keys, values and factors are read once, in the order in which they are stored. A task is
   a span of an item's keys with all heads, so that composition works in the first-level cache. Spans are joined as in
   an online softmax: each has its own maxima, sums and part of the output. How keys are divided into spans depends on
   their number alone, so results do not depend on the number of threads.

   Macros from the compiler's command line: LANES (elements of a register that holds heads; it divides the heads of a
   group), WIDTH_LANES (32-bit elements of a register that holds one head of a key or value, or a part of it),
   HEADS, KV_HEADS, GROUPS (groups of heads that low-rank terms mix), WIDTH (D, elements of a head), ELEMENT_BYTES (4:
   float32, 2: bfloat16 or float16), IS_FLOAT16, TERMS.

   Rows of pages also hold the TERMS terms of a stage's key side, each of HEADS elements: down factors, as many up
   factors and, if the number is odd, a gate. After the WIDTH elements of each of its KV_HEADS heads, a row has EXTRA
   elements. Those of all heads, one after the other, are the terms [TERMS, HEADS] of its token: of the stage `pre` in
   rows of keys, of the stage `post` in rows of values. TERMS is 0 where rows hold none, and where there are no rows. */

#include "elements.h"
#include "threads.h"

#define BLOCK_KEYS 64 /* their maps stay in the first-level cache */
#define MAX_SPANS 16  /* of one item */
#define REPEATS (HEADS / KV_HEADS)
#define GROUP_HEADS (HEADS / GROUPS)
#define HEAD_VECTORS (HEADS / LANES)
#define EXTRA (TERMS * REPEATS)
#define RANK (TERMS / 2)
#define TERM_ELEMENTS (TERMS ? TERMS * HEADS : 1)
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

/* What `attend` gets from Python: an array of long integers in the order of these members. */

/* A query, key or value [items, heads, keys, WIDTH], whose last stride is 1. Over pages, all items share the rows of
   all pages: `key_stride` lies between rows, and `item_stride` is 0. */
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
    decode_tensor query;
    decode_stage pre, post; /* over pages without factors of keys, which are in the rows */
    tables by_distance;
    long items;
    decode_tensor key, value;
    decode_mask hiding;
    long keys, position; /* `position`: of the query among the keys, from which distances are counted */
    /* Over pages, where items differ in the number of keys, and the query is at the last of them; else null. */
    const long *rows;       /* the numbers of the rows of all items */
    const long *row_starts; /* [items]: where the row numbers of an item start in `rows` */
    const long *key_counts; /* [items]: how many keys the query sees, each in a row */
} decode_problem;

INLINE long keys_of(const decode_problem *given, long item) {
    return given->key_counts ? given->key_counts[item] : given->keys;
}

/* How far key `s` of an item is before the query. */
INLINE long distance_of(const decode_problem *given, long item, long s) {
    return (given->key_counts ? given->key_counts[item] - 1 : given->position) - s;
}

/* Points `at` to what `from` holds of key `s` of an item. Returns how many keys, from this one and up to `end`, lie
   `key_stride` apart: over pages until a row number is not the next one, else all. */
static long find_keys(const element **at, const decode_problem *given, const decode_tensor *from, long item, long s,
                      long end) {
    const long *numbers = given->rows ? given->rows + given->row_starts[item] + s : &s;
    long count = given->rows ? 1 : end - s;
    while (s + count < end && numbers[count] == numbers[count - 1] + 1) count++;
    *at = from->data + item * from->item_stride + numbers[0] * from->key_stride;
    return count;
}

/* The results of an item that the three phases of `attend` pass to one another. A span has `span_length` keys; the last
   one may have fewer. */
typedef struct {
    float (*maps)[HEADS];                       /* [keys] */
    vec (*maxima)[HEAD_VECTORS];                /* [spans], of the composed scores */
    vec (*sums)[HEAD_VECTORS];                  /* [spans], of exp(score - maximum) */
    width_vec (*outputs)[HEADS][ROW_VECTORS];   /* [spans] */
    long span_length, spans;
    long unused[2]; /* fills a cache line, so that the results after all workspaces begin at one */
} workspace;

/* Divides the keys of an item into spans, at least one, and gives it room in the memory at `*next`, which is advanced
   past it. */
static workspace divide(size_t *next, const decode_problem *given, long item) {
    long keys = larger(keys_of(given, item), 1);
    workspace work;
    work.span_length = ((keys + MAX_SPANS - 1) / MAX_SPANS + BLOCK_KEYS - 1) / BLOCK_KEYS * BLOCK_KEYS;
    work.spans = (keys + work.span_length - 1) / work.span_length;
    work.outputs = (void *)*next, *next += work.spans * sizeof(*work.outputs);
    work.maxima = (void *)*next, *next += work.spans * sizeof(*work.maxima);
    work.sums = (void *)*next, *next += work.spans * sizeof(*work.sums);
    work.maps = (void *)*next, *next += keys * sizeof(*work.maps);
    return work;
}

/* How many float32 elements `attend` needs: for each item a `workspace` and what it points to. */
long workspace_size(const decode_problem *given) {
    size_t next = given->items * sizeof(workspace); /* an integer: C leaves sums with a null pointer undefined */
    for (long item = 0; item < given->items; item++) divide(&next, given, item);
    return next / sizeof(float);
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

/* Copies the terms of `count` rows, from that of key `start` of an item on, to [count, TERMS, HEADS]. */
static void read_terms(element (*terms)[TERM_ELEMENTS], const decode_problem *given, const decode_tensor *from,
                       long item, long start, long count) {
    const element *row;
    for (long end = start + count, rows; start < end; start += rows) {
        rows = find_keys(&row, given, from, item, start, end);
        for (long s = 0; s < rows; s++, row += from->key_stride, terms++)
            for (int h = 0; h < KV_HEADS; h++)
                memcpy(*terms + h * EXTRA, row + h * from->head_stride + WIDTH, EXTRA * sizeof(element));
    }
}

/* A stage with the terms [keys, TERMS, HEADS] of some keys as its factors of keys. */
static decode_stage with_terms(const decode_stage *by, const element *terms) {
    decode_stage own = *by;
    factor of_key = {terms, 0, TERM_ELEMENTS, HEADS, RANK};
    if (RANK) own.key_down = of_key, of_key.data += RANK * HEADS, own.key_up = of_key;
    of_key.data = terms + 2 * RANK * HEADS;
    if (TERMS % 2) own.key_gate = of_key;
    return own;
}

/* Composes the maps [count, HEADS] of an item's keys from `start` on, in place, by a stage whose terms of keys may be
   in the rows of `from`. */
static void compose_block(float (*maps)[HEADS], const decode_problem *given, const decode_stage *by,
                          const decode_tensor *from, long item, long start, long count) {
    element terms[BLOCK_KEYS][TERM_ELEMENTS];
    decode_stage own;
    if (!by->composes) return;
    if (TERMS) {
        read_terms(terms, given, from, item, start, count);
        own = with_terms(by, terms[0]);
        by = &own, start = 0;
    }
    compose(maps, by, item, start, count);
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
    const decode_tensor *keys = &given->key;
    const element *key;
    if (hides_all(&given->hiding, item, start, count)) {
        for (long s = 0; s < count; s++) EACH_HEAD_VECTOR(v) AT(maps[s], v) = (vec){0} - INFINITY;
        return;
    }
    for (long s = 0, found; s < count; s += found) {
        found = find_keys(&key, given, keys, item, start + s, start + count);
        for (int h = 0; h < KV_HEADS; h++)
            score_keys(maps[s] + h * REPEATS, query + h * REPEATS, key + h * keys->head_stride, keys->key_stride,
                       found);
    }
    add_bias(maps, &given->by_distance, 1, distance_of(given, item, start), count);
    compose_block(maps, given, &given->pre, keys, item, start, count);
    add_bias(maps, &given->by_distance, 0, distance_of(given, item, start), count);
    if (given->hiding.data) add_mask(maps, &given->hiding, item, start, count);
}

/* Raises the maxima of a span to those of the scores of `count` keys. */
INLINE void raise_maxima(vec *maxima, float (*maps)[HEADS], long count) {
    for (long s = 0; s < count; s++) EACH_HEAD_VECTOR(v) maxima[v] = maximum(AT(maps[s], v), maxima[v]);
}

/* Replaces the scores of a span's `count` keys by exp(score - maximum), and keeps the maxima and the sums of these. */
static void exponentiate(workspace work, float (*maps)[HEADS], const vec *maxima, long count, long span) {
    vec sums[HEAD_VECTORS] = {0};
    for (long s = 0; s < count; s++)
        EACH_HEAD_VECTOR(v) {
            AT(maps[s], v) = exponential(AT(maps[s], v) - finite_maxima(maxima[v]));
            sums[v] += AT(maps[s], v);
        }
    memcpy(work.maxima[span], maxima, sizeof(sums));
    memcpy(work.sums[span], sums, sizeof(sums));
}

typedef struct {
    workspace *works; /* [items] */
    long most_spans;  /* of an item */
    const decode_problem *given;
    element *out;
    float scaling;
} step;

/* Task of the first phase: exp(score - maximum) for the keys of a span, with the span's own maxima, and the sums of
   these. */
static void attend_to_keys(const void *context, long index, long thread) {
    const step *of = context;
    const decode_problem *given = of->given;
    long item = index / of->most_spans, span = index % of->most_spans;
    workspace work = of->works[item];
    (void)thread;
    if (span >= work.spans) return;
    long begin = span * work.span_length, end = smaller(begin + work.span_length, keys_of(given, item));
    vec maxima[HEAD_VECTORS];
    decode_tensor queries = given->query;
    width_vec query[HEADS][ROW_VECTORS];
    for (int h = 0; h < HEADS; h++)
        pack_query(query[h], queries.data + item * queries.item_stride + h * queries.head_stride, of->scaling);
    EACH_HEAD_VECTOR(v) maxima[v] = (vec){0} - INFINITY;
    for (long start = begin; start < end; start += BLOCK_KEYS) {
        long count = smaller(end - start, BLOCK_KEYS);
        score_block(work.maps + start, given, query, item, start, count);
        raise_maxima(maxima, work.maps + start, count);
    }
    exponentiate(work, work.maps + begin, maxima, end - begin, span);
}

/* The factors that turn a span's exp(score - maximum) into probabilities over all spans; 0 where no key is visible. */
static void find_normalizers(vec *factors, workspace work, long span) {
    EACH_HEAD_VECTOR(v) {
        vec top = (vec){0} - INFINITY, sum = {0};
        for (long i = 0; i < work.spans; i++) top = maximum(work.maxima[i][v], top);
        top = finite_maxima(top);
        for (long i = 0; i < work.spans; i++) sum += work.sums[i][v] * exponential(work.maxima[i][v] - top);
        int_vec none = sum == (vec){0};
        factors[v] = (vec)((int_vec)(exponential(work.maxima[span][v] - top) / sum) & ~none);
    }
}

/* Task of the second phase: a span's part of the output, the sum of its values times their composed probabilities. */
static void attend_to_values(const void *context, long index, long thread) {
    const step *of = context;
    const decode_problem *given = of->given;
    const decode_tensor *values = &given->value;
    long item = index / of->most_spans, span = index % of->most_spans;
    workspace work = of->works[item];
    (void)thread;
    if (span >= work.spans) return;
    long begin = span * work.span_length, end = smaller(begin + work.span_length, keys_of(given, item));
    width_vec(*outputs)[ROW_VECTORS] = work.outputs[span];
    vec factors[HEAD_VECTORS];
    find_normalizers(factors, work, span);
    memset(outputs, 0, sizeof(width_vec) * HEADS * ROW_VECTORS);
    for (long start = begin; start < end; start += BLOCK_KEYS) {
        long count = smaller(end - start, BLOCK_KEYS);
        if (hides_all(&given->hiding, item, start, count)) continue;
        float(*maps)[HEADS] = work.maps + start;
        const element *value;
        for (long s = 0; s < count; s++) EACH_HEAD_VECTOR(v) AT(maps[s], v) *= factors[v];
        multiply_gain(maps, &given->by_distance, distance_of(given, item, start), count);
        compose_block(maps, given, &given->post, values, item, start, count);
        for (long s = 0, found; s < count; s += found) {
            found = find_keys(&value, given, values, item, start + s, start + count);
            for (int h = 0; h < KV_HEADS; h++)
                add_values(outputs + h * REPEATS, maps[s] + h * REPEATS, value + h * values->head_stride,
                           values->key_stride, found);
        }
    }
}

/* Task of the third phase: the sum of all spans' parts for a head of an item, rounded to the element type. */
static void join_outputs(const void *context, long index, long thread) {
    const step *of = context;
    element *out = of->out + index * WIDTH;
    workspace work = of->works[index / HEADS];
    long h = index % HEADS;
    width_vec sums[ROW_VECTORS];
    (void)thread;
    memcpy(sums, work.outputs[0][h], sizeof(sums));
    for (long span = 1; span < work.spans; span++)
        for (int i = 0; i < ROW_VECTORS; i++) sums[i] += work.outputs[span][h][i];
    for (int c = 0; c < CHUNKS; c++)
        for (int i = 0; i < CHUNK; i++)
            out[CHUNK_START(c) + i] = round_element(((float *)sums)[UNPACKED_INDEX(c, i)]);
}

/* Writes the attention output [items, HEADS, WIDTH] to `out`; `memory` has `workspace_size` float32 elements. */
void attend(element *out, float *memory, const decode_problem *given, float scaling, long threads) {
    long items = given->items;
    step of = {(workspace *)memory, 0, given, out, scaling};
    size_t next = (size_t)memory + items * sizeof(workspace);
    for (long item = 0; item < items; item++) {
        of.works[item] = divide(&next, given, item);
        of.most_spans = larger(of.most_spans, of.works[item].spans);
    }
    for_each_task(attend_to_keys, &of, items * of.most_spans, threads);
    for_each_task(attend_to_values, &of, items * of.most_spans, threads);
    for_each_task(join_outputs, &of, items * HEADS, threads);
}
