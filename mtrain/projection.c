/* Linear maps of decoding; and the likeliest pieces under one onto a vocabulary, whose logits never
 * lie in memory all at once: those of a few rows are made, and searched while they are in the cache.
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
#define STORE float
#include "tiles.h"

#define CHUNK (4 * ROWS) /* rows whose logits are held at once */

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
