/* The vectors of the C files written out in plain C, for processors that lack them: slow, and so that
 * their tests run on every machine. */
#pragma once

#include "../../mtrain/numbers.h"

typedef float __m512 __attribute__((vector_size(64)));
typedef uint32_t __m512i __attribute__((vector_size(64)));
typedef uint16_t __m512bh __attribute__((vector_size(64)));
typedef uint32_t __m256i __attribute__((vector_size(32)));
typedef uint16_t __m256bh __attribute__((vector_size(32)));
typedef uint16_t __mmask16;

#define _MM_FROUND_TO_NEG_INF 1
#define _MM_FROUND_NO_EXC 8

static inline __m512 _mm512_setzero_ps(void) { return (__m512){0}; }
static inline __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
static inline void _mm512_storeu_ps(float *to, __m512 a) { memcpy(to, &a, sizeof a); }
static inline void _mm256_storeu_si256(__m256i *to, __m256i a) { memcpy(to, &a, sizeof a); }

static inline __m512 _mm512_loadu_ps(const float *from) {
    __m512 a;
    memcpy(&a, from, sizeof a);
    return a;
}

static inline __m512 _mm512_set1_ps(float x) {
    __m512 a;
    for (int i = 0; i < 16; i++) a[i] = x;
    return a;
}

static inline __m512 _mm512_max_ps(__m512 a, __m512 b) {
    for (int i = 0; i < 16; i++) a[i] = a[i] > b[i] ? a[i] : b[i];
    return a;
}

/* What is left of each number above the integer below it. */
static inline __m512 _mm512_reduce_ps(__m512 a, int downwards) {
    (void)downwards;
    for (int i = 0; i < 16; i++) a[i] -= floorf(a[i]);
    return a;
}

static inline __m512 _mm512_scalef_ps(__m512 a, __m512 exponents) {
    for (int i = 0; i < 16; i++) a[i] *= exp2f(floorf(exponents[i]));
    return a;
}

static inline __m512i _mm512_cvtepu16_epi32(__m256i a) {
    uint16_t numbers[16];
    memcpy(numbers, &a, sizeof a);
    __m512i b;
    for (int i = 0; i < 16; i++) b[i] = numbers[i];
    return b;
}

static inline __m512i _mm512_slli_epi32(__m512i a, unsigned count) { return a << count; }
static inline __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
static inline void _mm512_storeu_si512(void *to, __m512i a) { memcpy(to, &a, sizeof a); }

static inline __m512i _mm512_loadu_si512(const void *from) {
    __m512i a;
    memcpy(&a, from, sizeof a);
    return a;
}

static inline __m512i _mm512_set1_epi32(int x) {
    __m512i a;
    for (int i = 0; i < 16; i++) a[i] = (uint32_t)x;
    return a;
}

static inline __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const float *from) {
    __m512 a = {0};
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) a[i] = from[i];
    return a;
}

static inline __m256bh _mm512_cvtneps_pbh(__m512 a) {
    __m256bh b = {0};
    for (int i = 0; i < 16; i++) b[i] = store_bf16(a[i]);
    return b;
}

static inline __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
    for (int i = 0; i < 32; i++) sums[i / 2] += load_bf16(a[i]) * load_bf16(b[i]);
    return sums;
}
