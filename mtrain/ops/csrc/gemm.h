/* Matrix products with float sums: out [rows, columns] = left [rows, k] right [k, columns].
 *
 * One multiply-add takes a k-group of 4 bytes: one float, or two neighbours in k in bfloat16 (the
 * layout that dpbf16ps reads). The right factor is packed in tiles of TILE_COLUMNS columns, k-group
 * after k-group, so that it is read in order:
 *
 *      left [rows, G groups]          right: tile 0                      tile 1
 *      row 0  (g0)(g1) .. (gG)        g0: column 0 .. TILE_COLUMNS - 1   g0: column TILE_COLUMNS ..
 *      row 1  (g0)(g1) .. (gG)        g1: column 0 .. TILE_COLUMNS - 1   g1: ..
 *      ...                            ..                                 ..
 *
 * The sums of TILE_ROWS rows times one tile stay in registers over all of k: each vector of the
 * tile is loaded once for TILE_ROWS rows. A file that defines MUL_ADD and SUMS_TO_FLOAT before it includes
 * this one replaces the multiply-add and the conversion of its sums (int8.c). With MULTIPLY_TILES, the
 * product of two tile registers, gemm is that of amx.h.
 */
#pragma once

#include "vec.h"

#ifdef __AVX512F__ /* 32 vector registers, of which TILE_ROWS * VECTORS = 24 hold sums */
#define VECTORS 4
#else
#define VECTORS 2
#endif
#define TILE_COLUMNS (LANES * VECTORS)
#define TILE_ROWS 6
#define INLINE inline __attribute__((always_inline))
#define ROW_BLOCK (16 * TILE_ROWS) /* rows of a left factor that are packed or multiplied at once */

/* The output of a product [rows, columns], and what is applied to each sum before it is written. */
typedef struct gemm_out {
    const float *bias; /* [columns], added; or NULL */
    void *out;      /* [rows, stride] of elem; or NULL: `sums` is the output */
    float *sums;       /* [rows, stride] of float */
    int accumulate;          /* if set, add to `sums` instead of overwriting them */
    int64_t stride;
    int apply_relu;       /* if set, max(0, sum) */
    const float *row_scales, *column_scales; /* int8.c only; columns are padded to whole tiles */
    const int32_t *column_sums;
    const void *relu_input; /* [rows, stride] of elem: the output is 0 where this is <= 0; or NULL */
} gemm_out;

#ifndef MUL_ADD
#if defined BF16 && defined __AMX_BF16__
#define MULTIPLY_TILES _tile_dpbf16ps
#endif
#define MUL_ADD mul_add
#define SUMS_TO_FLOAT(to, row, column, sums) (sums)
#endif

/* The size of a packed right factor, in numbers of 4 bytes. */
static inline int64_t packed_size(int64_t num_groups, int64_t columns) {
    return num_groups * round_up(columns, TILE_COLUMNS);
}

/* Load `count` numbers, at most a vector, zero-padded. */
static inline vec_float load_vec_float(const float *from, int64_t count) {
    vec_float x = {0};
    if (count == LANES) memcpy(&x, from, sizeof x);
    else memcpy(&x, from, count * sizeof *from);
    return x;
}

#ifdef BF16
static inline vec_float load_vec(const bf16 *from, int64_t count) {
    vec_half x = {0};
    if (count == LANES) memcpy(&x, from, sizeof x);
    else memcpy(&x, from, count * sizeof *from);
    return (vec_float)(widen(x) << 16);
}
#else
#define load_vec load_vec_float
#endif

/* 0 where the comparison `is_so` is true, else x. */
#define zero_where(is_so, x) ((vec_float)((vec_u32)(x) & ~(vec_u32)(is_so)))

static inline void store_vec_float(float *to, vec_float x, int64_t count) {
    if (count == LANES) memcpy(to, &x, sizeof x);
    else memcpy(to, &x, count * sizeof *to);
}

#ifdef BF16
static inline void store_vec(elem *to, vec_float x, int64_t count) {
    vec_half rounded = round_to_half(x);
    if (count == LANES) memcpy(to, &rounded, sizeof rounded);
    else memcpy(to, &rounded, count * sizeof *to);
}
#else
#define store_vec store_vec_float
#endif

/* Pack x [rows, columns], rows `stride` apart, into k-groups [ceil(rows / K_GROUP), step], zero-padded; the
 * rows are the inner dimension k. */
static inline void pack_columns(uint32_t *restrict to, const elem *x, int64_t rows,
                                  int64_t stride, int64_t columns, int64_t step) {
    for (int64_t r = 0; r < rows; r += K_GROUP, to += step) {
        const elem *upper = x + r * stride, *lower = upper + stride;
        if (K_GROUP == 1) { /* memcpy of a variable size is slow for few columns */
            int64_t c = 0;
            for (; c + LANES <= columns; c += LANES) memcpy(to + c, upper + c, LANES * sizeof *to);
            for (; c < columns; c++) memcpy(to + c, upper + c, sizeof *to);
        } else if (r + 1 < rows)
            for (int64_t c = 0; c < columns; c++) to[c] = (bf16)upper[c] | (uint32_t)lower[c] << 16;
        else
            for (int64_t c = 0; c < columns; c++) to[c] = (bf16)upper[c];
        for (int64_t c = columns; c < step; c++) to[c] = 0;
    }
}

/* Pack x [rows, k] as a right factor with k columns; the rows are the inner dimension. */
static inline void pack_rows(uint32_t *to, const elem *x, int64_t rows, int64_t k) {
    for (int64_t first = 0; first < k; first += TILE_COLUMNS) {
        int64_t columns = min_of(k - first, TILE_COLUMNS);
        pack_columns(to + first * ((rows + K_GROUP - 1) / K_GROUP), x + first, rows, k, columns, TILE_COLUMNS);
    }
}

/* Write `count` sums, at most a vector, to row `row` of the output from `column` on. */
static INLINE void write_vec(const gemm_out *to, int64_t row, int64_t column, vec_float sums,
                                int64_t count) {
    int64_t at = row * to->stride + column;
    if (to->bias) sums += load_vec_float(to->bias + column, count);
    if (to->accumulate) sums += load_vec_float(to->sums + at, count);
    if (to->apply_relu) sums = zero_where(sums < 0.0f, sums);
    if (to->relu_input) {
        vec_float passed = load_vec((const elem *)to->relu_input + at, count);
        sums = zero_where(passed <= 0.0f, sums);
    }
    if (to->out) store_vec((elem *)to->out + at, sums, count);
    else store_vec_float(to->sums + at, sums, count);
}

/* write_vec at the end of a row; not inlined, to keep the code of a tile small. */
static __attribute__((noinline)) void write_vec_tail(const gemm_out *to, int64_t row,
                                                       int64_t column, vec_float sums, int64_t count) {
    write_vec(to, row, column, sums, min_of(count, LANES));
}

#ifdef MULTIPLY_TILES
#include "amx.h"
#else
/* `rows` rows of a left factor times a tile. `rows` is a constant where this is inlined, and every
 * loop over sums is unrolled, so that the sums stay in registers. */
static INLINE void multiply_tile(const gemm_out *to, int64_t row, int64_t column, int64_t columns,
                              const uint32_t *left, int64_t row_step, int64_t group_step,
                              const uint32_t *tile, int64_t num_groups, int rows) {
    vec_float sums[TILE_ROWS][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sums[r][v] = (vec_float){0};
    for (int64_t w = 0; w < num_groups; w++, tile += TILE_COLUMNS) {
        vec_u32 right[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) memcpy(&right[v], tile + v * LANES, sizeof right[v]);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            uint32_t own;
            memcpy(&own, left + r * row_step + w * group_step, sizeof own);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[r][v] = MUL_ADD(sums[r][v], own, right[v]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            int64_t first = column + v * LANES;
            vec_float x = SUMS_TO_FLOAT(to, row + r, first, sums[r][v]);
            if (columns - column >= TILE_COLUMNS) write_vec(to, row + r, first, x, LANES);
            else if (first < columns) write_vec_tail(to, row + r, first, x, columns - first);
        }
}

/* out [rows, columns] = left times a packed right factor. k-group g of row r of the left factor is at
 * r * row_step + g * group_step. ROW_BLOCK rows at a time are multiplied with all tiles, so that they stay in
 * the second level of the cache. */
static inline void gemm(gemm_out to, int64_t rows, int64_t columns, const void *left,
                                  int64_t row_step, int64_t group_step, const void *right,
                                  int64_t num_groups) {
    for (int64_t first = 0; first < rows; first += ROW_BLOCK) {
        const uint32_t *tile = right;
        int64_t end = min_of(first + ROW_BLOCK, rows);
        for (int64_t column = 0; column < columns; column += TILE_COLUMNS) {
            for (int64_t row = first; row < end; row += TILE_ROWS) {
                const uint32_t *own = (const uint32_t *)left + row * row_step;
#define TILE(n) \
    multiply_tile(&to, row, column, columns, own, row_step, group_step, tile, num_groups, n)
                switch (min_of(end - row, TILE_ROWS)) {
                    case 6: TILE(6); break;
                    case 5: TILE(5); break;
                    case 4: TILE(4); break;
                    case 3: TILE(3); break;
                    case 2: TILE(2); break;
                    default: TILE(1);
                }
#undef TILE
            }
            tile += num_groups * TILE_COLUMNS;
        }
    }
}
#endif
