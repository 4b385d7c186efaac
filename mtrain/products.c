/* Linear maps in bfloat16 and their gradients. Weights are floats, and rounded on the way.
 *
 * One thread runs each call, which returns 0, or 1 if the memory does not hold what it works with.
 */
#define STORE bf16
#include "tiles.h"

/* Whether our products are faster than PyTorch's, as far as that was measured. */
#if defined __AVX512BF16__ && LANES == 16
const int64_t multiplies_bf16 = 1;
#else
const int64_t multiplies_bf16 = 0;
#endif
#if defined __x86_64__ && LANES > 4
const int64_t multiplies_float = 1;
#else
const int64_t multiplies_float = 0;
#endif

#define BLOCK 512 /* rows of a batch whose products are added up at once */

/* Panels of w^T for weights w [m, k]: the numbers of a pair are neighbours in a row of w. */
static void lay_weights_across(uint32_t *to, const float *w, int64_t m, int64_t k) {
    for (int64_t first = 0; first < m; first += PANEL, to += k / 2 * PANEL)
        for (int64_t c = 0; c < PANEL; c++) {
            const float *row = w + (first + c) * k;
            int is_there = first + c < m;
            for (int64_t p = 0; p < k / 2; p++)
                to[p * PANEL + c] =
                    is_there ? store_bf16(row[2 * p]) | (uint32_t)store_bf16(row[2 * p + 1]) << 16 : 0;
        }
}

/* Panels of weights w [m, k]: the numbers of a pair stand below each other. */
static void lay_weights_down(uint32_t *to, const float *w, int64_t m, int64_t k) {
    for (int64_t first = 0; first < k; first += PANEL)
        for (int64_t r = 0; r < m; r += 2, to += PANEL) {
            const float *upper = w + r * k + first, *lower = upper + k;
            int64_t width = least(k - first, PANEL);
            for (int64_t c = 0; c < width; c++) to[c] = store_bf16(upper[c]);
            if (r + 1 < m)
                for (int64_t c = 0; c < width; c++) to[c] |= (uint32_t)store_bf16(lower[c]) << 16;
            for (int64_t c = width; c < PANEL; c++) to[c] = 0;
        }
}

/* out [n, m] = x w^T + bias for x [n, k] and w [m, k]; k is even. */
int linear_bf16(const bf16 *x, const float *w, const float *bias, bf16 *out, int64_t n, int64_t k,
                int64_t m) {
    uint32_t *right = room(panel_size(k / 2, m));
    if (!right) return 1;
    lay_weights_across(right, w, m, k);
    target to = {bias, out, NULL, 0, m};
    multiply_bf16(to, n, m, x, k / 2, 1, right, k / 2);
    free(right);
    return 0;
}

/* The gradients of linear; n is not 0, and m is even. */
int linear_grad_bf16(const bf16 *grad, const bf16 *x, const float *w, bf16 *grad_x, float *grad_w,
                     float *grad_bias, int64_t n, int64_t k, int64_t m) {
    int64_t down_size = panel_size(m / 2, k), states_size = panel_size(BLOCK / 2, k);
    uint32_t *down = room(down_size + states_size + BLOCK / 2 * STRIPE);
    if (!down) return 1;
    uint32_t *states = down + down_size, *grads = states + states_size;
    lay_weights_down(down, w, m, k);
    target to_x = {NULL, grad_x, NULL, 0, k};
    multiply_bf16(to_x, n, k, grad, m / 2, 1, down, m / 2);
    for (int64_t start = 0; start < n; start += BLOCK) {
        int64_t rows = least(n - start, BLOCK), num_pairs = (rows + 1) / 2;
        lay_rows_down_bf16(states, x + start * k, rows, k);
        for (int64_t first = 0; first < m; first += STRIPE) {
            int64_t columns = least(m - first, STRIPE);
            lay_down_bf16(grads, grad + start * m + first, rows, m, columns, STRIPE);
            target to_w = {NULL, NULL, grad_w + first * k, start > 0, k};
            multiply_bf16(to_w, columns, k, grads, 1, STRIPE, states, num_pairs);
        }
    }
    free(down);
    if (!grad_bias) return 0;
    memset(grad_bias, 0, m * sizeof(float));
    for (int64_t r = 0; r < n; r++)
        for (int64_t c = 0; c < m; c++) grad_bias[c] += load_bf16(grad[r * m + c]);
    return 0;
}
