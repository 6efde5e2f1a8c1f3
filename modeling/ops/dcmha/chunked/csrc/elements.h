/* Elements of float32, bfloat16 and float16 as float32 elements, and back. */

#ifndef DYNATTN_ELEMENTS_H
#define DYNATTN_ELEMENTS_H

#include "vectors.h"

/* What native_problem.py calls the types. */
enum { FLOAT32, BFLOAT16, FLOAT16 };

/* The bit patterns `half` of float16 elements, in unsigned integers of 32 bits, as those of float32 elements; for
   vectors and for single elements. A product moves the exponent from one bias to the other, and makes subnormal elements
   normal. `floats` and `integers` are the types of both. */
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

/* Both round to the nearest element, and to an even one if two are equally near. */
INLINE unsigned short to_bfloat16(float from) {
    unsigned bits = bits_of(from);
    return from != from ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

INLINE unsigned short to_float16(float from) {
    unsigned bits = bits_of(from), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (from != from) return sign | 0x7e00;
    if (size >= bits_of(65520.0f)) return sign | 0x7c00;
    /* Elements of a float32 number around 0.5 are as far apart as subnormal elements of float16. */
    if (size < bits_of(0x1p-14f)) return sign | (bits_of(float_of(size) + 0.5f) - bits_of(0.5f));
    return sign | (((size + 0xfff + (size >> 13 & 1)) >> 13) - (112 << 10));
}

#endif
