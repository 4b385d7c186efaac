/* Products of bfloat16 matrices, added up in float.
 *
 * For processors with AVX512-BF16, one instruction of which adds two products to each of sixteen
 * sums; elsewhere this file is empty.
 *
 * Two numbers that go to the same sum lie side by side, as a pair. The right factor of a product
 * is laid out in panels, PANEL columns wide, pair after pair, so that it is read in order:
 *
 *      left [rows, 2 P]               right: panel 0         panel 1
 *      row 0  (p0)(p1) .. (pP)        p0: column 0 .. 63     p0: column 64 .. 127
 *      row 1  (p0)(p1) .. (pP)        p1: column 0 .. 63     p1: ..
 *      ...                            ..                     ..
 *
 * ROWS rows times one panel make a tile, whose sums stay in registers from the first pair to the
 * last: each vector of the panel that is loaded serves ROWS rows.
 */
#pragma once
#ifdef __AVX512BF16__

#include <immintrin.h>

#include "numbers.h"

#define SUMS 16 /* of a vector */
#define VECTORS 4
#define PANEL (SUMS * VECTORS)
#define ROWS 6
#define STRIPE (16 * ROWS) /* columns of a left factor that are laid out, or multiplied, at once */

typedef uint32_t pair;

/* Where a product's sums go, and how far it is from row to row there. */
typedef struct {
    const float *bias; /* a number for each column is added first, if it is not NULL; */
    bf16 *rounded;     /* then they go here, rounded, if it is not NULL, */
    float *sums;       /* else here, */
    int adds;          /* to what is there already, if this says so */
    int64_t stride;
} target;

/* Numbers of 4 bytes that panels of so many pairs and columns take. */
static inline int64_t panel_size(int64_t num_pairs, int64_t columns) {
    return num_pairs * round_up(columns, PANEL);
}

/* Pair some columns of numbers [rows, stride] with those below them; a row of pairs is `step` long. */
static inline void pair_down(pair *restrict to, const bf16 *x, int64_t rows, int64_t stride,
                             int64_t columns, int64_t step) {
    for (int64_t r = 0; r < rows; r += 2, to += step) {
        const bf16 *upper = x + r * stride, *lower = upper + stride;
        if (r + 1 < rows)
            for (int64_t c = 0; c < columns; c++) to[c] = upper[c] | (pair)lower[c] << 16;
        else
            for (int64_t c = 0; c < columns; c++) to[c] = upper[c];
        for (int64_t c = columns; c < step; c++) to[c] = 0;
    }
}

/* Panels of x [rows, k]: the numbers of a pair stand below each other. */
static inline void lay_rows_down(pair *to, const bf16 *x, int64_t rows, int64_t k) {
    for (int64_t first = 0; first < k; first += PANEL)
        pair_down(to + first * ((rows + 1) / 2), x + first, rows, k, least(k - first, PANEL), PANEL);
}

static inline __attribute__((always_inline)) void finish(const target *to, int64_t row,
                                                         int64_t column, int64_t columns,
                                                         const __m512 *sums) {
    for (int64_t v = 0; v < VECTORS && column < columns; v++, column += SUMS) {
        int64_t count = least(columns - column, SUMS), at = row * to->stride + column;
        __mmask16 mask = (__mmask16)((1u << count) - 1);
        __m512 sum = sums[v];
        if (to->bias) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, to->bias + column));
        if (to->rounded) {
            __m256i values = (__m256i)_mm512_cvtneps_pbh(sum);
            if (count == SUMS) _mm256_storeu_si256((__m256i *)(to->rounded + at), values);
            else memcpy(to->rounded + at, &values, count * sizeof(bf16));
        } else {
            if (to->adds) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, to->sums + at));
            if (count == SUMS) _mm512_storeu_ps(to->sums + at, sum);
            else memcpy(to->sums + at, &sum, count * sizeof(float));
        }
    }
}

static inline __attribute__((always_inline)) void tile(const target *to, int64_t row,
                                                       int64_t column, int64_t columns,
                                                       const pair *left, int64_t row_step,
                                                       int64_t pair_step, const pair *panel,
                                                       int64_t num_pairs, int rows) {
    __m512 sums[ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = _mm512_setzero_ps();
    for (int64_t p = 0; p < num_pairs; p++) {
        __m512bh right[VECTORS];
        for (int v = 0; v < VECTORS; v++)
            right[v] = (__m512bh)_mm512_loadu_si512(panel + p * PANEL + v * SUMS);
        for (int r = 0; r < rows; r++) {
            pair own;
            memcpy(&own, left + r * row_step + p * pair_step, sizeof own);
            for (int v = 0; v < VECTORS; v++)
                sums[r][v] =
                    _mm512_dpbf16_ps(sums[r][v], (__m512bh)_mm512_set1_epi32((int)own), right[v]);
        }
    }
    for (int r = 0; r < rows; r++) finish(to, row + r, column, columns, sums[r]);
}

/* Rows of a left factor times all panels of a right one. Pair p of row r of the left factor lies at
 * r * row_step + p * pair_step. */
static inline void multiply(target to, int64_t rows, int64_t columns, const pair *left,
                            int64_t row_step, int64_t pair_step, const pair *right,
                            int64_t num_pairs) {
    for (int64_t column = 0; column < columns; column += PANEL, right += num_pairs * PANEL)
        for (int64_t row = 0; row < rows; row += ROWS) {
            const pair *own = left + row * row_step;
#define TILE(n) tile(&to, row, column, columns, own, row_step, pair_step, right, num_pairs, n)
            switch (least(rows - row, ROWS)) {
                case 6: TILE(6); break;
                case 5: TILE(5); break;
                case 4: TILE(4); break;
                case 3: TILE(3); break;
                case 2: TILE(2); break;
                default: TILE(1);
            }
        }
}

#endif
