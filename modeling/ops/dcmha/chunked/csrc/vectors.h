/* Vectors of `LANES` float32 elements, one register each, and arithmetic on them.

   `FLOATS(n)` is the type of a vector of n elements (n a power of two up to 16), `TOTAL(n)` the function that sums its
   elements, and `LARGEST(n)` the one that returns the largest. Both halve the vector again and again. */

#ifndef DYNATTN_VECTORS_H
#define DYNATTN_VECTORS_H

#include <float.h>
#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define PASTE(name, lanes) name##lanes
#define FLOATS(lanes) PASTE(floats, lanes)
#define TOTAL(lanes) PASTE(total, lanes)
#define LARGEST(lanes) PASTE(largest, lanes)

/* Writes the halves of a vector, which have `half` elements each, to `low` and `high`. gcc has this function since
   version 12; earlier versions copy through memory, which takes longer. */
#if defined(__clang__) || __GNUC__ >= 12
#define HALVE(low, high, vector, half)                                                  \
    low = __builtin_shufflevector(vector, vector, PASTE(FIRST_, half));                 \
    high = __builtin_shufflevector(vector, vector, PASTE(NEXT_, half))
#define FIRST_1 0
#define FIRST_2 0, 1
#define FIRST_4 0, 1, 2, 3
#define FIRST_8 0, 1, 2, 3, 4, 5, 6, 7
#define NEXT_1 1
#define NEXT_2 2, 3
#define NEXT_4 4, 5, 6, 7
#define NEXT_8 8, 9, 10, 11, 12, 13, 14, 15
#else
#define HALVE(low, high, vector, half)                                                  \
    memcpy(&low, &vector, sizeof(low));                                                 \
    memcpy(&high, (char *)&vector + sizeof(low), sizeof(high))
#endif

#define DEFINE_VECTOR(lanes, half)                                                    \
    typedef int ints##lanes __attribute__((vector_size(4 * lanes), aligned(4)));      \
    typedef float floats##lanes __attribute__((vector_size(4 * lanes), aligned(4)));  \
    INLINE float total##lanes(floats##lanes vector) {                                 \
        floats##half low, high;                                                       \
        HALVE(low, high, vector, half);                                               \
        return total##half(low + high);                                               \
    }                                                                                 \
    INLINE float largest##lanes(floats##lanes vector) {                               \
        floats##half low, high;                                                       \
        HALVE(low, high, vector, half);                                               \
        ints##half greater = low > high;                                              \
        return largest##half(                                                         \
            (floats##half)(((ints##half)low & greater) | ((ints##half)high & ~greater))); \
    }

typedef float floats1 __attribute__((vector_size(4), aligned(4)));
typedef int ints1 __attribute__((vector_size(4), aligned(4)));
INLINE float total1(floats1 vector) { return vector[0]; }
INLINE float largest1(floats1 vector) { return vector[0]; }
DEFINE_VECTOR(2, 1)
DEFINE_VECTOR(4, 2)
DEFINE_VECTOR(8, 4)
DEFINE_VECTOR(16, 8)

INLINE long smaller(long a, long b) { return a < b ? a : b; }
INLINE long larger(long a, long b) { return a > b ? a : b; }

typedef FLOATS(LANES) vec;
typedef int int_vec __attribute__((vector_size(4 * LANES), aligned(4)));

/* exp(x) for x <= 0, within 2 units in the last place; 0 where exp(x) is below the smallest normal float32.
   Cody and Waite's range reduction (x = power * ln 2 + rest), then a polynomial in `rest`. */
INLINE vec exponential(vec x) {
    const float round = 12582912.0f; /* 1.5 * 2^23: adding and subtracting it rounds to an integer */
    int_vec tiny = x < (vec){0} - 87.33f;
    vec power = (x * 1.44269504088896341f + round) - round;
    vec rest = x - power * 0.693359375f + power * 2.12194440e-4f;
    vec sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * (rest * rest) + rest + 1.0f;
    int_vec exponent = (__builtin_convertvector(power, int_vec) + 127) << 23;
    return (vec)((int_vec)(sum * (vec)exponent) & ~tiny);
}

/* The larger of `a` and `b`, element by element; `b` where one of them is NaN. Compilers make one instruction of it. */
INLINE vec maximum(vec a, vec b) {
    vec larger = b;
    for (int i = 0; i < LANES; i++) larger[i] = a[i] > b[i] ? a[i] : b[i];
    return larger;
}

/* Maxima that can be subtracted from scores: zero instead of minus infinity, which is the maximum of hidden keys. */
INLINE vec finite_maxima(vec maxima) {
    int_vec none = maxima == (vec){0} - INFINITY;
    return (vec)((int_vec)maxima & ~none);
}

#endif
