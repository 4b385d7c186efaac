/* Linear maps of decoding with packed weights, in float:
 *
 *      packed_linear          x [n, k] -> out [n, m] = x w^T + bias, or max(0, x w^T + bias)
 *      packed_linear_sparse   the same, skipping the zeros of x
 *      packed_topk            x -> ids, log_probs [n, count]: the best tokens of logits x w^T
 *      packed_argmax          x -> ids [n]: the best token
 *
 * Logits [n, m] are never stored: those of CHUNK rows are computed, and searched while they are in the
 * cache. The weights w [m, k] are packed in tiles of T = TILE_COLUMNS rows, as gemm.h reads them; rows are
 * padded with zeros to whole tiles. In float:
 *
 *      tile 0                    tile 1
 *      w[0][0] .. w[T - 1][0]    w[T][0] .. w[2 T - 1][0]
 *      w[0][1] .. w[T - 1][1]    ..
 *
 * Compiled for bfloat16, this file has only the products with bfloat16 weights; int8.c has those with int8.
 */
#include "int8.h"

#include "gemm.h"

#define CHUNK (4 * TILE_ROWS)     /* rows whose logits, or nonzero indices, are stored at once */
#define BLOCK 64             /* logits for which one maximum is kept */
#define SPARSE_TILES (8 / VECTORS) /* tiles that are multiplied at once, if most of x is 0 */
#define MAX_NONZERO(k) ((k) / 3)     /* zeros are skipped if rows average at most this many nonzeros */

#define BF16_ERROR 0x1p-8f /* bound of the relative error of rounding to bfloat16 */

/* packed_linear with weights in bfloat16. */
status multiply_bf16(const linear_map *map, const float *x, float *out, int64_t n, int64_t k, int64_t m,
                     int apply_relu);

#ifdef BF16

status multiply_bf16(const linear_map *map, const float *x, float *out, int64_t n, int64_t k, int64_t m,
                     int apply_relu) {
    int64_t stride = round_up(k, K_GROUP);
    bf16 *rounded = alloc_floats(n * stride / 2);
    if (!rounded) return OPS_NO_MEMORY;
    for (int64_t r = 0; r < n; r++) {
        for (int64_t i = 0; i < k; i += LANES) {
            int64_t count = min_of(k - i, LANES);
            store_vec(rounded + r * stride + i, load_vec_float(x + r * k + i, count), count);
        }
        if (k < stride) rounded[r * stride + k] = 0;
    }
    gemm_out to = {.bias = map->bias, .sums = out, .stride = m, .apply_relu = apply_relu};
    gemm(to, n, m, rounded, stride / K_GROUP, 1, map->packed, stride / K_GROUP);
    free(rounded);
    return OPS_OK;
}

#else

status packed_linear_float(const linear_map *map, const float *x, float *out, int64_t n, int64_t k, int64_t m,
                           int apply_relu) {
    if (map->format == IN_BF16) return multiply_bf16(map, x, out, n, k, m, apply_relu);
    if (map->format == IN_INT8) return multiply_int8(map, x, out, NULL, n, k, m, apply_relu);
    gemm_out to = {.bias = map->bias, .sums = out, .stride = m, .apply_relu = apply_relu};
    gemm(to, n, m, x, k, 1, map->packed, k);
    return OPS_OK;
}

/* Write the indices of the nonzero numbers of x [k], and return their count; `nonzero` is a
 * buffer of k + LANES. */
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

/* `multiply_tile` of gemm.h for one row with few nonzero numbers, and num_tiles neighbouring tiles. Sums
 * begin at 0 and add the nonzero products in the same order, so that the result has the same bits for finite
 * weights. */
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

/* Faster if most of x is 0, as in the output of ReLU (Li et al. 2022, arXiv 2210.06313). */
status packed_linear_sparse_float(const linear_map *map, const float *x, float *out, int64_t n, int64_t k,
                                  int64_t m) {
    if (map->format != IN_FLOAT) return packed_linear_float(map, x, out, n, k, m, 0);
    const float *packed = map->packed;
    int64_t nonzero_stride = k + LANES, counts[CHUNK];
    int32_t *nonzero = alloc_floats(CHUNK * nonzero_stride);
    if (!nonzero) return OPS_NO_MEMORY;
    for (int64_t start = 0; start < n; start += CHUNK) {
        int64_t rows = min_of(n - start, CHUNK), total = 0;
        const float *own = x + start * k;
        gemm_out to = {.bias = map->bias, .sums = out + start * m, .stride = m};
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

status packed_topk_float(const linear_map *map, const float *x, const int64_t *never, int64_t *ids,
                         float *log_probs, int64_t n, int64_t k, int64_t m, int64_t num_never,
                         int64_t count) {
    float *logits = alloc_floats(CHUNK * m);
    if (!logits) return OPS_NO_MEMORY;
    status result = OPS_OK;
    for (int64_t start = 0; start < n && result == OPS_OK; start += CHUNK) {
        int64_t rows = min_of(n - start, CHUNK);
        result = packed_linear_float(map, x + start * k, logits, rows, k, m, 0);
        if (result == OPS_OK)
            result = topk_float(logits, never, ids + start * count, log_probs + start * count, rows, m,
                                num_never, count);
    }
    free(logits);
    return result;
}

/* Write the greatest of logits [m] in each block to `tops`. */
static void find_tops(const float *logits, float *tops, int64_t m) {
    for (int64_t first = 0; first < m; first += BLOCK) {
        int64_t end = min_of(first + BLOCK, m);
        float top = -INFINITY;
#pragma omp simd reduction(max : top)
        for (int64_t i = first; i < end; i++) top = logits[i] > top ? logits[i] : top;
        tops[first / BLOCK] = top;
    }
}

/* The first token with the greatest logit, found by the maxima `tops` of the blocks; -1 if that
 * is not finite. */
static int64_t first_greatest(const float *logits, const float *tops, int64_t m) {
    int64_t blocks = (m + BLOCK - 1) / BLOCK, best = 0;
    for (int64_t b = 1; b < blocks; b++) best = tops[b] > tops[best] ? b : best;
    if (!isfinite(tops[best])) return -1;
    int64_t i = best * BLOCK;
    while (logits[i] != tops[best]) i++;
    return i;
}

/* The token with the greatest logit x w_i of a state x [k], except those whose `logits` are -INFINITY; -1 if
 * it is not finite. `logits` [m] are approximations from a rounded x, whose rounding error has the length
 * `error`: exact logits are computed only for tokens that can be the greatest, mostly a single one. */
static int64_t exact_argmax(const float *x, float error, const float *w, const float *logits,
                            const float *tops, const float *bounds, int64_t k, int64_t m) {
    int64_t blocks = (m + BLOCK - 1) / BLOCK, found = -1;
    float length = sqrtf(dot(x, x, k)) + error, least = -INFINITY, best = -INFINITY;
#define MARGIN(b) (1.001f * (error * bounds[b] + length * bounds[blocks + (b)]))
    for (int64_t b = 0; b < blocks; b++) {
        float low = tops[b] - MARGIN(b);
        least = low > least ? low : least;
    }
    for (int64_t b = 0; b < blocks && least > -INFINITY; b++) {
        float margin = MARGIN(b);
        if (!(tops[b] + margin >= least)) continue;
        for (int64_t i = b * BLOCK; i < min_of((b + 1) * BLOCK, m); i++) {
            if (!(logits[i] + margin >= least)) continue;
            float exact = dot(x, w + i * k, k);
            if (exact > best) best = exact, found = i;
        }
    }
#undef MARGIN
    return best < INFINITY ? found : -1;
}

status packed_argmax_float(const linear_map *scan, const float *x, const float *w, const float *bounds,
                           const int64_t *never, int64_t *ids, int64_t n, int64_t k, int64_t m,
                           int64_t num_never) {
    if (!all_below(never, num_never, m)) return OPS_BAD_INDEX;
    float *logits = alloc_floats(CHUNK * m + (m + BLOCK - 1) / BLOCK), errors[CHUNK];
    if (!logits) return OPS_NO_MEMORY;
    float *tops = logits + CHUNK * m;
    status result = OPS_OK;
    for (int64_t start = 0; start < n && result == OPS_OK; start += CHUNK) {
        int64_t rows = min_of(n - start, CHUNK);
        const float *own = x + start * k;
        if (scan->format == IN_INT8) result = multiply_int8(scan, own, logits, errors, rows, k, m, 0);
        else result = multiply_bf16(scan, own, logits, rows, k, m, 0);
        for (int64_t r = 0; r < rows && result == OPS_OK; r++) {
            float *row = logits + r * m;
            const float *state = own + r * k;
            for (int64_t i = 0; i < num_never; i++) row[never[i]] = -INFINITY;
            find_tops(row, tops, m);
            if (scan->format != IN_INT8) errors[r] = BF16_ERROR * sqrtf(dot(state, state, k));
            ids[start + r] = w ? exact_argmax(state, errors[r], w, row, tops, bounds, k, m)
                               : first_greatest(row, tops, m);
        }
    }
    free(logits);
    return result;
}

#endif
