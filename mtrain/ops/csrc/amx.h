/* The products of gemm.h in bfloat16 and int8 with the tile registers of AMX, which have 16 rows of 64 bytes. A
 * block of 32 x 32 sums stays in four of them over all of k:
 *
 *      0 1     sums of rows 0 - 15, columns 0 - 15 and 16 - 31     4     left factor, rows 0 - 15, 16 k-groups
 *      2 3     sums of rows 16 - 31                                5     left factor, rows 16 - 31
 *                                                                  6 7   right factor, columns 0 - 15 and 16 - 31
 *
 * gemm.h includes this file. The process must have asked Linux for the registers (device.py).
 */
#pragma once

#define SIDE 16               /* rows of a register, and k-groups or sums in a row */
#define BLOCK_SIDE (2 * SIDE) /* rows and columns of a block of sums */
#define MAX_GROUPS 256        /* k-groups of a left factor that must be transposed */

/* Say that the compiler must have written what a tile is loaded from: the intrinsics do not. */
#define WRITE_MEMORY __asm__ volatile("" ::: "memory")

/* The operand of ldtilecfg. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

/* Configure the registers for blocks of `rows` rows, at most 32; they become 0. */
static inline void configure_tiles(int64_t rows) {
    tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 4 * SIDE, config.rows[i] = SIDE;
    config.rows[0] = config.rows[1] = config.rows[4] = (uint8_t)min_of(rows, SIDE);
    if (rows > SIDE) config.rows[2] = config.rows[3] = config.rows[5] = (uint8_t)(rows - SIDE);
    WRITE_MEMORY;
    _tile_loadconfig(&config);
}

/* Transpose a left factor [groups, rows] to [rows, step], zero-padded. */
static inline void transpose_left(uint32_t *to, int64_t step, const uint32_t *from, int64_t group_step,
                                  int64_t rows, int64_t num_groups) {
    for (int64_t group = 0; group < step; group += SIDE)
        for (int64_t row = 0; row < rows; row += SIDE) {
            vec_u32 square[SIDE] = {{0}};
            int64_t size = 4 * min_of(rows - row, SIDE);
            for (int64_t i = 0; i < min_of(num_groups - group, SIDE); i++) {
                const uint32_t *own = from + (group + i) * group_step + row;
                if (size == sizeof *square) memcpy(&square[i], own, sizeof *square);
                else memcpy(&square[i], own, size);
            }
            transpose(square);
            for (int64_t i = 0; i < SIDE; i++) memcpy(to + (row + i) * step + group, &square[i], sizeof *square);
        }
}

/* Add the products of 16 k-groups, of `rows` rows of the left factor and 32 columns of the right one. */
#define ADD_TILES(left, left_step, right) do { \
        _tile_loadd(6, right, 4 * TILE_COLUMNS); \
        _tile_loadd(7, (right) + SIDE, 4 * TILE_COLUMNS); \
        _tile_loadd(4, left, 4 * (left_step)); \
        MULTIPLY_TILES(0, 4, 6); \
        MULTIPLY_TILES(1, 4, 7); \
        if (rows > SIDE) { \
            _tile_loadd(5, (left) + SIDE * (left_step), 4 * (left_step)); \
            MULTIPLY_TILES(2, 5, 6); \
            MULTIPLY_TILES(3, 5, 7); \
        } \
    } while (0)

/* Load or store the sums of a block, of which the rows are `step` numbers apart. */
#define MOVE_SUMS(instruction, block, step) do { \
        instruction(0, block, 4 * (step)); \
        instruction(1, (block) + SIDE, 4 * (step)); \
        if (rows > SIDE) { \
            instruction(2, (block) + SIDE * (step), 4 * (step)); \
            instruction(3, (block) + SIDE * (step) + SIDE, 4 * (step)); \
        } \
    } while (0)

/* A block of `rows` rows and at most 32 columns of the output. left_rest and right_rest are the k-groups after the
 * last multiple of 16, zero-padded. */
static INLINE void multiply_block(const gemm_out *to, int64_t row, int64_t column, int64_t rows,
                                  int64_t columns, const uint32_t *left, int64_t left_step,
                                  const uint32_t *left_rest, int64_t rest_step, const uint32_t *right,
                                  const uint32_t *right_rest, int64_t num_groups) {
    float block[BLOCK_SIDE * BLOCK_SIDE] __attribute__((aligned(ALIGNMENT)));
    float *sums = to->sums + row * to->stride + column;
    int is_plain = !to->out && !to->bias && !to->apply_relu && !to->relu_input && !to->row_scales &&
                   columns >= BLOCK_SIDE;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (is_plain && to->accumulate) MOVE_SUMS(_tile_loadd, sums, to->stride);
    int64_t group = 0;
    for (; group + SIDE <= num_groups; group += SIDE)
        ADD_TILES(left + group, left_step, right + group * TILE_COLUMNS);
    if (group < num_groups) ADD_TILES(left_rest, rest_step, right_rest);
    if (is_plain) {
        MOVE_SUMS(_tile_stored, sums, to->stride);
        return;
    }
    MOVE_SUMS(_tile_stored, block, BLOCK_SIDE);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < min_of(columns, BLOCK_SIDE); c += LANES) {
            vec_float x = load_vec_float(block + r * BLOCK_SIDE + c, LANES);
            x = SUMS_TO_FLOAT(to, row + r, column + c, x);
            if (columns >= BLOCK_SIDE) write_vec(to, row + r, column + c, x, LANES);
            else write_vec_tail(to, row + r, column + c, x, columns - c);
        }
}

/* `gemm` of gemm.h. A left factor is read in place if group_step is 1; else it is transposed, and has at most
 * MAX_GROUPS k-groups. */
static inline void gemm(gemm_out to, int64_t rows, int64_t columns, const void *left, int64_t row_step,
                        int64_t group_step, const void *right, int64_t num_groups) {
    uint32_t transposed[ROW_BLOCK * MAX_GROUPS] __attribute__((aligned(ALIGNMENT)));
    uint32_t left_rest[BLOCK_SIDE * SIDE] __attribute__((aligned(ALIGNMENT)));
    uint32_t right_rest[SIDE * TILE_COLUMNS] __attribute__((aligned(ALIGNMENT)));
    int64_t whole = num_groups / SIDE * SIDE, rest = num_groups - whole, height = 0, end;
    if (rest) {
        memset(left_rest, 0, sizeof left_rest);
        memset(right_rest, 0, sizeof right_rest);
    }
    for (int64_t first = 0; first < rows; first = end) {
        int64_t step = min_of(rows - first, BLOCK_SIDE), padded = round_up(num_groups, SIDE);
        end = first + min_of((rows - first) / step * step, ROW_BLOCK);
        if (step != height) configure_tiles(height = step);
        if (group_step != 1)
            transpose_left(transposed, padded, (const uint32_t *)left + first, group_step, end - first,
                           num_groups);
        const uint32_t *tile = right;
        for (int64_t column = 0; column < columns; column += TILE_COLUMNS) {
            if (rest) memcpy(right_rest, tile + whole * TILE_COLUMNS, 4 * rest * TILE_COLUMNS);
            for (int64_t row = first; row < end; row += step) {
                const uint32_t *own = (const uint32_t *)left + row * row_step, *own_rest = left_rest;
                int64_t own_step = row_step, rest_step = SIDE;
                if (group_step != 1) {
                    own = transposed + (row - first) * padded, own_rest = own + whole;
                    own_step = rest_step = padded;
                } else if (rest)
                    for (int64_t r = 0; r < step; r++)
                        memcpy(left_rest + r * SIDE, own + r * own_step + whole, 4 * rest);
                WRITE_MEMORY;
                for (int64_t c = 0; c < TILE_COLUMNS && column + c < columns; c += BLOCK_SIDE)
                    multiply_block(&to, row, column + c, step, columns - column - c, own, own_step, own_rest,
                                   rest_step, tile + c, right_rest + c, num_groups);
            }
            tile += num_groups * TILE_COLUMNS;
        }
    }
    _tile_release();
}
