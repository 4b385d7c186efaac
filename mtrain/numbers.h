/* Numbers as the C files store and compute them, and room for them. */
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ALIGNMENT 64 /* of a line of cache, and of the widest vector */

/* Floats of the widest vector: compilers keep wider ones in memory. */
#if defined __AVX512F__
#define LANES 16
#elif defined __AVX__
#define LANES 8
#else
#define LANES 4
#endif

typedef uint16_t bf16;
typedef float lanes __attribute__((vector_size(4 * LANES)));

static inline float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float load_bf16(bf16 x) { return bits_to_float((uint32_t)x << 16); }

static inline bf16 store_bf16(float x) { /* to the nearest, ties to even */
    uint32_t bits = float_to_bits(x);
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float load_float(float x) { return x; }
static inline float store_float(float x) { return x; }

static inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

/* Room for so many numbers of 4 bytes, from where whole vectors are loaded: one that lies across two
 * lines of cache costs two. NULL if there is none. */
static inline void *room(int64_t count) {
    return aligned_alloc(ALIGNMENT, round_up(4 * count, ALIGNMENT));
}
