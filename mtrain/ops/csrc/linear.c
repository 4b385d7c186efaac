/* Linear maps and their gradients. Inputs are float or bfloat16, STORE; weights are floats, and
 * rounded on the way.
 *
 * One thread runs each call, which returns 0, or 1 if the memory does not hold what it works with.
 * The file includes itself once for each type of storage.
 */
#ifndef STORE

#include "gemm.h"

/* Whether our products are faster than PyTorch's, as far as that was measured. */
#if defined __AVX512BF16__ && LANES == 16
const int64_t fast_matmul_bf16 = 1;
#else
const int64_t fast_matmul_bf16 = 0;
#endif
#if defined __x86_64__ && LANES > 4
const int64_t fast_matmul_float = 1;
#else
const int64_t fast_matmul_float = 0;
#endif

#define BLOCK 512 /* rows of a batch whose products are added up at once */

#define STORE bf16
#include "linear.c"
#undef STORE
#define STORE float
#include "linear.c"
#undef STORE

#else
#include "gemm.h"

/* A word of some numbers that are `step` apart, of which `count` are there. */
static inline uint32_t NAME(word_of)(const float *numbers, int64_t step, int64_t count) {
    STORE rounded[SIZE] = {0};
    uint32_t word;
    for (int64_t i = 0; i < SIZE && i < count; i++) rounded[i] = SAVE(numbers[i * step]);
    memcpy(&word, rounded, sizeof word);
    return word;
}

/* Panels of w^T for weights w [m, k]: the numbers of a word are neighbours in a row of w. */
static void NAME(lay_weights_across)(uint32_t *to, const float *w, int64_t m, int64_t k) {
    for (int64_t first = 0; first < m; first += PANEL, to += k / SIZE * PANEL)
        for (int64_t c = 0; c < PANEL; c++)
            for (int64_t i = 0; i < k; i += SIZE)
                to[i / SIZE * PANEL + c] =
                    first + c < m ? NAME(word_of)(w + (first + c) * k + i, 1, SIZE) : 0;
}

/* Panels of weights w [m, k]: the numbers of a word stand below each other. */
static void NAME(lay_weights_down)(uint32_t *to, const float *w, int64_t m, int64_t k) {
    for (int64_t first = 0; first < k; first += PANEL)
        for (int64_t r = 0; r < m; r += SIZE, to += PANEL)
            for (int64_t c = 0; c < PANEL; c++)
                to[c] = first + c < k ? NAME(word_of)(w + r * k + first + c, k, m - r) : 0;
}

/* out [n, m] = x w^T + bias for x [n, k] and w [m, k], or the greater of this and 0; k is whole
 * words. */
int NAME(linear)(const STORE *x, const float *w, const float *bias, STORE *out, int64_t n, int64_t k,
                 int64_t m, int rectifies) {
    uint32_t *right = room(panel_size(k / SIZE, m));
    if (!right) return 1;
    NAME(lay_weights_across)(right, w, m, k);
    target to = {.bias = bias, .stored = out, .stride = m, .rectifies = rectifies};
    NAME(multiply)(to, n, m, x, k / SIZE, 1, right, k / SIZE);
    free(right);
    return 0;
}

/* The gradients of linear, without those of what made x if that `is_rectified` and 0; n is not 0, and
 * m is whole words. */
int NAME(linear_grad)(const STORE *grad, const STORE *x, const float *w, STORE *grad_x,
                      float *grad_w, float *grad_bias, int64_t n, int64_t k, int64_t m,
                      int is_rectified) {
    int64_t down_size = panel_size(m / SIZE, k), states_size = panel_size(BLOCK / SIZE, k);
    uint32_t *down = room(down_size + states_size + BLOCK / SIZE * STRIPE);
    if (!down) return 1;
    uint32_t *states = down + down_size, *grads = states + states_size;
    NAME(lay_weights_down)(down, w, m, k);
    target to_x = {.stored = grad_x, .stride = k, .allowed = is_rectified ? x : NULL};
    NAME(multiply)(to_x, n, k, grad, m / SIZE, 1, down, m / SIZE);
    for (int64_t start = 0; start < n; start += BLOCK) {
        int64_t rows = least(n - start, BLOCK), num_words = (rows + SIZE - 1) / SIZE;
        NAME(lay_rows_down)(states, x + start * k, rows, k);
        for (int64_t first = 0; first < m; first += STRIPE) {
            int64_t columns = least(m - first, STRIPE);
            NAME(lay_down)(grads, grad + start * m + first, rows, m, columns, STRIPE);
            target to_w = {.sums = grad_w + first * k, .adds = start > 0, .stride = k};
            NAME(multiply)(to_w, columns, k, grads, 1, STRIPE, states, num_words);
        }
    }
    free(down);
    if (!grad_bias) return 0;
    memset(grad_bias, 0, m * sizeof(float));
    for (int64_t r = 0; r < n; r++)
        for (int64_t c = 0; c < m; c++) grad_bias[c] += LOAD(grad[r * m + c]);
    return 0;
}

#endif
