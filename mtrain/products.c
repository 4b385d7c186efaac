/* Products of bfloat16 matrices, added up in float: linear maps, their gradients, and the loss over
 * a vocabulary with its output projection. Weights are floats, and rounded on the way.
 *
 * For processors with AVX512-BF16, one instruction of which adds two products to each of sixteen
 * sums; elsewhere this file is empty, and products.py takes PyTorch's. One thread runs each call.
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
#ifdef __AVX512BF16__

#include <immintrin.h>

#include "numbers.h"

#define SUMS 16 /* of a vector */
#define VECTORS 4
#define PANEL (SUMS * VECTORS)
#define ROWS 6
#define STRIPE (16 * ROWS) /* columns of a left factor that are paired at once */
#define BLOCK 512          /* rows of a batch whose products are added up at once */
#define CHUNK 384          /* tokens whose logits are held at once */
#define DEPTH 1024         /* pieces whose share of a gradient is added up at once */

typedef uint32_t pair;

/* Where a product's sums go, and how far it is from row to row there. */
typedef struct {
    bf16 *rounded;     /* here, rounded, if it is not NULL, */
    const float *bias; /* after a number for each column is added, if it is not NULL; */
    float *sums;       /* else here, */
    int adds;          /* to what is there already, if this says so */
    int64_t stride;
} target;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Numbers of 4 bytes that panels of so many pairs and columns take. */
static inline int64_t panel_size(int64_t num_pairs, int64_t columns) {
    return num_pairs * round_up(columns, PANEL);
}

/* Panels of w^T for weights w [m, k]: the numbers of a pair are neighbours in a row of w. */
static void lay_across(pair *to, const float *w, int64_t m, int64_t k) {
    for (int64_t first = 0; first < m; first += PANEL, to += k / 2 * PANEL)
        for (int64_t c = 0; c < PANEL; c++) {
            const float *row = w + (first + c) * k;
            int is_there = first + c < m;
            for (int64_t p = 0; p < k / 2; p++)
                to[p * PANEL + c] =
                    is_there ? store_bf16(row[2 * p]) | (pair)store_bf16(row[2 * p + 1]) << 16 : 0;
        }
}

/* Panels of weights w [m, k]: the numbers of a pair stand below each other. */
static void lay_down(pair *to, const float *w, int64_t m, int64_t k) {
    for (int64_t first = 0; first < k; first += PANEL)
        for (int64_t r = 0; r < m; r += 2, to += PANEL) {
            const float *upper = w + r * k + first, *lower = upper + k;
            int64_t width = least(k - first, PANEL);
            for (int64_t c = 0; c < width; c++) to[c] = store_bf16(upper[c]);
            if (r + 1 < m)
                for (int64_t c = 0; c < width; c++) to[c] |= (pair)store_bf16(lower[c]) << 16;
            for (int64_t c = width; c < PANEL; c++) to[c] = 0;
        }
}

/* The same of some columns of states x, whose rows are `stride` apart; `step` pairs a row. */
static void pair_down(pair *restrict to, const bf16 *x, int64_t rows, int64_t stride,
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

static inline __attribute__((always_inline)) void finish(const target *to, int64_t row,
                                                         int64_t column, int64_t columns,
                                                         const __m512 *sums) {
    for (int64_t v = 0; v < VECTORS && column < columns; v++, column += SUMS) {
        int64_t count = least(columns - column, SUMS), at = row * to->stride + column;
        __mmask16 mask = (__mmask16)((1u << count) - 1);
        __m512 sum = sums[v];
        if (to->rounded) {
            if (to->bias) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, to->bias + column));
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
static void multiply(target to, int64_t rows, int64_t columns, const pair *left, int64_t row_step,
                     int64_t pair_step, const pair *right, int64_t num_pairs) {
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

static inline int64_t size_of_across(int64_t k) {
    return panel_size(BLOCK / 2, k) + BLOCK / 2 * STRIPE;
}

/* sums [m, k] = grad^T x, or that is added, for grad [n, m] with rows `stride` apart and x [n, k];
 * works in room of `size_of_across(k)`. */
static void multiply_across(float *sums, int adds, const bf16 *grad, int64_t stride, const bf16 *x,
                            int64_t n, int64_t k, int64_t m, pair *work) {
    pair *right = work, *left = work + panel_size(BLOCK / 2, k);
    for (int64_t start = 0; start < n; start += BLOCK) {
        int64_t rows = least(n - start, BLOCK), num_pairs = (rows + 1) / 2;
        for (int64_t first = 0; first < k; first += PANEL)
            pair_down(right + first * num_pairs, x + start * k + first, rows, k,
                      least(k - first, PANEL), PANEL);
        for (int64_t first = 0; first < m; first += STRIPE) {
            int64_t columns = least(m - first, STRIPE);
            pair_down(left, grad + start * stride + first, rows, stride, columns, STRIPE);
            target to = {NULL, NULL, sums + first * k, adds || start > 0, k};
            multiply(to, columns, k, left, 1, STRIPE, right, num_pairs);
        }
    }
}

/* Each function below returns 0, or 1 if the memory does not hold what it works with. */

/* out [n, m] = x w^T + bias for x [n, k] and w [m, k]; k is even. */
int linear_bf16(const bf16 *x, const float *w, const float *bias, bf16 *out, int64_t n, int64_t k,
                int64_t m) {
    pair *right = room(panel_size(k / 2, m));
    if (!right) return 1;
    lay_across(right, w, m, k);
    target to = {out, bias, NULL, 0, m};
    multiply(to, n, m, (const pair *)x, k / 2, 1, right, k / 2);
    free(right);
    return 0;
}

/* The gradients of linear; n is not 0, and m is even. */
int linear_grad_bf16(const bf16 *grad, const bf16 *x, const float *w, bf16 *grad_x, float *grad_w,
                     float *grad_bias, int64_t n, int64_t k, int64_t m) {
    pair *right = room(panel_size(m / 2, k) + size_of_across(k));
    if (!right) return 1;
    lay_down(right, w, m, k);
    target to = {grad_x, NULL, NULL, 0, k};
    multiply(to, n, k, (const pair *)grad, m / 2, 1, right, m / 2);
    multiply_across(grad_w, 0, grad, m, x, n, k, m, right + panel_size(m / 2, k));
    free(right);
    if (!grad_bias) return 0;
    memset(grad_bias, 0, m * sizeof(float));
    for (int64_t r = 0; r < n; r++)
        for (int64_t c = 0; c < m; c++) grad_bias[c] += load_bf16(grad[r * m + c]);
    return 0;
}

void cross_entropy_bf16(bf16 *logits, const int64_t *targets, int64_t rows, int64_t width,
                        int64_t stride, float smoothing, int with_grad, double *loss_and_nll);

/* Add up the loss and the negative log-likelihood of targets [n] under logits x w^T, for x [n, k]
 * and w [m, k], and find the gradients, if they are wanted; n is not 0, and k is even. */
int projected_cross_entropy_bf16(const bf16 *x, const float *w, const int64_t *targets,
                                 bf16 *grad_x, float *grad_w, int64_t n, int64_t k, int64_t m,
                                 float smoothing, double *loss_and_nll) {
    int64_t stride = m + m % 2; /* a row of logits is whole pairs */
    int64_t across_size = panel_size(k / 2, m), logits_size = CHUNK * stride / 2;
    int64_t down_size = panel_size(stride / 2, k), block_size = panel_size(DEPTH / 2, k);
    pair *across = room(across_size + down_size + CHUNK * k + size_of_across(k) + logits_size);
    if (!across) return 1;
    pair *down = across + across_size, *work = down + down_size;
    float *sums = (float *)(work + size_of_across(k));
    bf16 *logits = (bf16 *)(sums + CHUNK * k);
    memset(logits, 0, CHUNK * stride * sizeof *logits); /* what fills up a row stays 0 */
    lay_across(across, w, m, k);
    for (int64_t first = 0; grad_w && first < m; first += DEPTH)
        lay_down(down + first / DEPTH * block_size, w + first * k, least(m - first, DEPTH), k);
    for (int64_t start = 0; start < n; start += CHUNK) {
        int64_t rows = least(n - start, CHUNK);
        const bf16 *own = x + start * k;
        target to_logits = {logits, NULL, NULL, 0, stride};
        multiply(to_logits, rows, m, (const pair *)own, k / 2, 1, across, k / 2);
        cross_entropy_bf16(logits, targets + start, rows, m, stride, smoothing, grad_w != NULL,
                           loss_and_nll);
        if (!grad_w) continue;
        for (int64_t first = 0; first < m; first += DEPTH) {
            target to_sums = {NULL, NULL, sums, first > 0, k};
            multiply(to_sums, rows, k, (const pair *)(logits + first), stride / 2, 1,
                     down + first / DEPTH * block_size, (least(m - first, DEPTH) + 1) / 2);
        }
        for (int64_t i = 0; i < rows * k; i++) grad_x[start * k + i] = store_bf16(sums[i]);
        multiply_across(grad_w, start > 0, logits, stride, own, rows, k, m, work);
    }
    free(across);
    return 0;
}

#endif
