/* A decoding step over a paged cache: attention with composed heads for one query per item, whose keys and values are
   rows in pages that a serving engine manages.

   paged_decode_native.py calls `attend_to_pages` and `paged_workspace_size` and fills `paged_problem`. An item is a
   request. The phases, the spans and the arithmetic are those of decode.c. There are three differences: items differ in
   their number of keys, a table says in which rows the keys are, and a row also holds the key-side terms of its token.

   Macros: those of decode.c, and TERMS (the number of terms of the key side of one stage, each of HEADS elements: down
   factors, as many up factors and, if the number is odd, a gate). After the WIDTH elements of each of its KV_HEADS
   heads, a row has EXTRA elements. Those of all heads, one after the other, are the terms [TERMS, HEADS] of its token:
   of the stage `pre` in rows of keys, of the stage `post` in rows of values. */

#include "decode.c"

#define EXTRA (TERMS * REPEATS)
#define RANK (TERMS / 2)
#define TERM_ELEMENTS (TERMS ? TERMS * HEADS : 1)

/* The rows of all pages of one layer, [rows, KV_HEADS, WIDTH + EXTRA or more], whose last stride is 1. */
typedef struct {
    const element *data;
    long row_stride, head_stride;
} cache_rows;

typedef struct {
    decode_tensor query; /* [items, HEADS, 1, WIDTH] */
    cache_rows key, value;
    const long *table;        /* the numbers of the rows of all items */
    const long *table_starts; /* [items]: where the row numbers of an item start in the table */
    const long *key_counts;   /* [items]: how many keys the query sees, each in a row */
    decode_stage pre, post;   /* without factors of keys, which are in the rows */
    long items;
    tables by_distance;
} paged_problem;

/* How far key `s` of an item is before the query, which is at the last key. */
INLINE long distance_of(const paged_problem *given, long item, long s) { return given->key_counts[item] - 1 - s; }

/* For how many keys an item has a workspace: at least one, because `divide` needs a span. */
INLINE long room_of(const paged_problem *given, long item) {
    return given->key_counts[item] ? given->key_counts[item] : 1;
}

/* How many float32 elements of workspace `attend_to_pages` needs: for each item a `workspace` and what it points to. */
long paged_workspace_size(const paged_problem *given) {
    long size = given->items * sizeof(workspace) / sizeof(float);
    for (long item = 0; item < given->items; item++) size += workspace_size(1, room_of(given, item));
    return size;
}

/* Points `row` at the row of key `s` of an item. Returns how many keys, up to `end`, are in rows that follow there. */
static long find_rows(const element **row, const paged_problem *given, const cache_rows *from, long item, long s,
                      long end) {
    const long *numbers = given->table + given->table_starts[item] + s;
    long count = 1;
    while (s + count < end && numbers[count] == numbers[count - 1] + 1) count++;
    *row = from->data + numbers[0] * from->row_stride;
    return count;
}

/* Copies the terms of `count` rows to [count, TERMS, HEADS]. */
static void read_terms(element (*terms)[TERM_ELEMENTS], const element *row, const cache_rows *from, long count) {
    for (long s = 0; s < count; s++, row += from->row_stride)
        for (int h = 0; h < KV_HEADS; h++)
            memcpy(terms[s] + h * EXTRA, row + h * from->head_stride + WIDTH, EXTRA * sizeof(element));
}

/* A stage with the query factors of one item and the terms [keys, TERMS, HEADS] of some keys, as `compose` reads it for
   item 0. */
static decode_stage stage_of(const decode_stage *by, long item, element (*terms)[TERM_ELEMENTS]) {
    decode_stage own = *by;
    for (factor *of_query = &own.query_down; of_query <= &own.query_gate; of_query++)
        if (of_query->data) of_query->data += item * of_query->item_stride;
    factor of_key = {terms[0], 0, TERM_ELEMENTS, HEADS, RANK};
    if (RANK) own.key_down = of_key, of_key.data += RANK * HEADS, own.key_up = of_key;
    of_key.data = terms[0] + 2 * RANK * HEADS;
    if (TERMS % 2) own.key_gate = of_key;
    return own;
}

/* Composed scores of `count` keys of an item from `start` on. */
static void score_rows(float (*maps)[HEADS], const paged_problem *given, width_vec (*query)[ROW_VECTORS], long item,
                       long start, long count) {
    element terms[BLOCK_KEYS][TERM_ELEMENTS];
    const element *row;
    for (long s = 0, rows; s < count; s += rows) {
        rows = find_rows(&row, given, &given->key, item, start + s, start + count);
        for (int h = 0; h < KV_HEADS; h++)
            score_keys(maps[s] + h * REPEATS, query + h * REPEATS, row + h * given->key.head_stride,
                       given->key.row_stride, rows);
        if (TERMS && given->pre.composes) read_terms(terms + s, row, &given->key, rows);
    }
    add_bias(maps, &given->by_distance, 1, distance_of(given, item, start), count);
    if (given->pre.composes) {
        decode_stage pre = stage_of(&given->pre, item, terms);
        compose(maps, &pre, 0, 0, count);
    }
    add_bias(maps, &given->by_distance, 0, distance_of(given, item, start), count);
}

/* First phase, as `attend_to_keys`. */
static void attend_to_key_rows(workspace work, const paged_problem *given, float scaling, long item, long span) {
    long begin = span * work.span_length, end = smaller(begin + work.span_length, given->key_counts[item]);
    decode_tensor queries = given->query;
    vec maxima[HEAD_VECTORS];
    width_vec query[HEADS][ROW_VECTORS];
    for (int h = 0; h < HEADS; h++)
        pack_query(query[h], queries.data + item * queries.item_stride + h * queries.head_stride, scaling);
    EACH_HEAD_VECTOR(v) maxima[v] = (vec){0} - INFINITY;
    for (long start = begin; start < end; start += BLOCK_KEYS) {
        long count = smaller(end - start, BLOCK_KEYS);
        score_rows(work.maps + start, given, query, item, start, count);
        raise_maxima(maxima, work.maps + start, count);
    }
    exponentiate(work, work.maps + begin, maxima, end - begin, 0, span);
}

/* Second phase, as `attend_to_values`. */
static void attend_to_value_rows(workspace work, const paged_problem *given, long item, long span) {
    long begin = span * work.span_length, end = smaller(begin + work.span_length, given->key_counts[item]);
    element terms[BLOCK_KEYS][TERM_ELEMENTS];
    width_vec(*outputs)[ROW_VECTORS] = work.outputs[span];
    vec factors[HEAD_VECTORS];
    find_normalizers(factors, work, 0, span);
    memset(outputs, 0, sizeof(width_vec) * HEADS * ROW_VECTORS);
    decode_stage post = stage_of(&given->post, item, terms);
    for (long start = begin; start < end; start += BLOCK_KEYS) {
        long count = smaller(end - start, BLOCK_KEYS);
        float(*maps)[HEADS] = work.maps + start;
        const element *row;
        for (long s = 0; s < count; s++) EACH_HEAD_VECTOR(v) AT(maps[s], v) *= factors[v];
        multiply_gain(maps, &given->by_distance, distance_of(given, item, start), count);
        if (TERMS && post.composes)
            for (long s = 0, rows; s < count; s += rows) {
                rows = find_rows(&row, given, &given->value, item, start + s, start + count);
                read_terms(terms + s, row, &given->value, rows);
            }
        if (post.composes) compose(maps, &post, 0, 0, count);
        for (long s = 0, rows; s < count; s += rows) {
            rows = find_rows(&row, given, &given->value, item, start + s, start + count);
            for (int h = 0; h < KV_HEADS; h++)
                add_values(outputs + h * REPEATS, maps[s] + h * REPEATS, row + h * given->value.head_stride,
                           given->value.row_stride, rows);
        }
    }
}

typedef struct {
    workspace *works; /* [items] */
    const paged_problem *given;
    element *out;
    float scaling;
} paged_step;

/* Tasks: each phase over the spans, or the heads, of all items. */
static void score_paged_span(const void *context, long index, long thread) {
    const paged_step *of = context;
    long item = index / MAX_SPANS, span = index % MAX_SPANS;
    (void)thread;
    if (span < of->works[item].spans) attend_to_key_rows(of->works[item], of->given, of->scaling, item, span);
}

static void add_paged_span(const void *context, long index, long thread) {
    const paged_step *of = context;
    long item = index / MAX_SPANS, span = index % MAX_SPANS;
    (void)thread;
    if (span < of->works[item].spans) attend_to_value_rows(of->works[item], of->given, item, span);
}

static void join_paged_head(const void *context, long index, long thread) {
    const paged_step *of = context;
    (void)thread;
    join_outputs(of->out + index * WIDTH, of->works[index / HEADS], 0, index % HEADS);
}

/* Writes the attention output [items, HEADS, WIDTH] to `out`; `memory` has `paged_workspace_size` float32 elements. */
void attend_to_pages(element *out, float *memory, const paged_problem *given, float scaling, long threads) {
    long items = given->items;
    workspace *works = (workspace *)memory;
    memory = (float *)(works + items);
    for (long item = 0; item < items; item++) {
        works[item] = divide(memory, 1, room_of(given, item));
        memory += workspace_size(1, room_of(given, item));
    }
    paged_step of = {works, given, out, scaling};
    for_each_task(score_paged_span, &of, items * MAX_SPANS, threads);
    for_each_task(add_paged_span, &of, items * MAX_SPANS, threads);
    for_each_task(join_paged_head, &of, items * HEADS, threads);
}
