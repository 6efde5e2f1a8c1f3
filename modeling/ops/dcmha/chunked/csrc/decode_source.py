"""The C source of `dcmha_chunked_decode_native`: a decoding step, in one call.

Its speed is that of memory, from which it reads keys, values and factors once, in the order in which they lie. Each
task is a span of an item's keys with all heads, so that composition is at home in the first-level cache. Spans are
joined as in an online softmax: each has its own maximum and sum, and its own part of the output. How keys are cut into
spans depends on their number alone; so results do not depend on the number of threads, which are PyTorch's own.

Macros set by the compiler's command line: `LANES` and `WIDE` (numbers in a register of heads, which divides a group of
them, and of a head's width, no more than that), `HEADS`, `KV_HEADS`, `GROUPS`, `WIDTH`, `BYTES` (of a number: 4 for
float32, 2 for bfloat16).
"""

from .compose_source import VECTORS

SOURCE = (
    VECTORS
    + r"""
#define KEYS 64 /* the maps of that many stay in the first-level cache */
#define SPANS 16 /* at most, of an item */
#define REPEATS (HEADS / KV_HEADS)
#define GROUP (HEADS / GROUPS)
#define HEAD_VECTORS (HEADS / LANES)
#define PARTS (4 / BYTES)
#define CHUNK (WIDE * PARTS)
#define CHUNKS ((WIDTH + CHUNK - 1) / CHUNK)
#define ROW (CHUNKS * PARTS)
#define START(chunk) ((chunk) * CHUNK < WIDTH - CHUNK ? (chunk) * CHUNK : WIDTH - CHUNK)
#define PLACE(chunk, i) (((chunk) * PARTS + (i) % PARTS) * WIDE + (i) / PARTS)
/* How many of the heads that share a key or a value meet it at once: what registers hold. */
#define SCORED (REPEATS <= 8 ? REPEATS : REPEATS % 4 == 0 ? 4 : REPEATS % 2 == 0 ? 2 : 1)
#define SUMMED (ROW * REPEATS <= 16 ? REPEATS : REPEATS % 2 == 0 && ROW <= 8 ? 2 : 1)
#define AT(row, v) (((vec *)(row))[v])
#define EACH_HEAD_VECTOR(v) for (int v = 0; v < HEAD_VECTORS; v++)

typedef FLOATS(WIDE) wide;
typedef unsigned wide_bits __attribute__((vector_size(4 * WIDE), aligned(2)));
typedef unsigned bits __attribute__((vector_size(4 * LANES), aligned(4)));
typedef unsigned short halves __attribute__((vector_size(2 * LANES), aligned(2)));

/* A chunk of a row in float32. What is bfloat16 comes as two vectors, of even and of odd numbers. */
#if BYTES == 2
typedef unsigned short number;

INLINE void widen(wide *parts, const number *chunk) {
    wide_bits pairs = *(const wide_bits *)chunk;
    parts[0] = (wide)(pairs << 16);
    parts[1] = (wide)(pairs & 0xffff0000u);
}

INLINE vec read(const number *heads) { return (vec)(__builtin_convertvector(*(const halves *)heads, bits) << 16); }

INLINE float to_float(number from) {
    unsigned wider = (unsigned)from << 16;
    float result;
    memcpy(&result, &wider, sizeof(result));
    return result;
}

/* To the nearest, of two to the even one. */
INLINE number to_number(float from) {
    unsigned wider;
    memcpy(&wider, &from, sizeof(wider));
    return from != from ? wider >> 16 | 0x40 : (wider + 0x7fff + (wider >> 16 & 1)) >> 16;
}
#else
typedef float number;

INLINE void widen(wide *parts, const number *chunk) { parts[0] = *(const wide *)chunk; }
INLINE vec read(const number *heads) { return *(const vec *)heads; }
INLINE float to_float(number from) { return from; }
INLINE number to_number(float from) { return from; }
#endif

/* Every struct's members are the arguments of Python, in its order. Distances count numbers. */
typedef struct {
    const number *at;
    long item, head, key;
} cache;

typedef struct {
    const number *at;
    long item, key, rank, count;
} factor;

typedef struct {
    long composes;
    factor query_down, query_up, query_gate, key_down, key_up, key_gate;
    const number *static_at; /* [HEADS, HEADS], indexed [in, out] */
    long static_row;
} stage;

typedef struct {
    const void *at;
    long is_bool, bytes, item, head, key;
} mask;

typedef struct {
    cache query, key, value;
    mask hiding;
    stage pre, post;
    long items, keys;
} problem;

/* What the phases hand on: maps of [items, keys], the rest of [items, spans], which are `length` keys long. */
typedef struct {
    float (*maps)[HEADS];
    vec (*most)[HEAD_VECTORS], (*sums)[HEAD_VECTORS];
    wide (*outputs)[HEADS][ROW];
    long length, spans;
} workspace;

INLINE long smaller(long a, long b) { return a < b ? a : b; }

static workspace divide(float *room, long items, long keys) {
    workspace work;
    work.length = ((keys + SPANS - 1) / SPANS + KEYS - 1) / KEYS * KEYS;
    work.spans = (keys + work.length - 1) / work.length;
    work.outputs = (void *)room;
    work.most = (void *)(work.outputs + items * work.spans);
    work.sums = work.most + items * work.spans;
    work.maps = (void *)(work.sums + items * work.spans);
    return work;
}

/* How many numbers of workspace are needed. */
long room(long items, long keys) { return (size_t)(divide(0, items, keys).maps + items * keys) / sizeof(float); }

/* The scaled query in chunks, as those of a key will come. The last one ends where the row does: what it shares with
   the one before it counts as zero. */
static void pack_query(wide *packed, const number *query, float scaling) {
    float *last = (float *)(packed + ROW - PARTS);
    for (int c = 0; c < CHUNKS; c++) widen(packed + c * PARTS, query + START(c));
    for (int i = 0; i < ROW; i++) packed[i] *= scaling;
    for (int i = 0; i < CHUNKS * CHUNK - WIDTH; i++) last[PLACE(0, i)] = 0;
}

/* Scores of `count` keys for the heads that share them. */
static void score(float *maps, wide (*query)[ROW], const number *key, long distance, long count) {
    for (long s = 0; s < count; s++, key += distance, maps += HEADS)
        for (int first = 0; first < REPEATS; first += SCORED) {
            wide sums[SCORED] = {0};
            for (int c = 0; c < CHUNKS; c++) {
                wide parts[PARTS];
                widen(parts, key + START(c));
                for (int h = 0; h < SCORED; h++)
                    for (int p = 0; p < PARTS; p++) sums[h] += parts[p] * query[first + h][c * PARTS + p];
            }
            for (int h = 0; h < SCORED; h++) maps[first + h] = TOTAL(WIDE)(sums[h]);
        }
}

/* Adds `count` values, weighted by maps, to the outputs of the heads that share them. */
static void add_values(wide (*outputs)[ROW], const float *maps, const number *value, long distance, long count) {
    for (int first = 0; first < REPEATS; first += SUMMED) {
        wide sums[SUMMED][ROW];
        memcpy(sums, outputs + first, sizeof(sums));
        for (long s = 0; s < count; s++)
            for (int c = 0; c < CHUNKS; c++) {
                wide parts[PARTS];
                widen(parts, value + s * distance + START(c));
                for (int h = 0; h < SUMMED; h++)
                    for (int p = 0; p < PARTS; p++) sums[h][c * PARTS + p] += parts[p] * maps[s * HEADS + first + h];
            }
        memcpy(outputs + first, sums, sizeof(sums));
    }
}

INLINE const number *row_of(const factor *from, long item, long s, long r) {
    return from->at + item * from->item + s * from->key + r * from->rank;
}

/* Adds maps, weighted by `down` and summed inside each group, times `up`. */
INLINE void add_hidden(vec *sum, const vec *maps, const number *down, const number *up) {
    for (int first = 0; first < HEAD_VECTORS; first += GROUP / LANES) {
        vec hidden = {0};
        for (int v = first; v < first + GROUP / LANES; v++) hidden += maps[v] * read(down + v * LANES);
        float of_group = TOTAL(LANES)(hidden);
        for (int v = first; v < first + GROUP / LANES; v++) sum[v] += of_group * read(up + v * LANES);
    }
}

/* Composes the maps `[count, HEADS]` of an item's keys from `start` on. */
static void compose(float (*maps)[HEADS], const stage *by, long item, long start, long count) {
    for (long s = start; s < start + count; s++, maps++) {
        vec here[HEAD_VECTORS], sum[HEAD_VECTORS];
        memcpy(here, maps, sizeof(here));
        memcpy(sum, maps, sizeof(sum));
        for (int side = 0; side < 2; side++) {
            const factor *down = side ? &by->key_down : &by->query_down, *up = down + 1, *gate = down + 2;
            long row = side ? s : 0;
            for (long r = 0; r < down->count; r++)
                add_hidden(sum, here, row_of(down, item, row, r), row_of(up, item, row, r));
            if (gate->at) {
                const number *gates = row_of(gate, item, row, 0);
                EACH_HEAD_VECTOR(v) sum[v] += here[v] * read(gates + v * LANES);
            }
        }
        if (by->static_at)
            for (int h = 0; h < HEADS; h++)
                EACH_HEAD_VECTOR(v) sum[v] += maps[0][h] * read(by->static_at + h * by->static_row + v * LANES);
        memcpy(maps, sum, sizeof(sum));
    }
}

/* What a mask adds to a score: minus infinity where it hides the key, as its type's lowest number also says. */
INLINE float bias_of(const mask *hiding, long item, long h, long s) {
    long place = item * hiding->item + h * hiding->head + s * hiding->key;
    if (hiding->is_bool) return ((const char *)hiding->at)[place] ? 0 : -INFINITY;
    unsigned pattern = hiding->bytes == 2 ? ((const unsigned short *)hiding->at)[place] << 16
                                          : ((const unsigned *)hiding->at)[place];
    float lowest = hiding->bytes == 2 ? -0x1.fep127f : -FLT_MAX, bias;
    memcpy(&bias, &pattern, sizeof(bias));
    return bias > lowest ? bias : -INFINITY;
}

/* Whether a mask hides some keys of an item from all heads; of masks that differ between heads it does not ask. */
static int hides_all(const mask *hiding, long item, long start, long count) {
    if (!hiding->at || hiding->head) return 0;
    for (long s = start; s < start + count; s++)
        if (bias_of(hiding, item, 0, s) != -INFINITY) return 0;
    return 1;
}

/* Adds the mask to the maps of an item's keys from `start` on. Whatever its score, a hidden key gets minus infinity. */
static void hide(float (*maps)[HEADS], const mask *hiding, long item, long start, long count) {
    for (long s = start; s < start + count; s++, maps++) {
        float bias[HEADS];
        for (int h = 0; h < HEADS; h++) bias[h] = h == 0 || hiding->head ? bias_of(hiding, item, h, s) : bias[0];
        for (int h = 0; h < HEADS; h++) maps[0][h] = bias[h] == -INFINITY ? -INFINITY : maps[0][h] + bias[h];
    }
}

INLINE vec or_zero(vec most) {
    ints none = most == (vec){0} - INFINITY;
    return (vec)((ints)most & ~none);
}

/* What the softmax is taken of, for `count` keys of an item from `start` on. */
static void score_block(float (*maps)[HEADS], const problem *given, wide (*query)[ROW], long item, long start,
                        long count) {
    cache keys = given->key;
    if (hides_all(&given->hiding, item, start, count)) {
        for (long s = 0; s < count; s++) EACH_HEAD_VECTOR(v) AT(maps[s], v) = (vec){0} - INFINITY;
        return;
    }
    for (int h = 0; h < KV_HEADS; h++) {
        const number *key = keys.at + item * keys.item + h * keys.head + start * keys.key;
        score(maps[0] + h * REPEATS, query + h * REPEATS, key, keys.key, count);
    }
    if (given->pre.composes) compose(maps, &given->pre, item, start, count);
    if (given->hiding.at) hide(maps, &given->hiding, item, start, count);
}

/* Powers of the scores of an item's span, relative to their maximum, and their sum. */
static void attend_to_keys(workspace work, const problem *given, float scaling, long item, long span) {
    long begin = span * work.length, end = smaller(begin + work.length, given->keys);
    float(*maps)[HEADS] = work.maps + item * given->keys;
    vec most[HEAD_VECTORS], sums[HEAD_VECTORS] = {0};
    wide query[HEADS][ROW];
    for (int h = 0; h < HEADS; h++)
        pack_query(query[h], given->query.at + item * given->query.item + h * given->query.head, scaling);
    EACH_HEAD_VECTOR(v) most[v] = (vec){0} - INFINITY;
    for (long start = begin; start < end; start += KEYS) {
        long count = smaller(end - start, KEYS);
        score_block(maps + start, given, query, item, start, count);
        for (long s = start; s < start + count; s++) EACH_HEAD_VECTOR(v) most[v] = largest(AT(maps[s], v), most[v]);
    }
    for (long s = begin; s < end; s++)
        EACH_HEAD_VECTOR(v) {
            AT(maps[s], v) = exponential(AT(maps[s], v) - or_zero(most[v]));
            sums[v] += AT(maps[s], v);
        }
    memcpy(work.most[item * work.spans + span], most, sizeof(most));
    memcpy(work.sums[item * work.spans + span], sums, sizeof(sums));
}

/* What makes a span's powers the probabilities of all; zero where no key is seen. */
static void normalizers(vec *factors, workspace work, long item, long span) {
    vec(*most)[HEAD_VECTORS] = work.most + item * work.spans, (*sums)[HEAD_VECTORS] = work.sums + item * work.spans;
    EACH_HEAD_VECTOR(v) {
        vec top = (vec){0} - INFINITY, sum = {0};
        for (long i = 0; i < work.spans; i++) top = largest(most[i][v], top);
        top = or_zero(top);
        for (long i = 0; i < work.spans; i++) sum += sums[i][v] * exponential(most[i][v] - top);
        ints none = sum == (vec){0};
        factors[v] = (vec)((ints)(exponential(most[span][v] - top) / sum) & ~none);
    }
}

/* A span's part of the output: probabilities, composed, times values. */
static void attend_to_values(workspace work, const problem *given, long item, long span) {
    long begin = span * work.length, end = smaller(begin + work.length, given->keys);
    float(*maps)[HEADS] = work.maps + item * given->keys;
    wide(*outputs)[ROW] = work.outputs[item * work.spans + span];
    vec factors[HEAD_VECTORS];
    normalizers(factors, work, item, span);
    memset(outputs, 0, sizeof(wide) * HEADS * ROW);
    for (long start = begin; start < end; start += KEYS) {
        long count = smaller(end - start, KEYS);
        if (hides_all(&given->hiding, item, start, count)) continue;
        for (long s = start; s < start + count; s++) EACH_HEAD_VECTOR(v) AT(maps[s], v) *= factors[v];
        if (given->post.composes) compose(maps + start, &given->post, item, start, count);
        for (int h = 0; h < KV_HEADS; h++) {
            cache values = given->value;
            const number *value = values.at + item * values.item + h * values.head + start * values.key;
            add_values(outputs + h * REPEATS, maps[start] + h * REPEATS, value, values.key, count);
        }
    }
}

/* The sum of all spans' parts, rounded. */
static void join_outputs(number *out, workspace work, long item, int h) {
    wide sums[ROW];
    memcpy(sums, work.outputs[item * work.spans][h], sizeof(sums));
    for (long span = 1; span < work.spans; span++)
        for (int i = 0; i < ROW; i++) sums[i] += work.outputs[item * work.spans + span][h][i];
    for (int c = 0; c < CHUNKS; c++)
        for (int i = 0; i < CHUNK; i++)
            out[START(c) + i] = to_number(((float *)sums)[PLACE(c, i)]);
}

/* out [items, HEADS, WIDTH]. */
void attend(number *out, float *room, const problem *given, float scaling, long threads) {
    long items = given->items;
    workspace work = divide(room, items, given->keys);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for collapse(2) schedule(static)
        for (long item = 0; item < items; item++)
            for (long span = 0; span < work.spans; span++) attend_to_keys(work, given, scaling, item, span);
#pragma omp for collapse(2) schedule(static)
        for (long item = 0; item < items; item++)
            for (long span = 0; span < work.spans; span++) attend_to_values(work, given, item, span);
#pragma omp for collapse(2) schedule(static)
        for (long item = 0; item < items; item++)
            for (int h = 0; h < HEADS; h++) join_outputs(out + (item * HEADS + h) * WIDTH, work, item, h);
    }
}
"""
)
