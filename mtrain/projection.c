/* Linear maps of decoding; and the likeliest pieces under one onto a vocabulary, whose logits never
 * lie in memory all at once: those of a few rows are made, and searched while they are in the cache.
 * Where the likeliest alone is wanted, most of the work is done in bfloat16, and nothing is lost.
 *
 * The weights w [m, k] come laid out in panels, as tiles.h reads them; rows that the last one lacks
 * are 0:
 *
 *      panel 0                       panel 1
 *      w[0][0] .. w[PANEL - 1][0]    w[PANEL][0] .. w[2 PANEL - 1][0]
 *      w[0][1] .. w[PANEL - 1][1]    ..
 *
 * One thread runs each call, which returns 0, or 1 if the memory does not hold what it works with.
 */
#define STORE bf16
#include "tiles.h"
#undef STORE
#define STORE float
#include "tiles.h"

#define CHUNK (4 * ROWS) /* rows whose logits are held at once */
#define BLOCK 64         /* logits whose greatest is noted */

int top_pieces_float(const float *logits, const int64_t *never, int64_t *ids, float *log_probs,
                     int64_t rows, int64_t width, int64_t num_never, int64_t count);

const int64_t panel_width = PANEL;

/* out [n, m] = x w^T + bias for x [n, k] and the panels of w [m, k], or the greater of this and 0; the
 * bias may be NULL. */
int project_float(const float *x, const float *panels, const float *bias, float *out, int64_t n,
                  int64_t k, int64_t m, int rectifies) {
    target to = {.bias = bias, .sums = out, .stride = m, .rectifies = rectifies};
    multiply_float(to, n, m, x, k, 1, panels, k);
    return 0;
}

/* What top_pieces finds in logits x w^T, for x [n, k] and the panels of w [m, k]. */
int project_top_pieces_float(const float *x, const float *panels, const int64_t *never,
                             int64_t *ids, float *log_probs, int64_t n, int64_t k, int64_t m,
                             int64_t num_never, int64_t count) {
    float *logits = room(CHUNK * m);
    if (!logits) return 1;
    int lacks_memory = 0;
    for (int64_t start = 0; start < n && !lacks_memory; start += CHUNK) {
        int64_t rows = least(n - start, CHUNK);
        project_float(x + start * k, panels, NULL, logits, rows, k, m, 0);
        lacks_memory = top_pieces_float(logits, never, ids + start * count,
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
int project_likeliest_float(const float *x, const float *w, const uint32_t *panels,
                            const float *margins, const int64_t *never, int64_t *ids, int64_t n,
                            int64_t k, int64_t m, int64_t num_never) {
    float *logits = room(CHUNK * m + (m + BLOCK - 1) / BLOCK + CHUNK * k / 2);
    if (!logits) return 1;
    float *tops = logits + CHUNK * m;
    bf16 *rounded = (bf16 *)(tops + (m + BLOCK - 1) / BLOCK);
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
