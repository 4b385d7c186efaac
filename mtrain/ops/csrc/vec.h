/* Numbers as the C files store and compute them, and room for them. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define ALIGNMENT 64 /* of a line of cache, and of the widest vector */

/* Floats of the widest vector: compilers keep wider ones in memory. */
#if defined __AVX512F__
#define LANES 16
#elif defined __AVX__
#define LANES 8
#else
#define LANES 4
#endif

/* In files that include themselves once for each type of storage, STORE: its functions, and how its
 * values become floats and are made of them. */
#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)
#define NAME(name) PASTE(name, STORE)
#define LOAD PASTE(load, STORE)
#define SAVE PASTE(store, STORE)

typedef uint16_t bf16;
typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef float four __attribute__((vector_size(16)));

/* What is multiplied at once: a float each, or two numbers in bfloat16 side by side. */
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

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

/* More for sums of products, of one word with each of others. */
static inline lanes add_float(lanes sums, uint32_t word, words others) {
    return sums + bits_to_float(word) * (lanes)others;
}

static inline lanes add_bf16(lanes sums, uint32_t word, words others) {
#if defined __AVX512BF16__ && LANES == 16
    words same = word - (words){0};
    return (lanes)_mm512_dpbf16_ps((__m512)sums, (__m512bh)same, (__m512bh)others);
#else
    sums += load_bf16((bf16)word) * (lanes)(others << 16);
    return sums + load_bf16((bf16)(word >> 16)) * (lanes)(others >> 16 << 16);
#endif
}

/* A vector in bfloat16. */
static inline halves round_lanes(lanes x) {
#if defined __AVX512BF16__ && LANES == 16
    return (halves)_mm512_cvtneps_pbh((__m512)x);
#else
    words bits = (words)x;
    return __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, halves);
#endif
}

static inline words widened(halves x) {
#if LANES == 16
    return (words)_mm512_cvtepu16_epi32((__m256i)x);
#else
    return __builtin_convertvector(x, words);
#endif
}

/* Vectors as they are stored, as they are once stored, and two of those in one of words. */
static inline void save_whole_float(float *to, lanes x) { memcpy(to, &x, sizeof x); }
static inline void save_whole_bf16(bf16 *to, lanes x) {
    halves rounded = round_lanes(x);
    memcpy(to, &rounded, sizeof rounded);
}
static inline lanes rounded_float(lanes x) { return x; }
static inline lanes rounded_bf16(lanes x) { return (lanes)(widened(round_lanes(x)) << 16); }
static inline words stacked_float(lanes x, lanes below) {
    (void)below; /* a float fills a word */
    return (words)x;
}
static inline words stacked_bf16(lanes x, lanes below) { return (words)x >> 16 | (words)below; }

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

/* Room for so many numbers of 4 bytes, from where whole vectors are loaded: one that lies across two
 * lines of cache costs two. NULL if there is none. */
static inline void *room(int64_t count) {
    return aligned_alloc(ALIGNMENT, round_up(4 * count, ALIGNMENT));
}

/* e^x for x <= 0, to about one unit in the last place; 0 below the smallest normal number. */
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
    float result = power * bits_to_float((uint32_t)((int32_t)whole + 127) << 23);
    return x < -87.0f ? 0.0f : result;
}

/* Whether element `index` survives dropout: 16 of the bits of a hash of seed and index. */
static inline int survives(uint32_t index, uint32_t seed, uint32_t cut) {
    uint32_t hash = index * 0x9e3779b1u ^ seed;
    hash = (hash ^ (hash >> 16)) * 0x85ebca6bu;
    hash = (hash ^ (hash >> 13)) * 0xc2b2ae35u;
    return (hash >> 16) >= cut;
}

static inline float kept(float x, uint32_t index, uint32_t seed, uint32_t cut, float scale) {
    return survives(index, seed, cut) ? x * scale : 0.0f;
}

static inline float sum_of(lanes x) {
    four parts[LANES / 4];
    memcpy(parts, &x, sizeof x);
    for (int half = LANES / 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return (parts[0][0] + parts[0][1]) + (parts[0][2] + parts[0][3]);
}

static inline float dot(const float *a, const float *b, int64_t n) {
    lanes sums = {0}, left, right;
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
