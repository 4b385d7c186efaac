/* Linear maps of decoding with packed weights, in float:
 *
 *      packed_linear          x [n, k] -> out [n, m] = x w^T + bias, or max(0, the same)
 *      packed_linear_sparse   the same, skipping the zeros of x
 *      packed_topk            x -> ids, log_probs [n, count]: the best tokens of logits x w^T
 *      packed_argmax          x -> ids [n]: the best token; scanned in bfloat16, the result is exact
 *
 * Logits [n, m] are never stored: those of a few rows are computed, and searched while they are in the
 * cache. The weights w [m, k] are packed in tiles, T = TILE_COLUMNS, as gemm.h reads them; missing rows
 * are 0:
 *
 *      tile 0                    tile 1
 *      w[0][0] .. w[T - 1][0]    w[T][0] .. w[2 T - 1][0]
 *      w[0][1] .. w[T - 1][1]    ..
 * The unit for bfloat16 holds only the products that packed_argmax scans.
 */
#include "gemm.h"

#define CHUNK (4 * TILE_ROWS)     /* rows whose logits, or nonzero indices, are held at once */
#define BLOCK 64             /* logits for which one maximum is kept */
#define SPARSE_TILES (8 / VECTORS) /* tiles that are multiplied at once, if most of x is 0 */
#define MAX_NONZERO(k) ((k) / 3)     /* zeros are skipped in rows with at most so many nonzero numbers */

/* logits [n, m] = x w^T for states x [n, k] and w [m, k], packed in bfloat16; x is rounded into
 * `rounded` [n, k], and k is even. */
void packed_logits_bf16(const float *x, const uint32_t *packed, float *logits, bf16 *rounded, int64_t n,
                        int64_t k, int64_t m);

#ifdef BF16

void packed_logits_bf16(const float *x, const uint32_t *packed, float *logits, bf16 *rounded, int64_t n,
                        int64_t k, int64_t m) {
    for (int64_t i = 0; i < n * k; i += LANES) {
        int64_t count = min_of(n * k - i, LANES);
        store_vec(rounded + i, load_vec_float(x + i, count), count);
    }
    gemm_out to = {.sums = logits, .stride = m};
    gemm(to, n, m, rounded, k / K_GROUP, 1, packed, k / K_GROUP);
}

#else

/* out [n, m] = x w^T + bias for x [n, k] and packed w [m, k], or max(0, the same); the bias may be
 * NULL. */
status packed_linear_float(const float *x, const float *packed, const float *bias, float *out, int64_t n,
                  int64_t k, int64_t m, int apply_relu) {
    gemm_out to = {.bias = bias, .sums = out, .stride = m, .apply_relu = apply_relu};
    gemm(to, n, m, x, k, 1, packed, k);
    return OPS_OK;
}

/* Write the indices of the nonzero numbers of x [k], and return their count; the array has room for a
 * vector more than k. */
static int64_t find_nonzero(int32_t *nonzero, const float *x, int64_t k) {
    int64_t count = 0;
#ifdef __AVX512F__
    __m512i here = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int64_t i = 0; i < k; i += LANES) {
        vec_float own = load_vec_float(x + i, min_of(k - i, LANES));
        uint16_t is_there = _mm512_cmp_ps_mask((__m512)own, _mm512_setzero_ps(), _CMP_NEQ_UQ);
        _mm512_storeu_si512(nonzero + count, _mm512_maskz_compress_epi32(is_there, here));
        count += __builtin_popcount(is_there);
        here = _mm512_add_epi32(here, _mm512_set1_epi32(LANES));
    }
#else
    for (int64_t i = 0; i < k; i++) {
        nonzero[count] = (int32_t)i;
        count += x[i] != 0.0f;
    }
#endif
    return count;
}

/* `multiply_tile` of gemm.h for one row with few nonzero numbers, and neighbouring tiles: sums begin at 0 and
 * add the others in the same order, so that the result is the same, bit for bit. */
static INLINE void sparse_tile(const gemm_out *to, int64_t row, int64_t column, int64_t columns,
                               const float *x, const int32_t *nonzero, int64_t count,
                               const float *packed, int64_t k, int num_tiles) {
    vec_float sums[SPARSE_TILES * VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < num_tiles * VECTORS; v++) sums[v] = (vec_float){0};
    for (int64_t i = 0; i < count; i++) {
        const float *right = packed + (int64_t)nonzero[i] * TILE_COLUMNS;
        vec_float same = x[nonzero[i]] - (vec_float){0};
#pragma GCC unroll 8
        for (int v = 0; v < num_tiles * VECTORS; v++) {
            vec_float own;
            memcpy(&own, right + v / VECTORS * k * TILE_COLUMNS + v % VECTORS * LANES, sizeof own);
            sums[v] += same * own;
        }
    }
#pragma GCC unroll 8
    for (int v = 0; v < num_tiles * VECTORS; v++) {
        int64_t first = column + v * LANES;
        if (columns - first >= LANES) write_vec(to, row, first, sums[v], LANES);
        else if (first < columns) write_vec_tail(to, row, first, sums[v], columns - first);
    }
}

/* packed_linear_float, faster where most of x is 0, as most of the output of ReLU is (Li et al. 2022,
 * arXiv 2210.06313). */
status packed_linear_sparse_float(const float *x, const float *packed, const float *bias, float *out,
                         int64_t n, int64_t k, int64_t m) {
    int64_t nonzero_stride = k + LANES, counts[CHUNK];
    int32_t *nonzero = alloc_floats(CHUNK * nonzero_stride);
    if (!nonzero) return OPS_NO_MEMORY;
    for (int64_t start = 0; start < n; start += CHUNK) {
        int64_t rows = min_of(n - start, CHUNK), total = 0;
        const float *own = x + start * k;
        gemm_out to = {.bias = bias, .sums = out + start * m, .stride = m};
        for (int64_t r = 0; r < rows; r++)
            total += counts[r] = find_nonzero(nonzero + r * nonzero_stride, own + r * k, k);
        if (total > rows * MAX_NONZERO(k)) {
            gemm(to, rows, m, own, k, 1, packed, k);
            continue;
        }
        for (int64_t column = 0, step; column < m; column += step) {
            int is_wide = m - column > (SPARSE_TILES - 1) * TILE_COLUMNS;
            step = is_wide ? SPARSE_TILES * TILE_COLUMNS : TILE_COLUMNS;
            for (int64_t r = 0; r < rows; r++) {
#define TILE(num) \
    sparse_tile(&to, r, column, m, own + r * k, nonzero + r * nonzero_stride, counts[r], \
                packed + column * k, k, num)
                if (is_wide) TILE(SPARSE_TILES);
                else TILE(1);
#undef TILE
            }
        }
    }
    free(nonzero);
    return OPS_OK;
}

/* topk of the logits x w^T, for x [n, k] and packed w [m, k]. */
status packed_topk_float(const float *x, const float *packed, const int64_t *never,
                             int64_t *ids, float *log_probs, int64_t n, int64_t k, int64_t m,
                             int64_t num_never, int64_t count) {
    float *logits = alloc_floats(CHUNK * m);
    if (!logits) return OPS_NO_MEMORY;
    status result = OPS_OK;
    for (int64_t start = 0; start < n && result == OPS_OK; start += CHUNK) {
        int64_t rows = min_of(n - start, CHUNK);
        packed_linear_float(x + start * k, packed, NULL, logits, rows, k, m, 0);
        result = topk_float(logits, never, ids + start * count, log_probs + start * count, rows, m,
                            num_never, count);
    }
    free(logits);
    return result;
}

/* The token of the greatest logit x w_i of a state x [k], except those whose `logits` are -INFINITY; -1
 * if none is finite. `logits` [m] are at most |x| margins[i] away from x w_i: only those that may be
 * the greatest, mostly a single one, are computed exactly. `tops` holds a number for each block. */
static int64_t argmax(const float *x, const float *w, const float *logits, const float *margins,
                         float *tops, int64_t k, int64_t m) {
    float size = sqrtf(dot(x, x, k)), least_top = -INFINITY, best = -INFINITY;
    for (int64_t first = 0; first < m; first += BLOCK) {
        int64_t end = min_of(first + BLOCK, m);
        float top = -INFINITY;
#pragma omp simd reduction(max : top, least_top)
        for (int64_t i = first; i < end; i++) {
            float margin = size * margins[i], high = logits[i] + margin, low = logits[i] - margin;
            top = high > top ? high : top;
            least_top = low > least_top ? low : least_top;
        }
        tops[first / BLOCK] = top;
    }
    int64_t found = -1;
    for (int64_t first = 0; first < m && least_top > -INFINITY; first += BLOCK) {
        if (tops[first / BLOCK] < least_top) continue;
        for (int64_t i = first; i < min_of(first + BLOCK, m); i++) {
            if (!(logits[i] + size * margins[i] >= least_top)) continue;
            float exact = dot(x, w + i * k, k);
            if (exact > best) best = exact, found = i;
        }
    }
    return best < INFINITY ? found : -1;
}

/* ids [n]: the token of the greatest logit x w^T of each row of x [n, k], except those in `never`; -1 if
 * none is finite. `packed` is w [m, k] in bfloat16, k is even, and margins[i] bounds the rounding error
 * of the product of w_i and a vector of length 1. */
status packed_argmax_float(const float *x, const float *w, const uint32_t *packed,
                            const float *margins, const int64_t *never, int64_t *ids, int64_t n,
                            int64_t k, int64_t m, int64_t num_never) {
    if (!all_below(never, num_never, m)) return OPS_BAD_INDEX;
    int64_t blocks = (m + BLOCK - 1) / BLOCK;
    float *logits = alloc_floats(CHUNK * m + blocks + CHUNK * k / 2);
    if (!logits) return OPS_NO_MEMORY;
    float *tops = logits + CHUNK * m;
    bf16 *rounded = (bf16 *)(tops + blocks);
    for (int64_t start = 0; start < n; start += CHUNK) {
        int64_t rows = min_of(n - start, CHUNK);
        const float *own = x + start * k;
        packed_logits_bf16(own, packed, logits, rounded, rows, k, m);
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t i = 0; i < num_never; i++) logits[r * m + never[i]] = -INFINITY;
            ids[start + r] = argmax(own + r * k, w, logits + r * m, margins, tops, k, m);
        }
    }
    free(logits);
    return OPS_OK;
}

#endif
