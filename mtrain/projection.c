/* Linear maps of decoding; and the likeliest pieces under one onto a vocabulary, whose logits never
 * lie in memory all at once: those of a few rows are made, and searched while they are in the cache.
 *
 * The weights w [m, k] come laid out in panels, PANEL rows wide, so that a product reads them in
 * order; rows that the last one lacks are 0:
 *
 *      panel 0                       panel 1
 *      w[0][0] .. w[PANEL - 1][0]    w[PANEL][0] .. w[2 PANEL - 1][0]
 *      w[0][1] .. w[PANEL - 1][1]    ..
 *
 * ROWS rows times one panel make a tile, whose sums stay in registers. One thread runs each call.
 */
#include "numbers.h"

#ifdef __AVX512F__ /* of so many registers, sums take all but a few */
#define VECTORS 4
#else
#define VECTORS 2
#endif
#define PANEL (LANES * VECTORS)
#define ROWS 6
#define CHUNK (4 * ROWS) /* rows whose logits are held at once */

void top_pieces_float(const float *logits, const int64_t *never, int64_t *ids, float *log_probs,
                      int64_t rows, int64_t width, int64_t num_never, int64_t count);

const int64_t panel_width = PANEL;

/* Some rows of x times a panel, plus a bias; the number of rows is a constant where it is inlined. */
static inline __attribute__((always_inline)) void tile(float *out, int64_t stride, int64_t columns,
                                                       const float *x, const float *panel,
                                                       const float *bias, int64_t k, int rows) {
    lanes sums[ROWS][VECTORS] = {{{0}}}, last[VECTORS] = {{0}};
    for (int64_t i = 0; i < k; i++) {
        lanes weights[VECTORS];
        for (int v = 0; v < VECTORS; v++)
            memcpy(&weights[v], panel + i * PANEL + v * LANES, sizeof weights[v]);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < VECTORS; v++) sums[r][v] += x[r * k + i] * weights[v];
    }
    if (bias) memcpy(last, bias, least(columns, PANEL) * sizeof *bias);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] += last[v];
    for (int r = 0; r < rows; r++)
        if (columns >= PANEL) memcpy(out + r * stride, sums[r], sizeof sums[r]);
        else memcpy(out + r * stride, sums[r], columns * sizeof(float));
}

/* out [n, m] = x w^T + bias for x [n, k] and the panels of w [m, k]; the bias may be NULL. Returns 0:
 * it needs no memory. */
int project_float(const float *x, const float *panels, const float *bias, float *out, int64_t n,
                  int64_t k, int64_t m) {
    for (int64_t first = 0; first < m; first += PANEL, panels += k * PANEL)
        for (int64_t row = 0; row < n; row += ROWS) {
            const float *own = bias ? bias + first : NULL;
#define TILE(r) tile(out + row * m + first, m, m - first, x + row * k, panels, own, k, r)
            switch (n - row) {
                case 1: TILE(1); break;
                case 2: TILE(2); break;
                case 3: TILE(3); break;
                case 4: TILE(4); break;
                case 5: TILE(5); break;
                default: TILE(ROWS);
            }
        }
    return 0;
}

/* What top_pieces finds in logits x w^T, for x [n, k] and the panels of w [m, k]. Returns 0, or 1 if
 * the memory does not hold the logits of a few rows. */
int project_top_pieces_float(const float *x, const float *panels, const int64_t *never,
                             int64_t *ids, float *log_probs, int64_t n, int64_t k, int64_t m,
                             int64_t num_never, int64_t count) {
    float *logits = room(CHUNK * m);
    if (!logits) return 1;
    for (int64_t start = 0; start < n; start += CHUNK) {
        int64_t rows = least(n - start, CHUNK);
        project_float(x + start * k, panels, NULL, logits, rows, k, m);
        top_pieces_float(logits, never, ids + start * count, log_probs + start * count, rows, m,
                         num_never, count);
    }
    free(logits);
    return 0;
}
