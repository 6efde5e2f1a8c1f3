/* The forward and the backward pass of attention with composed heads, each in one call.

   passes_native.py calls `forward_size` and `forward`, `backward_size` and `backward`; native_problem.py fills
   `problem`. */

#include "backward.h"

#define ALIGNMENT 16        /* elements of a cache line: memory of different threads shares none */
#define TASKS_OF_A_THREAD 4 /* so many that no thread waits long for the last task of another */

INLINE long aligned(long size) { return (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }
INLINE long most_rows(const problem *given) { return given->heads * given->chunk; }

/* How many items are worked on at a time: so many that all threads have tasks, if an item has `tasks` of them, and no
   more, so that what a task reads was written a short time ago and is still in the caches. */
INLINE long items_at_a_time(long tasks, long threads) {
    return 1 + (threads - 1) * TASKS_OF_A_THREAD / larger(tasks, 1);
}

typedef struct {
    const problem *given;
    packed_keys packed;
    long most_blocks;   /* that any chunk sees */
    float *out;         /* [items, queries, heads, width] */
    float *memory;      /* of all threads */
    long thread_memory; /* elements of one */
    float scaling;
} forward_pass;

/* Task: a chunk of queries, from scores to output, in the memory of one thread. The last queries come first: with
   causality they see the most keys, and threads finish together if the longest tasks begin first. */
static void attend_chunk(const void *context, long index, long thread) {
    const forward_pass *pass = context;
    const problem *given = pass->given;
    long item = index % given->items, first = (chunks_of(given) - 1 - index / given->items) * given->chunk;
    /* What `place_chunk` leaves of the thread's memory, from `next` on, holds the tiles. */
    float *next = pass->memory + thread * pass->thread_memory;
    float *out = take(&next, most_rows(given) * padded_width(given)), *mixed = take(&next, mixed_size(given));
    chunk of = place_chunk(given, pass->packed, pass->most_blocks, item, first, &next);
    read_queries(&of, pass->scaling);
    memset(out, 0, sizeof(float) * given->heads * of.rows * padded_width(given));
    for (long block = of.begin_block; block < of.end_block; block++) {
        float *tile = next + (block - of.begin_block) * tile_size(&of);
        multiply_columns(&of, tile, of.query, of.packed.key_columns, of.score_factor, block);
        add_bias(&of, tile, 1, block);
        compose_tile(&of, tile, tile, PRE, mixed, block);
        add_bias(&of, tile, 0, block);
        exponentiate(&of, tile, block);
    }
    for (long h = 0; h < given->heads; h++) find_factors(&of, h);
    for (long block = of.begin_block; block < of.end_block; block++) {
        float *tile = next + (block - of.begin_block) * tile_size(&of);
        normalize(&of, tile, block);
        multiply_gain(&of, tile, tile, block);
        compose_tile(&of, tile, tile, POST, mixed, block);
        for (long h = 0; h < given->heads; h++)
            add_rows(&of, out + h * of.rows * padded_width(given), tile, h, of.packed.value_rows, block);
    }
    for (long t = 0; t < of.queries; t++)
        for (long h = 0; h < given->heads; h++)
            memcpy(pass->out + ((item * given->queries + first + t) * given->heads + h) * given->width,
                   out + (h * of.rows + t) * padded_width(given), sizeof(float) * given->width);
}

static forward_pass place_forward(const problem *given, float *memory) {
    forward_pass pass = {.given = given, .most_blocks = find_most_blocks(given)};
    pass.packed = place_packed(given, &memory, 0);
    pass.memory = memory;
    float *thread = 0;
    take(&thread, most_rows(given) * padded_width(given) + mixed_size(given));
    place_chunk(given, pass.packed, pass.most_blocks, 0, 0, &thread);
    take(&thread, pass.most_blocks * most_rows(given) * BLOCK_KEYS);
    pass.thread_memory = aligned(taken(thread));
    return pass;
}

/* How many float32 elements of memory `forward` needs. */
long forward_size(const problem *given, long threads) {
    long together = items_at_a_time(chunks_of(given), threads), most = 0;
    for (long first = 0; first < given->items; first += together) {
        problem part = items_from(given, first, together);
        forward_pass pass = place_forward(&part, 0);
        most = larger(most, taken(pass.memory) + threads * pass.thread_memory);
    }
    return most;
}

/* Writes the output [items, queries, heads, width] to `out`; `memory` has `forward_size` elements. */
void forward(float *out, float *memory, const problem *given, float scaling, long threads) {
    long together = items_at_a_time(chunks_of(given), threads);
    for (long first = 0; first < given->items; first += together) {
        problem part = items_from(given, first, together);
        forward_pass pass = place_forward(&part, memory);
        pass.out = address(out, first * given->queries * given->heads * given->width, sizeof(float));
        pass.scaling = scaling;
        for_each_task(pack_block, &pass.packed, part.items * blocks_of(given), threads);
        for_each_task(attend_chunk, &pass, part.items * chunks_of(given), threads);
    }
}

static backward_pass place_backward(const problem *given, float *memory) {
    backward_pass pass = {.given = given, .most_blocks = find_most_blocks(given)};
    pass.chunks = (backward_chunk *)take(&memory, aligned(sizeof(backward_chunk) / sizeof(float) * given->items));
    pass.packed = place_packed(given, &memory, 1);
    pass.memory = memory;
    float *item = 0;
    place_backward_chunk(given, pass.packed, pass.most_blocks, 0, 0, &item);
    pass.item_memory = aligned(taken(item));
    long rows = most_rows(given) * BLOCK_KEYS + given->chunk * padded_width(given);
    pass.thread_memory = aligned(mixed_size(given) + rows + gained_size(given));
    return pass;
}

/* How many float32 elements of memory `backward` needs. */
long backward_size(const problem *given, long threads) {
    long together = items_at_a_time(find_most_blocks(given), threads), most = 0;
    for (long first = 0; first < given->items; first += together) {
        problem part = items_from(given, first, together);
        backward_pass pass = place_backward(&part, 0);
        most = larger(most, taken(pass.memory) + part.items * pass.item_memory + threads * pass.thread_memory);
    }
    return most;
}

/* Computes the gradients of all chunks of some items, one chunk of each item at a time. */
static void differentiate_items(backward_pass *pass, long threads) {
    const problem *given = pass->given;
    long blocks = given->items * pass->most_blocks;
    for_each_task(pack_block, &pass->packed, given->items * blocks_of(given), threads);
    for (pass->first = 0; pass->first < given->queries; pass->first += given->chunk) {
        begin_chunks(pass);
        for_each_task(repeat_scores, pass, blocks, threads);
        join_maxima(pass);
        for_each_task(differentiate_probs, pass, blocks, threads);
        join_gradients(pass);
        for_each_task(differentiate_scores, pass, blocks, threads);
        for_each_task(differentiate_queries, pass, given->items * given->heads, threads);
    }
}

/* Computes the gradients `to`; `memory` has `backward_size` elements. */
void backward(const gradients *to, float *memory, const problem *given, float scaling, long threads) {
    long together = items_at_a_time(find_most_blocks(given), threads);
    for (long first = 0; first < given->items; first += together) {
        problem part = items_from(given, first, together);
        backward_pass pass = place_backward(&part, memory);
        pass.to = gradients_from(to, first, given), pass.scaling = scaling;
        differentiate_items(&pass, threads);
    }
}
