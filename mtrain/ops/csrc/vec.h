/* Element types, vectors, and the scalar functions that all files share: conversion to and from
 * bfloat16, transposition, aligned memory, exp, dropout masks, sums and dot products. */
#pragma once

#include "ops.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined __AVX512F__
#include <immintrin.h>
#elif defined __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#include <arm_neon.h>
#endif

#define ALIGNMENT 64 /* bytes of a cache line, and of the widest vector */

/* The number of floats in the widest vector register. */
#if defined __AVX512F__
#define LANES 16
#elif defined __AVX__
#define LANES 8
#else
#define LANES 4
#endif

#define K_GROUP (4 / (int64_t)sizeof(elem)) /* values in a k-group, the operand of one multiply-add */

typedef float vec_float __attribute__((vector_size(4 * LANES)));
typedef uint16_t vec_half __attribute__((vector_size(2 * LANES)));
typedef float vec_float4 __attribute__((vector_size(16)));

/* A vector of 32-bit k-groups, each one float or a pair of bfloat16. */
typedef uint32_t vec_u32 __attribute__((vector_size(4 * LANES)));

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

static inline float bf16_to_float(bf16 x) { return bits_to_float((uint32_t)x << 16); }

static inline vec_u32 widen(vec_half x) {
#if LANES == 16
    return (vec_u32)_mm512_cvtepu16_epi32((__m256i)x);
#else
    return __builtin_convertvector(x, vec_u32);
#endif
}

/* Round a vector of floats to bfloat16, to the nearest, ties to even; NaN stays NaN. */
static inline vec_half round_to_half(vec_float x) {
#if defined __AVX512BF16__ && LANES == 16
    return (vec_half)_mm512_cvtneps_pbh((__m512)x);
#elif defined __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
    return (vec_half)vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)x));
#else
    vec_u32 bits = (vec_u32)x, is_nan = (vec_u32)(x != x);
    vec_u32 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), vec_half);
#endif
}

/* Round floats x [n] to bfloat16. */
static inline void round_floats(const float *x, bf16 *to, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        int64_t size = n - i < LANES ? n - i : LANES;
        vec_float whole = {0};
        memcpy(&whole, x + i, size * sizeof *x);
        vec_half rounded = round_to_half(whole);
        memcpy(to + i, &rounded, size * sizeof *to);
    }
}

/*      load, save    convert an element to float, and a float to an element
 *      mul_add       sums + the dot products of one k-group with each k-group of a vector
 *      store_full    store a vector of floats as elements
 *      round_trip    round a vector of floats to elements and back
 *      pair          pack two rounded vectors, of rows k and k + 1, into k-groups
 */
#ifdef BF16
static inline float load(elem x) { return bf16_to_float(x); }

static inline elem save(float x) {
    uint32_t bits = float_to_bits(x), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (elem)(x != x ? 0x7fc0 : rounded);
}

static inline vec_float mul_add(vec_float sums, uint32_t group, vec_u32 others) {
#if defined __AVX512BF16__ && LANES == 16
    vec_u32 same = group - (vec_u32){0};
    return (vec_float)_mm512_dpbf16_ps((__m512)sums, (__m512bh)same, (__m512bh)others);
#elif defined __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
    bfloat16x8_t same = vreinterpretq_bf16_u32(vdupq_n_u32(group));
    return (vec_float)vbfdotq_f32((float32x4_t)sums, same, vreinterpretq_bf16_u32((uint32x4_t)others));
#else
    sums += bf16_to_float((bf16)group) * (vec_float)(others << 16);
    return sums + bf16_to_float((bf16)(group >> 16)) * (vec_float)(others >> 16 << 16);
#endif
}

static inline void store_full(elem *to, vec_float x) {
    vec_half rounded = round_to_half(x);
    memcpy(to, &rounded, sizeof rounded);
}

static inline vec_float round_trip(vec_float x) { return (vec_float)(widen(round_to_half(x)) << 16); }

static inline vec_u32 pair(vec_float x, vec_float below) { return (vec_u32)x >> 16 | (vec_u32)below; }
#else
static inline float load(elem x) { return x; }

static inline elem save(float x) { return x; }

static inline vec_float mul_add(vec_float sums, uint32_t group, vec_u32 others) {
    return sums + bits_to_float(group) * (vec_float)others;
}

static inline void store_full(elem *to, vec_float x) { memcpy(to, &x, sizeof x); }

static inline vec_float round_trip(vec_float x) { return x; }

static inline vec_u32 pair(vec_float x, vec_float below) {
    (void)below; /* a float fills a k-group */
    return (vec_u32)x;
}
#endif

/* Interleave the low halves of two vectors, or their high halves. */
#if LANES == 16
#define ALTERNATE(f) f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)
#elif LANES == 8
#define ALTERNATE(f) f(0), f(1), f(2), f(3)
#else
#define ALTERNATE(f) f(0), f(1)
#endif
#define LOW_HALF(i) i, i + LANES
#define HIGH_HALF(i) i + LANES / 2, i + LANES / 2 + LANES
#ifdef __clang__
#define ZIP(a, b, half) __builtin_shufflevector(a, b, ALTERNATE(half))
#else
#define ZIP(a, b, half) __builtin_shuffle(a, b, (vec_u32){ALTERNATE(half)})
#endif

/* Transpose a square of 32-bit numbers in place. Interleaving row i with row i + LANES / 2 rotates the
 * bits of each number's (row, column) by one; log2(LANES) times exchange row and column. */
static inline void transpose(vec_u32 *rows) {
    vec_u32 zipped[LANES];
    for (int size = 1; size < LANES; size *= 2) {
        for (int i = 0; i < LANES / 2; i++) {
            zipped[2 * i] = ZIP(rows[i], rows[i + LANES / 2], LOW_HALF);
            zipped[2 * i + 1] = ZIP(rows[i], rows[i + LANES / 2], HIGH_HALF);
        }
        memcpy(rows, zipped, sizeof zipped);
    }
}

static inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

/* Whether all ids [n] are from 0 to limit - 1. */
static inline int all_below(const int64_t *ids, int64_t n, int64_t limit) {
    for (int64_t i = 0; i < n; i++)
        if ((uint64_t)ids[i] >= (uint64_t)limit) return 0;
    return 1;
}

/* Allocate `count` numbers of 4 bytes, aligned to a cache line; NULL if there is no memory. */
static inline void *alloc_floats(int64_t count) {
    return aligned_alloc(ALIGNMENT, round_up(4 * count + !count, ALIGNMENT));
}

/* e^x for x <= 0, to about one unit in the last place; 0 for x < -87; NaN stays NaN. */
static inline float exp_(float x) {
    float bounded = x < -87.0f ? -87.0f : x;
    float whole = rintf(bounded * 1.44269504f);
    float rest = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;
    float power = 1.9875691500e-4f;
    power = power * rest + 1.3981999507e-3f;
    power = power * rest + 8.3334519073e-3f;
    power = power * rest + 4.1665795894e-2f;
    power = power * rest + 1.6666665459e-1f;
    power = power * rest + 5.0000001201e-1f;
    power = power * rest * rest + rest + 1.0f;
    uint32_t shifted = float_to_bits(whole + 12582912.0f); /* 1.5 times 2^23: its low bits are `whole` */
    float result = power * bits_to_float((shifted + 127) << 23);
    return x < -87.0f ? 0.0f : result;
}

/* Whether dropout keeps element `index`: a 16-bit hash of seed and index is not below `cut`. */
static inline int is_kept(uint32_t index, uint32_t seed, uint32_t cut) {
    uint32_t hash = index * 0x9e3779b1u ^ seed;
    hash = (hash ^ (hash >> 16)) * 0x85ebca6bu;
    hash = (hash ^ (hash >> 13)) * 0xc2b2ae35u;
    return (hash >> 16) >= cut;
}

static inline float apply_dropout(float x, uint32_t index, uint32_t seed, uint32_t cut, float scale) {
    return is_kept(index, seed, cut) ? x * scale : 0.0f;
}

static inline float sum_of(vec_float x) {
    vec_float4 parts[LANES / 4];
    memcpy(parts, &x, sizeof x);
    for (int half = LANES / 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return (parts[0][0] + parts[0][1]) + (parts[0][2] + parts[0][3]);
}

static inline float dot(const float *a, const float *b, int64_t n) {
    vec_float sums = {0}, left, right;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        memcpy(&left, a + i, sizeof left);
        memcpy(&right, b + i, sizeof right);
        sums += left * right;
    }
    float total = sum_of(sums);
    for (; i < n; i++) total += a[i] * b[i];
    return total;
}
