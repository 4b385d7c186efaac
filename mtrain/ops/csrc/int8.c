/* Linear maps of decoding with weights in int8 from -127 to 127, inputs and outputs in float:
 *
 *      x [n, k] -> q = round(x / s), s = max |x| / 127 of each row -> out = (q w^T) s scale + bias
 *
 * q w^T is exact. One multiply-add takes a k-group, four neighbours in k, of a row of q, and the same
 * of LANES columns of w^T (the layout that vpdpbusd reads).
 */
#ifndef BF16

#include "vec.h"

typedef int32_t vec_i32 __attribute__((vector_size(4 * LANES)));

#define GROUP 4       /* int8 numbers in a k-group */
#define LARGEST 127.0f
#define SMALLEST 1e-30f /* a row is rounded to 0 if its greatest |x| is below this */

/* sums + the dot products of the k-group `group` with each k-group of `others`. vpdpbusd of AVX512-VNNI reads
 * `group` as unsigned: OFFSET is added to its numbers, and OFFSET times the sums of w is subtracted
 * at the end. */
#if defined __AVX512VNNI__ && LANES == 16
#define OFFSET 128

static inline vec_float multiply_add(vec_float sums, uint32_t group, vec_u32 others) {
    __m512i same = _mm512_set1_epi32((int32_t)group);
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(same), "v"(others)); /* gcc 12 spills the intrinsic's sums */
    return sums;
}
#else
#define OFFSET 0
#ifdef __AVX2__
#include <immintrin.h>

static inline __m256i add_products(__m256i sums, __m256i same, __m256i others) {
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(same), _mm256_sign_epi8(others, same));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

static inline vec_float multiply_add(vec_float sums, uint32_t group, vec_u32 others) {
    __m256i same = _mm256_set1_epi32((int32_t)group), total[LANES / 8], right[LANES / 8];
    memcpy(total, &sums, sizeof total);
    memcpy(right, &others, sizeof right);
    for (int i = 0; i < LANES / 8; i++) total[i] = add_products(total[i], same, right[i]);
    memcpy(&sums, total, sizeof sums);
    return sums;
}
#else
static inline vec_float multiply_add(vec_float sums, uint32_t group, vec_u32 others) {
    vec_i32 total = (vec_i32)sums;
    for (int i = 0; i < GROUP; i++)
        total += (int8_t)(group >> 8 * i) * ((vec_i32)(others << (24 - 8 * i)) >> 24);
    return (vec_float)total;
}
#endif
#endif

#ifdef __AMX_INT8__
#define MULTIPLY_TILES _tile_dpbusd /* reads the left factor as unsigned, too */
#endif
#define MUL_ADD multiply_add
#define SUMS_TO_FLOAT(to, row, column, sums) scaled(to, row, column, (vec_i32)(sums))

struct gemm_out;
static inline vec_float scaled(const struct gemm_out *to, int64_t row, int64_t column, vec_i32 sums);

#include "gemm.h"
#include "int8.h"

static inline vec_float scaled(const gemm_out *to, int64_t row, int64_t column, vec_i32 sums) {
    vec_i32 added;
    vec_float scale;
    memcpy(&added, to->column_sums + column, sizeof added);
    memcpy(&scale, to->column_scales + column, sizeof scale);
    return __builtin_convertvector(sums - OFFSET * added, vec_float) * (to->row_scales[row] * scale);
}

const int64_t fast_int8_float = OFFSET != 0;

/* Quantise x [k] to q [stride], zero-padded; return the scale s, NaN if a number of x is not finite. `error`,
 * if not NULL, becomes the length of the rounding error, or a bound of it. */
static float quantise(const float *x, uint8_t *q, float *error, int64_t k, int64_t stride) {
    float most = 0.0f, zero = 0.0f, changed = 0.0f;
#pragma omp simd reduction(max : most) reduction(+ : zero)
    for (int64_t i = 0; i < k; i++) {
        float size = fabsf(x[i]);
        most = size > most ? size : most;
        zero += 0.0f * x[i];
    }
    int is_zero = zero != zero || most < SMALLEST;
    float scale = is_zero ? zero : most / LARGEST, inverse = is_zero ? 0.0f : LARGEST / most;
    if (is_zero) memset(q, OFFSET, k);
    else
#pragma omp simd reduction(+ : changed)
        for (int64_t i = 0; i < k; i++) {
            float rounded = rintf(x[i] * inverse), rest = x[i] - rounded * scale;
            q[i] = (uint8_t)((int32_t)rounded + OFFSET);
            changed += rest * rest;
        }
    memset(q + k, OFFSET, stride - k);
    if (error) *error = sqrtf(changed) + (is_zero ? SMALLEST * (float)k : 0.0f);
    return scale;
}

status multiply_int8(const linear_map *map, const float *x, float *out, float *errors, int64_t n, int64_t k,
                     int64_t m, int apply_relu) {
    int64_t stride = round_up(k, GROUP);
    float *scales = alloc_floats(n * (1 + stride / GROUP));
    if (!scales) return OPS_NO_MEMORY;
    uint8_t *q = (uint8_t *)(scales + n);
    for (int64_t r = 0; r < n; r++)
        scales[r] = quantise(x + r * k, q + r * stride, errors ? errors + r : NULL, k, stride);
    gemm_out to = {.bias = map->bias, .sums = out, .stride = m, .apply_relu = apply_relu,
                   .row_scales = scales, .column_scales = map->scales, .column_sums = map->sums};
    gemm(to, n, m, q, stride / GROUP, 1, map->packed, stride / GROUP);
    free(scales);
    return OPS_OK;
}

#endif
