/* Pairs of bfloat16 elements in slots of 32 bits, and products of them that are summed in float32.

   Processors with AVX512-BF16 multiply both elements of a slot at once, twice as many as float32 elements. PAIRS is 1
   where pairs are used; on other processors, for tests, plain C does the same. */

#ifndef DYNATTN_PAIRS_H
#define DYNATTN_PAIRS_H

#include "elements.h"

#ifndef PAIRS
#ifdef __AVX512BF16__
#define PAIRS 1
#else
#define PAIRS 0
#endif
#endif

INLINE int_vec repeat_slot(const float *slot) {
    int bits;
    memcpy(&bits, slot, sizeof(bits));
    return (int_vec){0} + bits;
}

/* Both variants define the same functions:
   `add_pairs` returns sums + the product of the pairs `slots` and the pair `slot`, whose two elements are added up.
   `write_pairs` writes the elements of a vector, rounded, as LANES / 2 pairs of neighbours.
   `write_pairs_of_two` writes the elements of two vectors, rounded, as LANES pairs of one of each. */
#ifdef __AVX512BF16__
#include <immintrin.h>

INLINE vec add_pairs(vec sums, vec slots, const float *slot) {
    return (vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)slots, (__m512bh)repeat_slot(slot));
}

INLINE void write_pairs(float *to, vec elements) {
    __m256bh pairs = _mm512_cvtneps_pbh((__m512)elements);
    memcpy(to, &pairs, sizeof(pairs));
}

INLINE void write_pairs_of_two(float *to, vec first, vec second) {
    const __m512i places = (__m512i)(short __attribute__((vector_size(64)))){
        0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31,
    };
    __m512i pairs = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    pairs = _mm512_permutexvar_epi16(places, pairs);
    memcpy(to, &pairs, sizeof(pairs));
}

#else

INLINE vec add_pairs(vec sums, vec slots, const float *slot) {
    int_vec left = (int_vec)slots, right = repeat_slot(slot), high = (int_vec){0} - 0x10000;
    return sums + (vec)(left << 16) * (vec)(right << 16) + (vec)(left & high) * (vec)(right & high);
}

INLINE void write_pairs(float *to, vec elements) {
    unsigned short pairs[LANES];
    for (int i = 0; i < LANES; i++) pairs[i] = to_bfloat16(elements[i]);
    memcpy(to, pairs, sizeof(pairs));
}

INLINE void write_pairs_of_two(float *to, vec first, vec second) {
    unsigned short pairs[LANES][2];
    for (int i = 0; i < LANES; i++) pairs[i][0] = to_bfloat16(first[i]), pairs[i][1] = to_bfloat16(second[i]);
    memcpy(to, pairs, sizeof(pairs));
}

#endif

#endif
