/* Linear maps of decoding; and the likeliest pieces under one onto a vocabulary, whose logits never
 * lie in memory all at once: those of a few rows are made, and searched while they are in the cache.
 * Where the likeliest alone is wanted, most of the work is done in bfloat16, and nothing is lost; nor
 * is it where zeros are skipped.
 *
 * The weights w [m, k] come laid out in panels, as gemm.h reads them; rows that the last one lacks
 * are 0:
 *
 *      panel 0                       panel 1
 *      w[0][0] .. w[PANEL - 1][0]    w[PANEL][0] .. w[2 PANEL - 1][0]
 *      w[0][1] .. w[PANEL - 1][1]    ..
 *
 * One thread runs each call, which returns 0, or 1 if the memory does not hold what it works with.
 */
#define STORE bf16
#include "gemm.h"
#undef STORE
#define STORE float
#include "gemm.h"

#define CHUNK (4 * ROWS)     /* rows whose logits, or places, are held at once */
#define BLOCK 64             /* logits whose greatest is noted */
#define BESIDE (8 / VECTORS) /* panels whose sums are added up side by side, if most of x is 0 */
#define FEW(k) ((k) / 3)     /* numbers of a row of which so few are not 0 that the others are skipped */

int topk_float(const float *logits, const int64_t *never, int64_t *ids, float *log_probs,
                     int64_t rows, int64_t width, int64_t num_never, int64_t count);

const int64_t tile_columns = PANEL;

/* out [n, m] = x w^T + bias for x [n, k] and the panels of w [m, k], or the greater of this and 0; the
 * bias may be NULL. */
int packed_linear_float(const float *x, const float *panels, const float *bias, float *out, int64_t n,
                  int64_t k, int64_t m, int rectifies) {
    target to = {.bias = bias, .sums = out, .stride = m, .rectifies = rectifies};
    multiply_float(to, n, m, x, k, 1, panels, k);
    return 0;
}

/* Note where x [k] is not 0, and return how often; there is room for a vector more than k places. */
static int64_t find(int32_t *places, const float *x, int64_t k) {
    int64_t count = 0;
#ifdef __AVX512F__
    __m512i here = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int64_t i = 0; i < k; i += LANES) {
        lanes own = get_float(x + i, least(k - i, LANES));
        uint16_t is_there = _mm512_cmp_ps_mask((__m512)own, _mm512_setzero_ps(), _CMP_NEQ_UQ);
        _mm512_storeu_si512(places + count, _mm512_maskz_compress_epi32(is_there, here));
        count += __builtin_popcount(is_there);
        here = _mm512_add_epi32(here, _mm512_set1_epi32(LANES));
    }
#else
    for (int64_t i = 0; i < k; i++) {
        places[count] = (int32_t)i;
        count += x[i] != 0.0f;
    }
#endif
    return count;
}

/* What `tile` in gemm.h does for a row of which only some numbers are not 0, and panels side by side:
 * sums begin at 0 and take the others in the same order, so that they are the same to the last bit. */
static INLINE void sparse_tile(const target *to, int64_t row, int64_t column, int64_t columns,
                               const float *x, const int32_t *places, int64_t count,
                               const float *panels, int64_t k, int num_panels) {
    lanes sums[BESIDE * VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < num_panels * VECTORS; v++) sums[v] = (lanes){0};
    for (int64_t i = 0; i < count; i++) {
        const float *right = panels + places[i] * PANEL;
        lanes same = x[places[i]] - (lanes){0};
#pragma GCC unroll 8
        for (int v = 0; v < num_panels * VECTORS; v++) {
            lanes own;
            memcpy(&own, right + v / VECTORS * k * PANEL + v % VECTORS * LANES, sizeof own);
            sums[v] += same * own;
        }
    }
#pragma GCC unroll 8
    for (int v = 0; v < num_panels * VECTORS; v++) {
        int64_t first = column + v * LANES;
        if (columns - first >= LANES) finish_float(to, row, first, sums[v], LANES);
        else if (first < columns) finish_few_float(to, row, first, sums[v], columns - first);
    }
}

/* What packed_linear_float does, and faster where most of x is 0, as most of what ReLU leaves is (Li et al.
 * 2022, arXiv 2210.06313). */
int packed_linear_sparse_float(const float *x, const float *panels, const float *bias, float *out,
                         int64_t n, int64_t k, int64_t m) {
    int64_t room_of_row = k + LANES, counts[CHUNK];
    int32_t *places = room(CHUNK * room_of_row);
    if (!places) return 1;
    for (int64_t start = 0; start < n; start += CHUNK) {
        int64_t rows = least(n - start, CHUNK), total = 0;
        const float *own = x + start * k;
        target to = {.bias = bias, .sums = out + start * m, .stride = m};
        for (int64_t r = 0; r < rows; r++)
            total += counts[r] = find(places + r * room_of_row, own + r * k, k);
        if (total > rows * FEW(k)) {
            multiply_float(to, rows, m, own, k, 1, panels, k);
            continue;
        }
        for (int64_t column = 0, step; column < m; column += step) {
            int is_wide = m - column > (BESIDE - 1) * PANEL;
            step = is_wide ? BESIDE * PANEL : PANEL;
            for (int64_t r = 0; r < rows; r++) {
#define TILE(num) \
    sparse_tile(&to, r, column, m, own + r * k, places + r * room_of_row, counts[r], \
                panels + column * k, k, num)
                if (is_wide) TILE(BESIDE);
                else TILE(1);
#undef TILE
            }
        }
    }
    free(places);
    return 0;
}

/* What top_pieces finds in logits x w^T, for x [n, k] and the panels of w [m, k]. */
int packed_topk_float(const float *x, const float *panels, const int64_t *never,
                             int64_t *ids, float *log_probs, int64_t n, int64_t k, int64_t m,
                             int64_t num_never, int64_t count) {
    float *logits = room(CHUNK * m);
    if (!logits) return 1;
    int lacks_memory = 0;
    for (int64_t start = 0; start < n && !lacks_memory; start += CHUNK) {
        int64_t rows = least(n - start, CHUNK);
        packed_linear_float(x + start * k, panels, NULL, logits, rows, k, m, 0);
        lacks_memory = topk_float(logits, never, ids + start * count,
                                        log_probs + start * count, rows, m, num_never, count);
    }
    free(logits);
    return lacks_memory;
}

/* The piece of the greatest logit of states x [k], apart from those whose `logits` are -INFINITY; -1 if
 * none is finite. The logits that are given are at most |x| margins[i] away from x w_i: only those
 * that may be the greatest, mostly a single one, are multiplied out. `tops` has room for a number of
 * each block. */
static int64_t likeliest(const float *x, const float *w, const float *logits, const float *margins,
                         float *tops, int64_t k, int64_t m) {
    float size = sqrtf(dot(x, x, k)), least_top = -INFINITY, best = -INFINITY;
    for (int64_t first = 0; first < m; first += BLOCK) {
        int64_t end = least(first + BLOCK, m);
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
        for (int64_t i = first; i < least(first + BLOCK, m); i++) {
            if (!(logits[i] + size * margins[i] >= least_top)) continue;
            float exact = dot(x, w + i * k, k);
            if (exact > best) best = exact, found = i;
        }
    }
    return best < INFINITY ? found : -1;
}

/* For each row of x [n, k] the piece of its greatest logit x w^T, apart from those never taken; -1 if
 * none is finite. The panels are of w [m, k] in bfloat16, k is even, and margins[i] is how much what
 * is rounded may change the product of w_i and a vector of length 1. */
int packed_argmax_float(const float *x, const float *w, const uint32_t *panels,
                            const float *margins, const int64_t *never, int64_t *ids, int64_t n,
                            int64_t k, int64_t m, int64_t num_never) {
    int64_t blocks = (m + BLOCK - 1) / BLOCK;
    float *logits = room(CHUNK * m + blocks + CHUNK * k / 2);
    if (!logits) return 1;
    float *tops = logits + CHUNK * m;
    bf16 *rounded = (bf16 *)(tops + blocks);
    target to = {.sums = logits, .stride = m};
    for (int64_t start = 0; start < n; start += CHUNK) {
        int64_t rows = least(n - start, CHUNK);
        const float *own = x + start * k;
        for (int64_t i = 0; i < rows * k; i += LANES) {
            int64_t count = least(rows * k - i, LANES);
            put_bf16(rounded + i, get_float(own + i, count), count);
        }
        multiply_bf16(to, rows, m, rounded, k / 2, 1, panels, k / 2);
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t i = 0; i < num_never; i++) logits[r * m + never[i]] = -INFINITY;
            ids[start + r] = likeliest(own + r * k, w, logits + r * m, margins, tops, k, m);
        }
    }
    free(logits);
    return 0;
}
