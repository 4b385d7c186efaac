/* All layers of a post-norm encoder, and those of a decoder for the newest position of each hypothesis, in
 * float: one call, with the same results as a call for each operation. */
#include "vec.h"

#ifndef BF16

/* Buffers for `rows` positions: `projected` [rows, max(3 d, d_ff)], `mixed`, `out` and `normed` [rows, d],
 * and `moments` [2, rows]. */
typedef struct {
    float *projected, *mixed, *out, *normed, *moments; /* `projected` is NULL if there is no memory */
} work_space;

static work_space allocate(int64_t rows, int64_t d, int64_t d_ff) {
    int64_t wide = 3 * d > d_ff ? 3 * d : d_ff;
    float *projected = alloc_floats(rows * (wide + 3 * d + 2));
    if (!projected) return (work_space){0};
    float *mixed = projected + rows * wide, *out = mixed + rows * d, *normed = out + rows * d;
    return (work_space){projected, mixed, out, normed, normed + rows * d};
}

/* Operations of a layer on `rows` positions, each skipped once `result` is an error. `from` [rows, d] are the
 * states, `to` [rows, d] is the buffer that the next norm writes to, and `own` is the layer. */
#define DO(call) if (result == OPS_OK) result = call
#define LINEAR(y, map, z, m, apply_relu) /* z [rows, m] = y w^T + bias, for y [rows, d] */ \
    DO(packed_linear_float(&own->map, y, z, rows, d, m, apply_relu))
#define ADD_NORM(y, number) /* from = LayerNorm(from + y); exchanges the buffers `from` and `to` */ \
    DO(add_norm_float(from, y, own->gain_##number, own->norm_bias_##number, to, work.moments, \
                      work.moments + rows, rows, d, own->eps_##number, 0, 1.0f, 0)); \
    do { \
        float *normed = to; \
        to = from, from = normed; \
    } while (0)
#define FEED_FORWARD(hidden, y) /* y [rows, d]; hidden [rows, d_ff] is a buffer */ \
    LINEAR(from, inner, hidden, at->d_ff, 1); \
    DO(packed_linear_sparse_float(&own->outer, hidden, y, rows, at->d_ff, d))

/* All layers of an encoder, in place: x [b, s, d] is the input of the first, and becomes the output of the
 * last.
 *   layers: [num_layers]; keep: bytes [b, s], 0 masks a position. */
static status encode(const encoder_shape *at, const stack_layer *layers, const uint8_t *keep, float *x) {
    int64_t rows = at->b * at->s, d = at->heads * at->k;
    attention_shape shape = {
        .b = at->b, .h = at->heads, .t = at->s, .s = at->s, .k = at->k,
        .q_strides = {3 * d * at->s, at->k, 3 * d}, .k_strides = {3 * d * at->s, at->k, 3 * d},
        .v_strides = {3 * d * at->s, at->k, 3 * d}, .out_strides = {d * at->s, at->k, d},
        .keep_strides = {at->s, 0, 0, 1}, .scale = at->scale, .dropout_scale = 1.0f};
    work_space work = allocate(rows, d, at->d_ff);
    if (!work.projected) return OPS_NO_MEMORY;
    float *projected = work.projected, *mixed = work.mixed, *out = work.out;
    float *from = x, *to = work.normed;
    status result = OPS_OK;
    for (int64_t i = 0; i < at->num_layers; i++) {
        const stack_layer *own = layers + i;
        LINEAR(from, self_in, projected, 3 * d, 0);
        DO(attention_float(&shape, projected, projected + d, projected + 2 * d, keep, mixed));
        LINEAR(mixed, self_out, out, d, 0);
        ADD_NORM(out, 1);
        FEED_FORWARD(projected, out);
        ADD_NORM(out, 3);
    }
    if (result == OPS_OK && from != x) memcpy(x, from, rows * d * sizeof *x);
    free(work.projected);
    return result;
}

/* x [d] = row * scale + encoding; rounded after each operation, as in PyTorch. */
static void embed(const float *row, const float *encoding, float scale, int64_t d, float *x) {
    for (int64_t i = 0; i < d; i++) x[i] = row[i] * scale;
    __asm__ volatile("" ::: "memory"); /* a barrier: no fused multiply-add */
    for (int64_t i = 0; i < d; i++) x[i] += encoding[i];
}

/* Move the rows of x [rows, d] whose slot is not negative to the front; return their number. */
static int64_t drop_padding(float *x, const int64_t *slots, int64_t rows, int64_t d) {
    int64_t count = 0;
    for (int64_t n = 0; n < rows; n++) {
        if (slots[n] < 0) continue;
        if (count < n) memcpy(x + count * d, x + n * d, d * sizeof *x);
        count++;
    }
    return count;
}

/* Write `width` floats to a row of a cache. */
static inline void write_row(void *cache, int64_t row, const float *from, int64_t width, int64_t in_bf16) {
    if (in_bf16) round_floats(from, (bf16 *)cache + row * width, width);
    else memcpy((float *)cache + row * width, from, width * sizeof *from);
}

status encode_sources_float(const encoder_shape *at, const stack_layer *layers, const sources_shape *to,
                            const linear_map *maps, void *const *pools, const float *table,
                            const float *encodings, const int64_t *ids, const int64_t *slots) {
    int64_t rows = at->b * at->s, d = at->heads * at->k;
    if (!all_below(ids, rows, to->num_tokens)) return OPS_BAD_INDEX;
    for (int64_t n = 0; n < rows; n++)
        if (slots[n] >= to->pool_rows) return OPS_BAD_INDEX;
    float *x = alloc_floats(rows * 3 * d + rows / 4 + 1);
    if (!x) return OPS_NO_MEMORY;
    float *projected = x + rows * d; /* [rows, 2 d] */
    uint8_t *keep = (uint8_t *)(projected + rows * 2 * d);
    for (int64_t n = 0; n < rows; n++) {
        const float *encoding = encodings + min_of(n % at->s, to->num_encodings - 1) * d;
        embed(table + ids[n] * d, encoding, to->table_scale, d, x + n * d);
        keep[n] = slots[n] >= 0;
    }
    status result = encode(at, layers, keep, x);
    int64_t count = drop_padding(x, slots, rows, d);
    for (int64_t i = 0; i < to->num_pools; i++) {
        DO(packed_linear_float(maps + i, x, projected, count, d, 2 * d, 0));
        const float *from = projected;
        for (int64_t n = 0; n < rows && result == OPS_OK; n++) {
            if (slots[n] < 0) continue;
            write_row(pools[i], slots[n], from, 2 * d, to->in_bf16);
            from += 2 * d;
        }
    }
    free(x);
    return result;
}

/* Write the keys and values in `projected` [rows, 3 d], which follow the queries, to the cache row of the
 * last slot of each hypothesis. */
static status write_cache(const decoder_shape *at, const float *projected, const int64_t *slots,
                          void *past) {
    int64_t d = at->heads * at->k;
    for (int64_t n = 0; n < at->rows; n++) {
        int64_t slot = slots[n * at->past_stride + at->past_count - 1];
        if ((uint64_t)slot >= (uint64_t)at->past_rows) return OPS_BAD_INDEX;
        write_row(past, slot, projected + (3 * n + 1) * d, 2 * d, at->in_bf16);
    }
    return OPS_OK;
}

/* x [rows, d], the input of the first decoder layer. */
static status embed_all(const decoder_shape *at, const int64_t *ids, const int64_t *positions,
                        const float *table, const float *encodings, float *x) {
    int64_t d = at->heads * at->k;
    if (!all_below(ids, at->rows, at->num_tokens)) return OPS_BAD_INDEX;
    for (int64_t n = 0; n < at->rows; n++) {
        if (positions[n] < 0) return OPS_BAD_INDEX;
        const float *added = encodings + min_of(positions[n], at->num_encodings - 1) * d;
        embed(table + ids[n] * d, added, at->table_scale, d, x + n * d);
    }
    return OPS_OK;
}

status decoder_step_float(const decoder_shape *at, const stack_layer *layers, void *const *pasts,
                          const void *const *sources, const int64_t *ids, const int64_t *positions,
                          const float *table, const float *encodings, const int64_t *past_slots,
                          const int64_t *source_slots, float *states) {
    int64_t rows = at->rows, d = at->heads * at->k;
    const int64_t *seen_slots = past_slots + at->past_count - at->past_window;
    work_space work = allocate(rows, d, at->d_ff);
    if (!work.projected) return OPS_NO_MEMORY;
    float *projected = work.projected, *mixed = work.mixed, *out = work.out;
    float *from = states, *to = work.normed;
    status result = embed_all(at, ids, positions, table, encodings, states);
    for (int64_t i = 0; i < at->num_layers; i++) {
        const stack_layer *own = layers + i;
        LINEAR(from, self_in, projected, 3 * d, 0);
        DO(write_cache(at, projected, past_slots, pasts[i]));
        DO(paged_attention_float(projected, pasts[i], seen_slots, mixed, rows, at->past_window, at->heads,
                                 at->k, at->past_rows, 3 * d, at->past_stride, at->in_bf16, at->scale));
        LINEAR(mixed, self_out, out, d, 0);
        ADD_NORM(out, 1);
        LINEAR(from, queries, projected, d, 0);
        DO(paged_attention_float(projected, sources[i], source_slots, mixed, rows, at->source_count,
                                 at->heads, at->k, at->source_rows, d, at->source_stride, at->in_bf16, at->scale));
        LINEAR(mixed, cross_out, out, d, 0);
        ADD_NORM(out, 2);
        FEED_FORWARD(projected, out);
        ADD_NORM(out, 3);
    }
    if (result == OPS_OK && from != states) memcpy(states, from, rows * d * sizeof *states);
    free(work.projected);
    return result;
}

#endif
