/* Scaled dot-product attention, its gradients, and paged attention for decoding. */
#include "gemm.h"

#define KEY_BLOCK 8 /* keys whose scores are computed at once */

static inline float *alloc_zeros(int64_t count) {
    float *numbers = alloc_floats(count);
    return numbers ? memset(numbers, 0, 4 * count) : NULL;
}

/* bias [s, width], added to the scores of a head: 0 where `keep` is set, else the lowest float, which absorbs
 * any score, so that a query whose keys are all masked has equal weights. */
static inline void fill_bias(float *bias, const uint8_t *keep, const attention_shape *at,
                             int64_t width) {
    const int64_t *strides = at->keep_strides;
    for (int64_t j = 0; j < at->s; j++, bias += width)
        for (int64_t i = 0; i < at->t; i++)
            bias[i] = keep[i * strides[2] + j * strides[3]] ? 0.0f : -3.40282347e38f;
}

/* In place: softmax of each column of scores [keys, width] * scale + bias. */
static inline void softmax(float *scores, const float *bias, int64_t keys, int64_t width,
                           float scale) {
    for (int64_t w = 0; w < width; w += LANES) {
        float tops[LANES], sums[LANES];
        for (int64_t i = 0; i < LANES; i++) tops[i] = -INFINITY, sums[i] = 0.0f;
        for (int64_t j = 0; j < keys; j++) {
            float *restrict row = scores + j * width + w;
            const float *added = bias + j * width + w;
#pragma omp simd
            for (int64_t i = 0; i < LANES; i++) {
                row[i] = row[i] * scale + added[i];
                tops[i] = row[i] > tops[i] ? row[i] : tops[i];
            }
        }
        for (int64_t j = 0; j < keys; j++) {
            float *restrict row = scores + j * width + w;
#pragma omp simd
            for (int64_t i = 0; i < LANES; i++) {
                row[i] = exp_(row[i] - tops[i]);
                sums[i] += row[i];
            }
        }
        for (int64_t i = 0; i < LANES; i++) sums[i] = 1.0f / sums[i];
        for (int64_t j = 0; j < keys; j++)
            for (int64_t i = 0; i < LANES; i++) scores[j * width + w + i] *= sums[i];
    }
}

/* The dropout factors, 0 or the scale, of the weights of one key for `width` queries; `first` is the dropout
 * index of the first query. */
static inline void fill_dropout(float *factors, const attention_shape *at, uint32_t first,
                               int64_t width) {
    for (int64_t i = 0; i < width; i++)
        factors[i] = apply_dropout(1.0f, first + (uint32_t)(i * at->s), at->seed, at->cut, at->dropout_scale);
}

/* c [n, k] = a b scale, up to four rows and `vectors` vectors of columns: k-group i of row r of a is at
 * r * a_row + i * a_column, b is packed by pack_columns. */
static INLINE void product_tile(elem *c, int64_t c_row, int64_t n, int64_t k, const elem *a, int64_t a_row,
                                int64_t a_column, const uint32_t *b, int64_t inner, int64_t wide, float scale,
                                int vectors) {
    vec_float sums[4][2] = {{{0}}};
    for (int64_t i = 0; i < inner; i++)
        for (int v = 0; v < vectors; v++) {
            vec_u32 others;
            memcpy(&others, b + i * wide + v * LANES, sizeof others);
            for (int j = 0; j < 4; j++) {
                uint32_t group;
                memcpy(&group, a + j * a_row + i * a_column, sizeof group);
                sums[j][v] = mul_add(sums[j][v], group, others);
            }
        }
    for (int j = 0; j < 4 && j < n; j++)
        for (int v = 0; v < vectors; v++)
            store_vec(c + j * c_row + v * LANES, sums[j][v] * scale, min_of(k - v * LANES, LANES));
}

/* c [n, k] = a b scale, by tiles. */
static inline void product(elem *restrict c, int64_t c_row, int64_t n, int64_t k,
                                 const elem *restrict a, int64_t a_row, int64_t a_column,
                                 const uint32_t *restrict b, int64_t inner, int64_t wide,
                                 float scale) {
    for (int64_t r = 0; r < n; r += 4, a += 4 * a_row, c += 4 * c_row) {
        int64_t w = 0;
        for (; w + 2 * LANES <= wide; w += 2 * LANES)
            product_tile(c + w, c_row, n - r, k - w, a, a_row, a_column, b + w, inner, wide,
                               scale, 2);
        if (w < wide)
            product_tile(c + w, c_row, n - r, k - w, a, a_row, a_column, b + w, inner, wide,
                               scale, 1);
    }
}

/* The transpose of scores [n, width] as a left factor [width, n] of k-groups: in `buffer` for bfloat16; for
 * float, the scores themselves. */
static inline const elem *transpose_scores(elem *buffer, const float *scores, int64_t n, int64_t width) {
    elem *to = buffer;
    if (K_GROUP == 1) return (const elem *)scores;
    for (int64_t i = 0; i < n; i += K_GROUP)
        for (int64_t w = 0; w < width; w += LANES, to += LANES * K_GROUP) {
            vec_float own, below = {0};
            memcpy(&own, scores + i * width + w, sizeof own);
            if (i + 1 < n) memcpy(&below, scores + (i + 1) * width + w, sizeof below);
            vec_u32 both = pair(round_trip(own), round_trip(below));
            memcpy(to, &both, sizeof both);
        }
    return buffer;
}

/* Scores rounded to elem, as a left factor: in `buffer` for bfloat16; for float, the scores themselves. */
static inline const elem *round_scores(elem *buffer, const float *scores, int64_t count) {
    if (sizeof(elem) == sizeof(float)) return (const elem *)scores;
    for (int64_t i = 0; i < count; i += LANES) {
        vec_float own;
        memcpy(&own, scores + i, sizeof own);
        store_full(buffer + i, own);
    }
    return buffer;
}

/* Load a vector of k-groups from a row with `left` remaining numbers, zero-padded. */
static inline vec_u32 load_groups(const elem *row, int64_t left) {
    elem numbers[sizeof(vec_u32) / sizeof(elem)] = {0};
    vec_u32 result;
    if (left * sizeof(elem) >= sizeof result) return *(vec_u32 *)memcpy(&result, row, sizeof result);
    for (int64_t i = 0; i < left; i++) numbers[i] = row[i];
    return *(vec_u32 *)memcpy(&result, numbers, sizeof result);
}

/* Pack the transpose of a head [n, k]: k-groups [ceil(k / K_GROUP), width], zero-padded. */
static inline void pack_transposed(uint32_t *to, const elem *from, int64_t stride, int64_t n,
                                    int64_t k, int64_t width) {
    int64_t num_groups = round_up(k, K_GROUP) / K_GROUP;
    for (int64_t row = 0; row < width; row += LANES)
        for (int64_t group = 0; group < num_groups; group += LANES) {
            vec_u32 block[LANES];
            for (int64_t i = 0; i < LANES; i++) {
                const elem *own = from + (row + i) * stride + group * K_GROUP;
                block[i] = row + i < n ? load_groups(own, k - group * K_GROUP) : (vec_u32){0};
            }
            transpose(block);
            for (int64_t i = 0; i < LANES && group + i < num_groups; i++)
                memcpy(to + (group + i) * width + row, &block[i], sizeof *block);
        }
}

/* Add the products of the k-group at `at`, of `size` numbers, to the scores of KEY_BLOCK rows. */
static INLINE void add_products(vec_float *sums, const elem *const *rows, int64_t at, int64_t size,
                                const uint32_t *across) {
    vec_u32 others;
    memcpy(&others, across, sizeof others);
    for (int r = 0; r < KEY_BLOCK; r++) {
        uint32_t group = 0;
        memcpy(&group, rows[r] + at, size * sizeof(elem));
        sums[r] = mul_add(sums[r], group, others);
    }
}

/* scores [n, width] = a head [n, k] times the transpose of another, packed by pack_transposed in `across`;
 * rows up to the next multiple of KEY_BLOCK are written. */
static inline void compute_scores(float *scores, const elem *head, int64_t stride, int64_t n,
                               int64_t k, const uint32_t *across, int64_t width) {
    for (int64_t j = 0; j < n; j += KEY_BLOCK) {
        const elem *rows[KEY_BLOCK];
        for (int r = 0; r < KEY_BLOCK; r++) rows[r] = head + min_of(j + r, n - 1) * stride;
        for (int64_t w = 0; w < width; w += LANES) {
            vec_float sums[KEY_BLOCK] = {{0}};
            const uint32_t *others = across + w;
            int64_t i = 0;
            for (; i + K_GROUP <= k; i += K_GROUP, others += width)
                add_products(sums, rows, i, K_GROUP, others);
            if (i < k) add_products(sums, rows, i, 1, others);
            for (int r = 0; r < KEY_BLOCK; r++)
                memcpy(scores + (j + r) * width + w, &sums[r], sizeof(vec_float));
        }
    }
}

/* Prefetch the rows of a head: their stride is too large for the hardware prefetcher. */
static inline void prefetch(const elem *head, int64_t stride, int64_t n) {
    for (int64_t i = 0; i < n; i++) __builtin_prefetch(head + i * stride);
}

/* The first element of a head. */
static inline const elem *head(const elem *of, const int64_t *strides, int64_t b, int64_t h) {
    return of + b * strides[0] + h * strides[1];
}

/* Scores are [keys, queries]: a vector holds LANES queries, so that sums over keys need no
 * reduction within a vector. */
status FUNCTION(attention)(const attention_shape *at, const elem *q, const elem *k, const elem *v,
                    const uint8_t *keep, elem *out) {
    int64_t keys = round_up(at->s, KEY_BLOCK);
    int64_t width = round_up(at->t, LANES), wide = round_up(at->k, LANES);
    const int64_t *qt = at->q_strides, *kt = at->k_strides, *vt = at->v_strides;
    const int64_t *ot = at->out_strides, *mt = at->keep_strides;
    float *probs = alloc_zeros((at->k + 3 * keys + 1) * width + keys * wide);
    if (!probs) return OPS_NO_MEMORY;
    float *bias = probs + keys * width, *factors = bias + keys * width;
    elem *factor = (elem *)(factors + width);
    uint32_t *vs_down = (uint32_t *)(factors + (keys + 1) * width), *qs_across = vs_down + keys * wide;
    const uint8_t *seen = NULL;
    for (int64_t n = 0; n < at->b * at->h; n++) {
        int64_t b = n / at->h, h = n % at->h;
        int64_t next_b = (n + 1) / at->h % at->b, next_h = (n + 1) % at->h;
        prefetch(head(q, qt, next_b, next_h), qt[2], at->t);
        prefetch(head(k, kt, next_b, next_h), kt[2], at->s);
        prefetch(head(v, vt, next_b, next_h), vt[2], at->s);
        const uint8_t *own = keep ? keep + b * mt[0] + h * mt[1] : NULL;
        if (own != seen) fill_bias(bias, own, at, width);
        seen = own;
        prefetch(head(out, ot, b, h), ot[2], at->t);
        pack_transposed(qs_across, head(q, qt, b, h), qt[2], at->t, at->k, width);
        pack_columns(vs_down, head(v, vt, b, h), at->s, vt[2], at->k, wide);
        compute_scores(probs, head(k, kt, b, h), kt[2], at->s, at->k, qs_across, width);
        softmax(probs, bias, at->s, width, at->scale);
        uint32_t first = (uint32_t)(n * at->t * at->s);
        for (int64_t j = 0; at->cut && j < at->s; j++) {
            fill_dropout(factors, at, first + (uint32_t)j, width);
            for (int64_t i = 0; i < width; i++) probs[j * width + i] *= factors[i];
        }
        product(out + b * ot[0] + h * ot[1], ot[2], at->t, at->k,
                      transpose_scores(factor, probs, at->s, width), K_GROUP, K_GROUP * width, vs_down,
                      round_up(at->s, K_GROUP) / K_GROUP, wide, 1.0f);
    }
    free(probs);
    return OPS_OK;
}

/* Scores are [keys, queries], as in attention; `slopes` are the gradients of the weights, then those
 * of the scores. */
status FUNCTION(attention_grad)(const attention_shape *at, const elem *grad, const elem *q,
                         const elem *k, const elem *v, const uint8_t *keep, elem *grad_q,
                         elem *grad_k, elem *grad_v) {
    int64_t keys = round_up(at->s, KEY_BLOCK);
    int64_t width = round_up(at->t, LANES), wide = round_up(at->k, LANES);
    int64_t num_t = round_up(at->t, K_GROUP) / K_GROUP, num_s = round_up(at->s, K_GROUP) / K_GROUP;
    const int64_t *qt = at->q_strides, *kt = at->k_strides, *vt = at->v_strides;
    const int64_t *ot = at->out_strides, *mt = at->keep_strides, *gq = at->grad_q_strides;
    const int64_t *gk = at->grad_k_strides, *gv = at->grad_v_strides;
    int64_t across = at->k * width, square = keys * width, down = width * wide;
    float *probs = alloc_zeros(4 * square + 2 * across + 2 * down + keys * wide + 2 * width);
    if (!probs) return OPS_NO_MEMORY;
    float *slopes = probs + square, *bias = slopes + square, *factors = bias + square;
    float *along = factors + width;
    elem *factor = (elem *)(along + width);
    uint32_t *qs_across = (uint32_t *)(along + width) + square, *gs_across = qs_across + across;
    uint32_t *qs_down = gs_across + across, *gs_down = qs_down + down, *ks_down = gs_down + down;
    const uint8_t *seen = NULL;
    for (int64_t i = 0; i < width; i++) factors[i] = 1.0f;
    for (int64_t n = 0; n < at->b * at->h; n++) {
        int64_t b = n / at->h, h = n % at->h;
        int64_t next_b = (n + 1) / at->h % at->b, next_h = (n + 1) % at->h;
        prefetch(head(q, qt, next_b, next_h), qt[2], at->t);
        prefetch(head(grad, ot, next_b, next_h), ot[2], at->t);
        prefetch(head(k, kt, next_b, next_h), kt[2], at->s);
        prefetch(head(v, vt, next_b, next_h), vt[2], at->s);
        const uint8_t *own = keep ? keep + b * mt[0] + h * mt[1] : NULL;
        if (own != seen) fill_bias(bias, own, at, width);
        seen = own;
        const elem *own_q = head(q, qt, b, h), *own_grad = head(grad, ot, b, h);
        const elem *own_k = head(k, kt, b, h), *own_v = head(v, vt, b, h);
        pack_columns(qs_down, own_q, at->t, qt[2], at->k, wide);
        pack_columns(gs_down, own_grad, at->t, ot[2], at->k, wide);
        pack_columns(ks_down, own_k, at->s, kt[2], at->k, wide);
        pack_transposed(qs_across, own_q, qt[2], at->t, at->k, width);
        pack_transposed(gs_across, own_grad, ot[2], at->t, at->k, width);
        compute_scores(probs, own_k, kt[2], at->s, at->k, qs_across, width);
        compute_scores(slopes, own_v, vt[2], at->s, at->k, gs_across, width);
        softmax(probs, bias, at->s, width, at->scale);
        uint32_t first = (uint32_t)(n * at->t * at->s);
        memset(along, 0, width * sizeof(float));
        for (int64_t j = 0; j < at->s; j++) {
            const float *weights = probs + j * width;
            float *restrict slope = slopes + j * width;
            if (at->cut) fill_dropout(factors, at, first + (uint32_t)j, width);
            for (int64_t i = 0; i < width; i++) {
                slope[i] *= factors[i];
                along[i] += slope[i] * weights[i];
            }
        }
        for (int64_t j = 0; j < at->s; j++) {
            float *restrict weights = probs + j * width, *restrict slope = slopes + j * width;
            for (int64_t i = 0; i < width; i++) slope[i] = weights[i] * (slope[i] - along[i]);
            if (!at->cut) continue;
            fill_dropout(factors, at, first + (uint32_t)j, width);
            for (int64_t i = 0; i < width; i++) weights[i] *= factors[i];
        }
        product(grad_q + b * gq[0] + h * gq[1], gq[2], at->t, at->k,
                      transpose_scores(factor, slopes, at->s, width), K_GROUP, K_GROUP * width, ks_down, num_s,
                      wide, at->scale);
        product(grad_k + b * gk[0] + h * gk[1], gk[2], at->s, at->k,
                      round_scores(factor, slopes, at->s * width), width, K_GROUP, qs_down, num_t, wide,
                      at->scale);
        product(grad_v + b * gv[0] + h * gv[1], gv[2], at->s, at->k,
                      round_scores(factor, probs, at->s * width), width, K_GROUP, gs_down, num_t, wide,
                      1.0f);
    }
    free(probs);
    return OPS_OK;
}

/* Prefetch numbers `from` to `to` - 1 of a row of a cache, of `size` bytes each. */
static INLINE void prefetch_cached(const char *row, int64_t from, int64_t to, int64_t size) {
    for (int64_t i = from * size; i < to * size; i += ALIGNMENT) __builtin_prefetch(row + i, 0, 2);
}

/* Load `n` numbers, at most a vector, from number `at` of a row of a cache, zero-padded; `size` is the size
 * of a number in bytes, that of bfloat16 or of elem. */
static INLINE vec_float load_cached(const char *row, int64_t at, int64_t n, int64_t size) {
    if (size == sizeof(elem)) return load_vec((const elem *)row + at, min_of(n, LANES));
    const bf16 *from = (const bf16 *)row + at;
    vec_half numbers = {0};
    if (n >= LANES) memcpy(&numbers, from, sizeof numbers);
    else
        for (int64_t i = 0; i < n; i++) numbers[i] = from[i];
    return (vec_float)(widen(numbers) << 16);
}

/* The attention of one query, all heads, to the `length` cache rows `seen`, of numbers of `size` bytes.
 * `probs` is a buffer of `length` numbers, rounded up to whole vectors. Each head prefetches a part of the
 * `num_next` rows of the next query: all at once would exceed the outstanding loads of the memory system. */
static INLINE void attend_slots(const elem *query, const char *const *seen, int64_t size, int64_t length,
                                const char *const *next, int64_t num_next, float *probs, elem *out,
                                int64_t heads, int64_t k, float scale) {
    int64_t padded = round_up(length, LANES);
    for (int64_t h = 0; h < heads; h++) {
        for (int64_t t = num_next * h / heads; t < num_next * (h + 1) / heads; t++)
            prefetch_cached(next[t], 0, 2 * heads * k, size);
        for (int64_t t = length; t < padded; t++) probs[t] = -INFINITY;
        for (int64_t t = 0; t < length; t++) {
            vec_float dots = {0};
#pragma GCC unroll 8
            for (int64_t i = 0; i < k; i += LANES)
                dots += load_vec(query + h * k + i, min_of(k - i, LANES)) *
                        load_cached(seen[t], h * k + i, k - i, size);
            probs[t] = sum_of(dots) * scale;
        }
        float top = -INFINITY, sum = 0.0f;
        for (int64_t t = 0; t < length; t++) top = probs[t] > top ? probs[t] : top;
        for (int64_t first = 0; first < padded; first += LANES) {
            vec_float powers;
            for (int64_t t = 0; t < LANES; t++) powers[t] = exp_(probs[first + t] - top);
            memcpy(probs + first, &powers, sizeof powers);
            sum += sum_of(powers);
        }
        float share = 1.0f / sum;
        for (int64_t first = 0; first < k; first += 4 * LANES) {
            vec_float mix[4] = {{0}};
            for (int64_t t = 0; t < length; t++)
#pragma GCC unroll 4
                for (int64_t i = 0; i < 4; i++) {
                    int64_t at = first + i * LANES;
                    if (at < k) mix[i] += probs[t] * load_cached(seen[t], (heads + h) * k + at, k - at, size);
                }
            for (int64_t i = 0; i < 4 * LANES && first + i < k; i++)
                out[h * k + first + i] = save(mix[i / LANES][i % LANES] * share);
        }
    }
}

#define FOUR 4 /* heads that are computed at once */

/* Reduce a vector of which lane i belongs to head i % 4: each lane becomes the result of its head. */
#define FOLD(x, combine) do { \
        vec_float4 parts[LANES / FOUR]; \
        memcpy(parts, &(x), sizeof parts); \
        for (int i = 1; i < LANES / FOUR; i++) \
            for (int h = 0; h < FOUR; h++) parts[0][h] = combine(parts[0][h], parts[i][h]); \
        for (int i = 1; i < LANES / FOUR; i++) parts[i] = parts[0]; \
        memcpy(&(x), parts, sizeof parts); \
    } while (0)
#define PLUS(a, b) ((a) + (b))
#define GREATER(a, b) ((a) > (b) ? (a) : (b))

/* attend_slots for four heads, the first at number `at` of a row; `width` is d, and k a multiple of LANES.
 * `probs` is a buffer of four numbers for each slot, rounded up to whole vectors. The keys of the next query
 * are prefetched while keys are read, its values while values are read. */
static INLINE void attend_four(const elem *query, const char *const *seen, int64_t size, int64_t at,
                               int64_t length, const char *const *next, int64_t num_next, float *probs,
                               elem *out, int64_t width, int64_t k, float scale) {
    int64_t count = FOUR * length;
    for (int64_t t = 0; t < length; t++) {
        vec_float dots[FOUR] = {{0}};
#pragma GCC unroll 4
        for (int64_t h = 0; h < FOUR; h++)
#pragma GCC unroll 4
            for (int64_t i = h * k; i < (h + 1) * k; i += LANES)
                dots[h] += load_vec(query + i, LANES) * load_cached(seen[t], at + i, LANES, size);
        vec_float even = ZIP(dots[0], dots[2], LOW_HALF) + ZIP(dots[0], dots[2], HIGH_HALF);
        vec_float odd = ZIP(dots[1], dots[3], LOW_HALF) + ZIP(dots[1], dots[3], HIGH_HALF);
        vec_float scores = (ZIP(even, odd, LOW_HALF) + ZIP(even, odd, HIGH_HALF)) * scale;
        FOLD(scores, PLUS);
        memcpy(probs + FOUR * t, &scores, FOUR * sizeof *probs);
        if (t < num_next) prefetch_cached(next[t], at, at + FOUR * k, size);
    }
    for (int64_t i = count; i < round_up(count, LANES); i++) probs[i] = -INFINITY;
    vec_float tops = -INFINITY - (vec_float){0}, sums = {0};
    for (int64_t first = 0; first < count; first += LANES) {
        vec_float own;
        memcpy(&own, probs + first, sizeof own);
        for (int64_t i = 0; i < LANES; i++) tops[i] = GREATER(own[i], tops[i]);
    }
    FOLD(tops, GREATER);
    for (int64_t first = 0; first < count; first += LANES) {
        vec_float powers;
        for (int64_t i = 0; i < LANES; i++) powers[i] = exp_(probs[first + i] - tops[i]);
        memcpy(probs + first, &powers, sizeof powers);
        sums += powers;
    }
    FOLD(sums, PLUS);
    vec_float mix[FOUR][FOUR] = {{{0}}};
    for (int64_t t = 0; t < length; t++) {
        if (t < num_next) prefetch_cached(next[t], width + at, width + at + FOUR * k, size);
#pragma GCC unroll 4
        for (int64_t h = 0; h < FOUR; h++)
#pragma GCC unroll 4
            for (int64_t i = 0; i < k; i += LANES)
                mix[h][i / LANES] +=
                    probs[FOUR * t + h] * load_cached(seen[t], width + at + h * k + i, LANES, size);
    }
#pragma GCC unroll 4
    for (int64_t h = 0; h < FOUR; h++)
#pragma GCC unroll 4
        for (int64_t i = 0; i < k; i += LANES)
            store_full(out + h * k + i, mix[h][i / LANES] * (1.0f / sums[h]));
}

/* Collect pointers to the cache rows, of `width` bytes, of the slots that are not negative; return their
 * number, or -1 if a slot is out of range. */
static inline int64_t gather_rows(const char **found, const char *cache, const int64_t *slots,
                                  int64_t count, int64_t cache_rows, int64_t width) {
    int64_t length = 0, last = -1;
    for (int64_t t = 0; t < count; t++) { /* without a branch: it would be mispredicted */
        int64_t slot = slots[t];
        found[length] = cache + ((uint64_t)slot < (uint64_t)cache_rows ? slot : 0) * width;
        length += slot >= 0;
        last = slot > last ? slot : last;
    }
    return last < cache_rows ? length : -1;
}

/* The attention of one query by attend_four if it supports the heads, else by attend_slots. k of attend_four,
 * and `size`, are constants where they are inlined. */
static INLINE void attend(const elem *query, const char *const *seen, int64_t size, int64_t length,
                          const char *const *next, int64_t num_next, float *probs, elem *out, int64_t heads,
                          int64_t k, float scale) {
#define ATTEND_FOUR(k) \
    for (int64_t i = 0; i < heads * k; i += FOUR * k) \
    attend_four(query + i, seen, size, i, length, next, num_next, probs, out + i, heads * k, k, scale)
    if (k == 32 && heads % FOUR == 0 && k <= FOUR * LANES) ATTEND_FOUR(32);
    else if (k == 64 && heads % FOUR == 0 && k <= FOUR * LANES) ATTEND_FOUR(64);
    else attend_slots(query, seen, size, length, next, num_next, probs, out, heads, k, scale);
#undef ATTEND_FOUR
}

/* While a query is computed, the cache rows of the next one are prefetched. */
status FUNCTION(paged_attention)(const elem *q, const void *cache, const int64_t *slots, elem *out,
                 int64_t rows, int64_t count, int64_t heads, int64_t k, int64_t cache_rows,
                 int64_t q_stride, int64_t slots_stride, int64_t in_bf16, float scale) {
    int64_t padded = round_up(FOUR * count, LANES);
    float *probs = alloc_floats(padded + 2 * count * (int64_t)sizeof(char *) / 4);
    if (!probs) return OPS_NO_MEMORY;
    const char **found = (const char **)(probs + padded);
    int64_t width = 2 * heads * k * (in_bf16 ? sizeof(bf16) : sizeof(elem)), num_next = 0;
    if (rows) num_next = gather_rows(found, cache, slots, count, cache_rows, width);
    for (int64_t n = 0; n < rows && num_next >= 0; n++) {
        const char **seen = found + n % 2 * count, **next = found + (n + 1) % 2 * count;
        const elem *query = q + n * q_stride;
        elem *to = out + n * heads * k;
        int64_t length = num_next;
        num_next = 0;
        if (n + 1 < rows)
            num_next = gather_rows(next, cache, slots + (n + 1) * slots_stride, count, cache_rows, width);
        if (num_next < 0) break;
        if (in_bf16) attend(query, seen, sizeof(bf16), length, next, num_next, probs, to, heads, k, scale);
        else attend(query, seen, sizeof(elem), length, next, num_next, probs, to, heads, k, scale);
    }
    free(probs);
    return num_next < 0 ? OPS_BAD_INDEX : OPS_OK;
}
