/* One chunk: some queries of an item and the keys that they see, up to the composed probabilities.

   The maps of a chunk are tiles, one for each block of keys: [heads, rows, BLOCK_KEYS]. A patch is some rows of a tile
   with the keys that any of these queries sees, rounded out to whole registers of LANES keys; nothing else of a tile is
   read or written. As in an online softmax, every tile has maxima and sums of its own, which are joined when all tiles
   of the chunk have been scored. What a tile holds depends on its queries and keys alone, so that results do not depend
   on how queries are divided into chunks, nor on how tasks are divided among threads. */

#ifndef DYNATTN_CHUNK_H
#define DYNATTN_CHUNK_H

#include "problem.h"
#include "products.h"

#define GROUP_QUERIES 12 /* queries that share a span of keys; a multiple of ROW_TILE and of BLOCK_QUERIES */
#define MAX_CHUNK 64     /* the most queries of a chunk, and a multiple of LANES */
#define PART_QUERIES 4   /* so few that the product of their maps and a static matrix stays in the first-level cache */
#define MAX_GROUPS ((MAX_CHUNK + GROUP_QUERIES - 1) / GROUP_QUERIES)

typedef struct {
    long begin, end;
} span;

typedef struct {
    const problem *given;
    packed_keys packed;
    long item, first, queries, rows; /* `rows`: `queries` rounded up to an even number */
    long groups;
    span seen[MAX_GROUPS]; /* the keys that each group of queries sees by position */
    long begin_block, end_block;
    float *query;                  /* [heads, rows, row_slots]; scaled; not in bfloat16 pairs, which would round it */
    float score_factor;            /* scores are the products of `query` and keys times this: 1, or the scaling */
    float *query_terms[STAGES];    /* [rows, terms, heads] */
    float *maxima, *sums;          /* [blocks, heads, MAX_CHUNK]: of the scores of each tile, and their exponentials */
} chunk;

/* The keys that any of `count` queries of an item sees by position, from `first` on. */
static span seen_keys(const problem *given, long item, long first, long count) {
    long position = first + given->offset;
    span seen = {larger(position - given->behind, 0), smaller(position + count + given->ahead, given->keys)};
    if (given->first_keys) {
        long start = given->keys;
        for (long t = first; t < first + count; t++)
            start = smaller(start, given->first_keys[item * given->queries + t]);
        seen.begin = larger(seen.begin, start);
    }
    seen.begin = smaller(seen.begin, given->keys);
    seen.end = larger(seen.end, seen.begin);
    return seen;
}

/* The keys of `seen` that lie in a block, counted from its first key. */
INLINE span in_block(span seen, long block) {
    long first = block * BLOCK_KEYS;
    span part = {larger(seen.begin - first, 0), smaller(seen.end - first, BLOCK_KEYS)};
    return part.begin < part.end ? part : (span){0, 0};
}

typedef struct {
    long first, rows;
    span keys; /* whole registers */
} patch;

/* The patch of a tile that begins with group `*group`, which is advanced past it: neighbouring groups that see the same
   registers are one patch. */
static patch next_patch(const chunk *of, long *group, long block) {
    patch found = {*group * GROUP_QUERIES, 0, {0, 0}};
    for (; *group < of->groups; ++*group) {
        span keys = in_block(of->seen[*group], block);
        keys.begin = keys.begin / LANES * LANES, keys.end = (keys.end + LANES - 1) / LANES * LANES;
        if (found.rows && (keys.begin != found.keys.begin || keys.end != found.keys.end)) break;
        found.keys = keys;
        found.rows = smaller((*group + 1) * GROUP_QUERIES, of->rows) - found.first;
    }
    return found;
}

/* A loop over the patches `at` of a tile, without those that have no keys. The inner `for` runs at most once; it is
   there to declare `at`. */
#define EACH_PATCH(at, of, block)                          \
    for (long group_ = 0; group_ < (of)->groups;)          \
        for (patch at = next_patch(of, &group_, block), *once_ = &at; once_ && at.keys.begin < at.keys.end; once_ = 0)

INLINE long tile_size(const chunk *of) { return of->given->heads * of->rows * BLOCK_KEYS; }
INLINE long block_index(const chunk *of, long block) { return of->item * blocks_of(of->given) + block; }
INLINE float *tile_row(const chunk *of, float *tile, long h, long t) { return tile + (h * of->rows + t) * BLOCK_KEYS; }
INLINE float *statistic(const chunk *of, float *values, long block, long h) {
    return values + ((block - of->begin_block) * of->given->heads + h) * MAX_CHUNK;
}
INLINE map_view tile_view(const chunk *of, float *tile, long t) {
    return (map_view){tile_row(of, tile, 0, t), of->rows * BLOCK_KEYS, BLOCK_KEYS};
}

/* How many slots (see problem.h) one head of a query or output gradient takes. */
INLINE long row_slots(const problem *given) { return slots(given, padded_width(given)); }

/* Copies a chunk's part of a tensor to [heads, rows, row_slots]; rows beyond the queries, and slots beyond the width,
   are zero. */
static void read_rows(float *to, const heads_tensor *from, const chunk *of) {
    long size = row_slots(of->given);
    if (of->rows > of->queries || size > slots(of->given, of->given->width))
        memset(to, 0, sizeof(float) * of->given->heads * of->rows * size);
    for (long h = 0; h < of->given->heads; h++)
        for (long t = 0; t < of->queries; t++)
            read_head(to + (h * of->rows + t) * size, from, of->item, h, of->first + t, of->given);
}

static void read_query_terms(float *to, const terms_tensor *from, const chunk *of) {
    long heads = of->given->heads;
    memset(to, 0, sizeof(float) * of->rows * from->terms * heads);
    for (long t = 0; t < of->queries; t++)
        for (long term = 0; term < from->terms; term++, to += heads) {
            long start = of->item * from->item_stride + (of->first + t) * from->token_stride + term * from->term_stride;
            read_elements(to, from->data, from->type, start, from->head_stride, heads);
        }
}

/* Returns the blocks that a chunk sees, and writes the keys that each of its groups sees to `seen`. */
static span find_blocks(const problem *given, long item, long first, long rows, span *seen) {
    span blocks = {blocks_of(given), 0};
    for (long start = 0; start < rows; start += GROUP_QUERIES) {
        long count = smaller(smaller(rows - start, GROUP_QUERIES), given->queries - first - start);
        span keys = *seen++ = seen_keys(given, item, first + start, count);
        if (keys.begin == keys.end) continue;
        blocks.begin = smaller(blocks.begin, keys.begin / BLOCK_KEYS);
        blocks.end = larger(blocks.end, (keys.end + BLOCK_KEYS - 1) / BLOCK_KEYS);
    }
    return (span){smaller(blocks.begin, blocks.end), blocks.end};
}

INLINE long chunks_of(const problem *given) { return (given->queries + given->chunk - 1) / given->chunk; }
INLINE long rows_of(const problem *given, long first) {
    return (smaller(given->queries - first, given->chunk) + 1) / 2 * 2;
}

/* The most blocks that any chunk sees. */
static long find_most_blocks(const problem *given) {
    long most = 0;
    for (long item = 0; item < given->items; item++)
        for (long first = 0; first < given->queries; first += given->chunk) {
            span seen[MAX_GROUPS], blocks = find_blocks(given, item, first, rows_of(given, first), seen);
            most = larger(most, blocks.end - blocks.begin);
        }
    return most;
}

/* Describes the chunk of an item that begins with query `first`, and gives it room in the memory at `*next`. */
static chunk place_chunk(const problem *given, packed_keys packed, long most_blocks, long item, long first,
                         float **next) {
    chunk new = {.given = given, .packed = packed, .item = item, .first = first};
    new.queries = smaller(given->queries - first, given->chunk);
    new.rows = rows_of(given, first);
    new.groups = (new.rows + GROUP_QUERIES - 1) / GROUP_QUERIES;
    span blocks = find_blocks(given, item, first, new.rows, new.seen);
    new.begin_block = blocks.begin, new.end_block = blocks.end;
    new.query = take(next, given->heads * given->chunk * row_slots(given));
    for (int p = PRE; p < STAGES; p++) new.query_terms[p] = take(next, given->chunk * query_terms_size(given, p));
    new.maxima = take(next, most_blocks * given->heads * MAX_CHUNK);
    new.sums = take(next, most_blocks * given->heads * MAX_CHUNK);
    return new;
}

/* Copies a chunk's queries and their terms. */
static void read_queries(chunk *of, float scaling) {
    read_rows(of->query, &of->given->query, of);
    of->score_factor = takes_pairs(of->given) ? scaling : 1;
    if (!takes_pairs(of->given))
        for (long i = 0; i < of->given->heads * of->rows * row_slots(of->given); i++) of->query[i] *= scaling;
    for (int p = PRE; p < STAGES; p++) read_query_terms(of->query_terms[p], &of->given->stages[p].query, of);
}

/* tile = factor * rows * columns, for `rows` [heads, rows, row_slots] of queries or output gradients and the packed
   `columns` of the block's keys or values (see `packed_keys`). */
static void multiply_columns(const chunk *of, float *tile, const float *rows, const float *columns, float factor,
                             long block) {
    long size = row_slots(of->given), repeats = of->given->heads / of->given->kv_heads;
    columns += block_index(of, block) * columns_size(of->given);
    for (long h = 0; h < of->given->heads; h++)
        EACH_PATCH(at, of, block) {
            left_matrix left = {rows + (h * of->rows + at.first) * size, size, 1, takes_pairs(of->given)};
            multiply(tile_row(of, tile, h, at.first) + at.keys.begin, BLOCK_KEYS, left,
                     columns + h / repeats * column_size(of->given) + at.keys.begin, BLOCK_KEYS, at.rows,
                     at.keys.end - at.keys.begin, slots(of->given, of->given->width), factor);
        }
}

/* Room for one head of a tile in pairs; a single element where pairs are not used. */
typedef float pairs_of_tile[PAIRS ? MAX_CHUNK * BLOCK_KEYS / 2 : 1];

/* A head of a patch as the left side of a product that sums over its keys. Where products take pairs, it is written to
   `pairs`. */
static left_matrix queries_by_keys(const chunk *of, pairs_of_tile pairs, float *tile, long h, patch at) {
    float *row = tile_row(of, tile, h, at.first);
    if (!takes_pairs(of->given)) return (left_matrix){row + at.keys.begin, BLOCK_KEYS, 1, 0};
    for (long t = 0; t < at.rows; t++, row += BLOCK_KEYS)
        for (long s = at.keys.begin; s < at.keys.end; s += LANES)
            write_pairs(pairs + (t * BLOCK_KEYS + s) / 2, *(vec *)(row + s));
    return (left_matrix){pairs + at.keys.begin / 2, BLOCK_KEYS / 2, 1, 1};
}

/* Adds the product of a head of a tile and the packed `rows` of its block's keys or values (see `packed_keys`) to `out`
   [rows, padded_width]. */
static void add_rows(const chunk *of, float *out, float *tile, long h, const float *rows, long block) {
    long width = padded_width(of->given), repeats = of->given->heads / of->given->kv_heads;
    rows += block_index(of, block) * rows_size(of->given) + h / repeats * row_size(of->given);
    EACH_PATCH(at, of, block) {
        pairs_of_tile pairs;
        left_matrix left = queries_by_keys(of, pairs, tile, h, at);
        add_product(out + at.first * width, width, left, rows + slots(of->given, at.keys.begin) * width, width, at.rows,
                    width, slots(of->given, at.keys.end - at.keys.begin));
    }
}

/* Products of a matrix [even_heads, heads] with the maps of each query of a patch: [rows, even_heads, BLOCK_KEYS]. */
static void mix_heads(float *mixed, const chunk *of, map_view maps, const float *matrix, patch at) {
    long heads = of->given->heads, even = even_heads(of->given);
    for (long t = 0; t < at.rows; t++)
        multiply(mixed + t * even * BLOCK_KEYS + at.keys.begin, BLOCK_KEYS, (left_matrix){matrix, heads, 1, 0},
                 maps.data + t * maps.query_stride + at.keys.begin, maps.head_stride, even,
                 at.keys.end - at.keys.begin, heads, 1);
}

/* Copies a patch of maps. */
static void copy_maps(const chunk *of, map_view to, map_view from, patch at) {
    for (long h = 0; h < of->given->heads; h++)
        for (long t = 0; t < at.rows; t++)
            memcpy(to.data + h * to.head_stride + t * to.query_stride + at.keys.begin,
                   from.data + h * from.head_stride + t * from.query_stride + at.keys.begin,
                   sizeof(float) * (at.keys.end - at.keys.begin));
}

/* How many elements of scratch memory `compose_tile` and `stage_backward` need. */
INLINE long mixed_size(const problem *given) {
    return given->stages[PRE].matrix || given->stages[POST].matrix ? PART_QUERIES * even_heads(given) * BLOCK_KEYS : 0;
}

/* The rows of a patch, from `*row` on, that are composed at a time; `*row` is advanced past them. */
INLINE patch next_part(patch whole, const stage *by, long *row) {
    patch part = {whole.first + *row, by->matrix ? smaller(whole.rows - *row, PART_QUERIES) : whole.rows, whole.keys};
    *row += part.rows;
    return part;
}

/* What a composition, or its gradient, is without the terms of queries and keys: `maps` themselves or, with a static
   matrix, their product with it, which is written to `mixed`. */
static map_view mixed_part(float *mixed, const chunk *of, map_view maps, const float *matrix, patch at) {
    if (!matrix) return maps;
    mix_heads(mixed, of, maps, matrix, at);
    return (map_view){mixed, BLOCK_KEYS, even_heads(of->given) * BLOCK_KEYS};
}

/* Writes the composition of `tile` by stage `p` to `out`, which may be `tile`. */
static void compose_tile(const chunk *of, float *out, float *tile, int p, float *mixed, long block) {
    const stage *by = &of->given->stages[p];
    const float *keys = of->packed.key_terms[p] + block_index(of, block) * key_terms_size(of->given, p);
    if (!by->compose && !by->matrix && out == tile) return;
    EACH_PATCH(whole, of, block)
        for (long row = 0; row < whole.rows;) {
            patch at = next_part(whole, by, &row);
            map_view to = tile_view(of, out, at.first), maps = tile_view(of, tile, at.first);
            map_view base = mixed_part(mixed, of, maps, by->matrix, at);
            if (by->compose)
                by->compose(to, maps, base, of->query_terms[p] + at.first * query_terms_size(of->given, p), keys,
                            at.rows, at.keys.begin, at.keys.end);
            else
                copy_maps(of, to, base, at);
        }
}

#endif
