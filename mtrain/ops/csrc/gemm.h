/* Products of matrices, added up in float.
 *
 * What one step adds is a word of 4 bytes: a float, or a pair in bfloat16. The right factor of a
 * product is laid out in panels, PANEL columns wide, word after word, so that it is read in order:
 *
 *      left [rows, W words]           right: panel 0             panel 1
 *      row 0  (w0)(w1) .. (wW)        w0: column 0 .. PANEL - 1  w0: column PANEL ..
 *      row 1  (w0)(w1) .. (wW)        w1: column 0 .. PANEL - 1  w1: ..
 *      ...                            ..                         ..
 *
 * ROWS rows times one panel make a tile, whose sums stay in registers from the first word to the
 * last: each vector of the panel that is loaded serves ROWS rows.
 *
 * A file includes this once for each type of storage, STORE, that it multiplies.
 */
#ifndef PANEL

#include "vec.h"

#ifdef __AVX512F__ /* of so many registers, sums take all but a few */
#define VECTORS 4
#else
#define VECTORS 2
#endif
#define PANEL (LANES * VECTORS)
#define ROWS 6
#define INLINE inline __attribute__((always_inline))
#define STRIPE (16 * ROWS) /* columns of a left factor that are laid out, or multiplied, at once */

/* Where a product's sums go, and how far it is from row to row there. */
typedef struct {
    const float *bias; /* a number for each column is added first, if it is not NULL; */
    void *stored;      /* then they go here, as STORE, if it is not NULL, */
    float *sums;       /* else here, */
    int adds;          /* to what is there already, if this says so */
    int64_t stride;
    int rectifies;       /* what is below 0 becomes 0, if this says so, */
    const void *allowed; /* and all that is not above 0 here, as STORE, if it is not NULL */
} target;

/* Numbers of 4 bytes that panels of so many words and columns take. */
static inline int64_t panel_size(int64_t num_words, int64_t columns) {
    return num_words * round_up(columns, PANEL);
}

/* `count` numbers, at most a vector, and zeros. */
static inline lanes get_float(const float *from, int64_t count) {
    lanes x = {0};
    if (count == LANES) memcpy(&x, from, sizeof x);
    else memcpy(&x, from, count * sizeof *from);
    return x;
}

static inline lanes get_bf16(const bf16 *from, int64_t count) {
    halves x = {0};
    if (count == LANES) memcpy(&x, from, sizeof x);
    else memcpy(&x, from, count * sizeof *from);
    return (lanes)(widened(x) << 16);
}

/* Zeros where a comparison holds, else x. */
#define where_not(is_so, x) ((lanes)((words)(x) & ~(words)(is_so)))

static inline void put_float(float *to, lanes x, int64_t count) {
    if (count == LANES) memcpy(to, &x, sizeof x);
    else memcpy(to, &x, count * sizeof *to);
}

static inline void put_bf16(bf16 *to, lanes x, int64_t count) {
    halves rounded = round_lanes(x);
    if (count == LANES) memcpy(to, &rounded, sizeof rounded);
    else memcpy(to, &rounded, count * sizeof *to);
}

#endif
#ifdef STORE

#undef SIZE
#define SIZE (4 / (int64_t)sizeof(STORE)) /* numbers of a word */

/* Make words of some columns of numbers [rows, stride], of those of a word that stand below each
 * other; a row of words is `step` long. */
static inline void NAME(lay_down)(uint32_t *restrict to, const STORE *x, int64_t rows,
                                  int64_t stride, int64_t columns, int64_t step) {
    for (int64_t r = 0; r < rows; r += SIZE, to += step) {
        const STORE *upper = x + r * stride, *lower = upper + stride;
        if (SIZE == 1)
            memcpy(to, upper, columns * sizeof *to);
        else if (r + 1 < rows)
            for (int64_t c = 0; c < columns; c++) to[c] = (bf16)upper[c] | (uint32_t)lower[c] << 16;
        else
            for (int64_t c = 0; c < columns; c++) to[c] = (bf16)upper[c];
        for (int64_t c = columns; c < step; c++) to[c] = 0;
    }
}

/* Panels of x [rows, k]. */
static inline void NAME(lay_rows_down)(uint32_t *to, const STORE *x, int64_t rows, int64_t k) {
    for (int64_t first = 0; first < k; first += PANEL) {
        int64_t columns = least(k - first, PANEL);
        NAME(lay_down)(to + first * ((rows + SIZE - 1) / SIZE), x + first, rows, k, columns, PANEL);
    }
}

/* Take `count` sums, at most a vector, to where they go. */
static INLINE void NAME(finish)(const target *to, int64_t row, int64_t column, lanes sums,
                                int64_t count) {
    int64_t at = row * to->stride + column;
    if (to->bias) sums += get_float(to->bias + column, count);
    if (to->adds) sums += get_float(to->sums + at, count);
    if (to->rectifies) sums = where_not(sums < 0.0f, sums);
    if (to->allowed) {
        lanes passed = PASTE(get, STORE)((const STORE *)to->allowed + at, count);
        sums = where_not(passed <= 0.0f, sums);
    }
    if (to->stored) PASTE(put, STORE)((STORE *)to->stored + at, sums, count);
    else put_float(to->sums + at, sums, count);
}

/* The same at the end of a row, in one place for all: its code is long. */
static __attribute__((noinline)) void NAME(finish_few)(const target *to, int64_t row,
                                                       int64_t column, lanes sums, int64_t count) {
    NAME(finish)(to, row, column, sums, least(count, LANES));
}

/* Some rows of a left factor times a panel. `rows` is a constant where this is inlined, and every
 * loop over sums is unrolled: what is reached by a number lies in memory. */
static INLINE void NAME(tile)(const target *to, int64_t row, int64_t column, int64_t columns,
                              const uint32_t *left, int64_t row_step, int64_t word_step,
                              const uint32_t *panel, int64_t num_words, int rows) {
    lanes sums[ROWS][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sums[r][v] = (lanes){0};
    for (int64_t w = 0; w < num_words; w++, panel += PANEL) {
        words right[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) memcpy(&right[v], panel + v * LANES, sizeof right[v]);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            uint32_t own;
            memcpy(&own, left + r * row_step + w * word_step, sizeof own);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[r][v] = NAME(add)(sums[r][v], own, right[v]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            int64_t first = column + v * LANES;
            if (columns - column >= PANEL) NAME(finish)(to, row + r, first, sums[r][v], LANES);
            else if (first < columns) NAME(finish_few)(to, row + r, first, sums[r][v], columns - first);
        }
}

/* Rows of a left factor times all panels of a right one. Word w of row r of the left factor lies at
 * r * row_step + w * word_step. */
static inline void NAME(multiply)(target to, int64_t rows, int64_t columns, const void *left,
                                  int64_t row_step, int64_t word_step, const void *right,
                                  int64_t num_words) {
    const uint32_t *panel = right;
    for (int64_t column = 0; column < columns; column += PANEL, panel += num_words * PANEL)
        for (int64_t row = 0; row < rows; row += ROWS) {
            const uint32_t *own = (const uint32_t *)left + row * row_step;
#define TILE(n) \
    NAME(tile)(&to, row, column, columns, own, row_step, word_step, panel, num_words, n)
            switch (least(rows - row, ROWS)) {
                case 6: TILE(6); break;
                case 5: TILE(5); break;
                case 4: TILE(4); break;
                case 3: TILE(3); break;
                case 2: TILE(2); break;
                default: TILE(1);
            }
#undef TILE
        }
}

#endif
