/* Elements of float32, bfloat16 and float16 as float32 elements, and back. */

#ifndef DYNATTN_ELEMENTS_H
#define DYNATTN_ELEMENTS_H

#include "vectors.h"

/* The types, by the numbers that native_problem.py has for them. */
enum { FLOAT32, BFLOAT16, FLOAT16 };
INLINE long element_size(long type) { return type == FLOAT32 ? 4 : 2; }

/* Converts bit patterns of float16 elements, in unsigned integers of 32 bits, to those of float32 elements; `floats`
   and `integers` are types of vectors or of single elements. Moved by 13 bits, exponent and fraction are where float32
   has them. The exponent is then too small by 112, the difference of both biases (127 - 15), and a product with 2^112
   corrects it; the product also makes subnormal elements normal. After `torch.set_flush_denormal(True)` they become
   zero: telling them apart takes a third more time in a decoding step. */
#define WIDEN_FLOAT16(floats, integers, half)                                                        \
    ({                                                                                               \
        integers half_ = (half), wider_ = (half_ & 0x7fffu) << 13, value_;                           \
        floats number_;                                                                              \
        memcpy(&number_, &wider_, sizeof(number_));                                                  \
        number_ *= 0x1p112f;                                                                         \
        memcpy(&value_, &number_, sizeof(value_));                                                   \
        /* infinities and NaN, whose exponent has all bits set */                                    \
        integers special_ = ((half_ & 0x7c00u) + 0x400u) >> 15;                                      \
        value_ | (half_ & 0x8000u) << 16 | special_ * 0x7f800000u;                                   \
    })

INLINE float float_of(unsigned bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

INLINE unsigned bits_of(float value) {
    unsigned bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

/* Reads `count` elements that lie `stride` apart, from index `start` on. */
static inline void read_elements(float *to, const void *from, long type, long start, long stride, long count) {
    const unsigned short *halves = (const unsigned short *)from + (type == FLOAT32 ? 0 : start);
    if (type == FLOAT32)
        for (long i = 0; i < count; i++) to[i] = ((const float *)from)[start + i * stride];
    else if (type == BFLOAT16)
        for (long i = 0; i < count; i++) to[i] = float_of((unsigned)halves[i * stride] << 16);
    else
        for (long i = 0; i < count; i++) to[i] = float_of(WIDEN_FLOAT16(float, unsigned, halves[i * stride]));
}

/* The two functions below round to the nearest element, and to an even one if two are equally near. */
INLINE unsigned short to_bfloat16(float from) {
    unsigned bits = bits_of(from);
    return from != from ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

INLINE unsigned short to_float16(float from) {
    unsigned bits = bits_of(from), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (from != from) return sign | 0x7e00;
    if (size >= bits_of(65520.0f)) return sign | 0x7c00; /* nearer to 65536 than to the largest element: infinity */
    /* Above 0.5 float32 elements are 2^-24 apart, as are subnormal float16 elements, so adding 0.5 rounds to those. */
    if (size < bits_of(0x1p-14f)) return sign | (bits_of(float_of(size) + 0.5f) - bits_of(0.5f));
    /* Rounds 13 bits of the fraction away, and moves the exponent from bias 127 to bias 15. */
    return sign | (((size + 0xfff + (size >> 13 & 1)) >> 13) - (112 << 10));
}

#endif
