/* Linear maps and their gradients, for training. */
#include "gemm.h"

#if defined BF16 && defined __AVX512BF16__ || !defined BF16 && defined __x86_64__ && LANES > 4
const int64_t FUNCTION(fast_matmul) = 1;
#else
const int64_t FUNCTION(fast_matmul) = 0;
#endif
const int64_t FUNCTION(tile_columns) = TILE_COLUMNS;

#define BLOCK 512 /* rows of x that are added to grad_w at once */

/* Pack w^T, for weights w [m, k], as a right factor: the inner dimension is k, a multiple of K_GROUP. */
static void pack_weights_transposed(uint32_t *to, const float *w, int64_t m, int64_t k) {
    for (int64_t first = 0; first < m; first += TILE_COLUMNS, to += k / K_GROUP * TILE_COLUMNS)
        for (int64_t c = 0; c < TILE_COLUMNS; c++)
            for (int64_t i = 0; i < k; i += LANES) {
                int64_t count = min_of(k - i, LANES);
                elem row[LANES] = {0};
                if (first + c < m) store_full(row, load_vec_float(w + (first + c) * k + i, count));
                for (int64_t j = 0; j < count; j += K_GROUP)
                    memcpy(to + (i + j) / K_GROUP * TILE_COLUMNS + c, row + j, sizeof *to);
            }
}

/* Pack weights w [m, k] as a right factor: the inner dimension is m, a multiple of K_GROUP. */
static void pack_weights(uint32_t *to, const float *w, int64_t m, int64_t k) {
    for (int64_t first = 0; first < k; first += TILE_COLUMNS)
        for (int64_t r = 0; r < m; r += K_GROUP)
            for (int64_t c = first; c < first + TILE_COLUMNS; c += LANES, to += LANES) {
                const float *own = w + r * k + c;
                int64_t count = min_of(k - c, LANES);
                vec_float above = {0}, below = {0};
                if (count > 0) above = round_trip(load_vec_float(own, count));
                if (count > 0 && K_GROUP > 1) below = round_trip(load_vec_float(own + k, count));
                vec_u32 groups = pair(above, below);
                memcpy(to, &groups, sizeof groups);
            }
}

status FUNCTION(linear)(const elem *x, const float *w, const float *bias, elem *out, int64_t n, int64_t k,
                 int64_t m, int apply_relu) {
    uint32_t *right = alloc_floats(packed_size(k / K_GROUP, m));
    if (!right) return OPS_NO_MEMORY;
    pack_weights_transposed(right, w, m, k);
    gemm_out to = {.bias = bias, .out = out, .stride = m, .apply_relu = apply_relu};
    gemm(to, n, m, x, k / K_GROUP, 1, right, k / K_GROUP);
    free(right);
    return OPS_OK;
}

status FUNCTION(linear_grad)(const elem *grad, const elem *x, const float *w, elem *grad_x,
                      float *grad_w, float *grad_bias, int64_t n, int64_t k, int64_t m,
                      int input_is_relu) {
    int64_t down_size = packed_size(m / K_GROUP, k), states_size = packed_size(BLOCK / K_GROUP, k);
    uint32_t *down = alloc_floats(down_size + states_size + BLOCK / K_GROUP * ROW_BLOCK);
    if (!down) return OPS_NO_MEMORY;
    uint32_t *states = down + down_size, *grads = states + states_size;
    pack_weights(down, w, m, k);
    gemm_out to_x = {.out = grad_x, .stride = k, .relu_input = input_is_relu ? x : NULL};
    gemm(to_x, n, k, grad, m / K_GROUP, 1, down, m / K_GROUP);
    for (int64_t start = 0; start < n; start += BLOCK) {
        int64_t rows = min_of(n - start, BLOCK), num_groups = (rows + K_GROUP - 1) / K_GROUP;
        pack_rows(states, x + start * k, rows, k);
        for (int64_t first = 0; first < m; first += ROW_BLOCK) {
            int64_t columns = min_of(m - first, ROW_BLOCK);
            pack_columns(grads, grad + start * m + first, rows, m, columns, ROW_BLOCK);
            gemm_out to_w = {.sums = grad_w + first * k, .accumulate = start > 0, .stride = k};
            gemm(to_w, columns, k, grads, 1, ROW_BLOCK, states, num_groups);
        }
    }
    free(down);
    if (!grad_bias) return OPS_OK;
    memset(grad_bias, 0, m * sizeof(float));
    for (int64_t r = 0; r < n; r++)
        for (int64_t c = 0; c < m; c++) grad_bias[c] += load(grad[r * m + c]);
    return OPS_OK;
}
