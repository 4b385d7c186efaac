/* Attention and its gradients for training, and that of one query at a time for decoding.
 *
 * Values are stored as float or as bfloat16 (STORE), and computed in float. Every function has a
 * plain twin in kernels.py. One thread runs each call.
 *
 * The file includes itself once for each type of storage.
 */
#ifndef STORE

#include "numbers.h"

static inline float *zeros(int64_t count) { return memset(room(count), 0, 4 * count); }

/* Four rows of c = a b, some vectors of their width; a constant where it is inlined. */
static inline __attribute__((always_inline)) void product_tile(float *c, const float *a,
                                                               const float *b, int64_t inner,
                                                               int64_t width, int64_t a_row,
                                                               int64_t a_column, int vectors) {
    lanes sums[4][2] = {{{0}}};
    for (int64_t i = 0; i < inner; i++)
        for (int v = 0; v < vectors; v++) {
            lanes values;
            memcpy(&values, b + i * width + v * LANES, sizeof values);
            for (int j = 0; j < 4; j++) sums[j][v] += a[j * a_row + i * a_column] * values;
        }
    for (int j = 0; j < 4; j++) memcpy(c + j * width, sums[j], vectors * sizeof(lanes));
}

/* c = a b for small matrices; element (r, i) of a lies at r * a_row + i * a_column. The rows come in
 * fours, and b and c have rows of whole lanes. */
static inline void product(float *restrict c, const float *restrict a, const float *restrict b,
                           int64_t rows, int64_t inner, int64_t width, int64_t a_row,
                           int64_t a_column) {
    for (int64_t r = 0; r < rows; r += 4) {
        const float *ar = a + r * a_row;
        int64_t w = 0;
        for (; w + 2 * LANES <= width; w += 2 * LANES)
            product_tile(c + r * width + w, ar, b + w, inner, width, a_row, a_column, 2);
        if (w < width)
            product_tile(c + r * width + w, ar, b + w, inner, width, a_row, a_column, 1);
    }
}

/* An attention's shape: b sentences, h heads, t queries, s keys, heads k wide; and its strides,
 * in elements, for sentence, head and position. */
typedef struct {
    int64_t b, h, t, s, k;
    int64_t q_strides[3], k_strides[3], v_strides[3], out_strides[3];
    int64_t grad_q_strides[3], grad_k_strides[3], grad_v_strides[3], keep_strides[4];
    float scale, dropout_scale;
    uint32_t cut, seed;
} attention_shape;

/* What is added to the scores of a head, a row for each key: 0 where it is kept, else a number that
 * swallows any score, so that a query that keeps nothing is even. */
static inline void fill_bias(float *bias, const uint8_t *keep, const attention_shape *at,
                             int64_t width) {
    const int64_t *strides = at->keep_strides;
    for (int64_t j = 0; j < at->s; j++, bias += width)
        for (int64_t i = 0; i < at->t; i++)
            bias[i] = keep[i * strides[2] + j * strides[3]] ? 0.0f : -3.40282347e38f;
}

/* Softmax of each column of scores [keys, width], times `scale`, plus a bias. */
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

/* What dropout makes of the weights of a key: a factor for each of `width` queries. */
static inline void fill_shares(float *shares, const attention_shape *at, uint32_t first,
                               int64_t width) {
    for (int64_t i = 0; i < width; i++)
        shares[i] = kept(1.0f, first + (uint32_t)(i * at->s), at->seed, at->cut, at->dropout_scale);
}

#define STORE bf16
#include "attention.c"
#undef STORE
#define STORE float
#include "attention.c"
#undef STORE

#else

/* Copy a head [n, k] into floats [n, width]; the columns beyond the last are left as they are. */
static inline void NAME(unpack)(float *restrict to, const STORE *restrict from, int64_t stride,
                                int64_t n, int64_t k, int64_t width) {
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < k; j++) to[i * width + j] = LOAD(from[i * stride + j]);
}

/* The same, transposed, into [k, width]. */
static inline void NAME(unpack_across)(float *restrict to, const STORE *restrict from,
                                       int64_t stride, int64_t n, int64_t k, int64_t width) {
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < k; j++) to[j * width + i] = LOAD(from[i * stride + j]);
}

static inline void NAME(pack)(STORE *restrict to, const float *restrict from, int64_t stride,
                              int64_t n, int64_t k, int64_t width, float scale) {
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < k; j++) to[i * stride + j] = SAVE(from[i * width + j] * scale);
}

/* Ask for the rows of a head before they are read: they lie too far apart to be foreseen. */
static inline void NAME(ask_for)(const STORE *head, int64_t stride, int64_t n) {
    for (int64_t i = 0; i < n; i++) __builtin_prefetch(head + i * stride);
}

/* out = dropout(softmax(q k^T scale)) v over the kept keys. Scores have a row for each key, so that
 * a vector holds as many queries and nothing is added up within one. */
void NAME(attention)(const attention_shape *at, const STORE *q, const STORE *k, const STORE *v,
                     const uint8_t *keep, STORE *out) {
    int64_t rows = round_up(at->t, 4), keys = round_up(at->s, 4);
    int64_t width = round_up(at->t, LANES), wide = round_up(at->k, LANES);
    const int64_t *qt = at->q_strides, *kt = at->k_strides, *vt = at->v_strides;
    const int64_t *ot = at->out_strides, *mt = at->keep_strides;
    float *qs_across = zeros((at->k + 2 * keys + 1) * width + (2 * keys + rows) * wide);
    float *probs = qs_across + at->k * width, *bias = probs + keys * width;
    float *shares = bias + keys * width, *ks = shares + width;
    float *vs = ks + keys * wide, *mixed = vs + keys * wide;
    const uint8_t *seen = NULL;
    for (int64_t n = 0; n < at->b * at->h; n++) {
        int64_t b = n / at->h, h = n % at->h;
        int64_t next_b = (n + 1) / at->h % at->b, next_h = (n + 1) % at->h;
        NAME(ask_for)(q + next_b * qt[0] + next_h * qt[1], qt[2], at->t);
        NAME(ask_for)(k + next_b * kt[0] + next_h * kt[1], kt[2], at->s);
        NAME(ask_for)(v + next_b * vt[0] + next_h * vt[1], vt[2], at->s);
        const uint8_t *own = keep ? keep + b * mt[0] + h * mt[1] : NULL;
        if (own != seen) fill_bias(bias, own, at, width);
        seen = own;
        NAME(unpack_across)(qs_across, q + b * qt[0] + h * qt[1], qt[2], at->t, at->k, width);
        NAME(unpack)(ks, k + b * kt[0] + h * kt[1], kt[2], at->s, at->k, wide);
        NAME(unpack)(vs, v + b * vt[0] + h * vt[1], vt[2], at->s, at->k, wide);
        product(probs, ks, qs_across, keys, at->k, width, wide, 1);
        softmax(probs, bias, at->s, width, at->scale);
        uint32_t first = (uint32_t)(n * at->t * at->s);
        for (int64_t j = 0; at->cut && j < at->s; j++) {
            fill_shares(shares, at, first + (uint32_t)j, width);
            for (int64_t i = 0; i < width; i++) probs[j * width + i] *= shares[i];
        }
        product(mixed, probs, vs, rows, at->s, wide, 1, width);
        NAME(pack)(out + b * ot[0] + h * ot[1], mixed, ot[2], at->t, at->k, wide, 1.0f);
    }
    free(qs_across);
}

/* The gradients of attention. */
void NAME(attention_grad)(const attention_shape *at, const STORE *grad, const STORE *q,
                          const STORE *k, const STORE *v, const uint8_t *keep, STORE *grad_q,
                          STORE *grad_k, STORE *grad_v) {
    int64_t rows = round_up(at->t, 4), keys = round_up(at->s, 4);
    int64_t width = round_up(at->t, LANES), wide = round_up(at->k, LANES);
    const int64_t *qt = at->q_strides, *kt = at->k_strides, *vt = at->v_strides;
    const int64_t *ot = at->out_strides, *mt = at->keep_strides, *gq = at->grad_q_strides;
    const int64_t *gk = at->grad_k_strides, *gv = at->grad_v_strides;
    int64_t across = at->k * width, square = keys * width, tall = rows * wide, broad = keys * wide;
    float *qs = zeros(3 * tall + 3 * broad + 2 * across + 3 * square + 2 * width);
    float *gs = qs + tall, *result_q = gs + tall, *ks = result_q + tall, *vs = ks + broad;
    float *result = vs + broad, *qs_across = result + broad, *gs_across = qs_across + across;
    float *probs = gs_across + across, *slopes = probs + square, *bias = slopes + square;
    float *shares = bias + square, *along = shares + width;
    const uint8_t *seen = NULL;
    for (int64_t i = 0; i < width; i++) shares[i] = 1.0f;
    for (int64_t n = 0; n < at->b * at->h; n++) {
        int64_t b = n / at->h, h = n % at->h;
        int64_t next_b = (n + 1) / at->h % at->b, next_h = (n + 1) % at->h;
        NAME(ask_for)(q + next_b * qt[0] + next_h * qt[1], qt[2], at->t);
        NAME(ask_for)(grad + next_b * ot[0] + next_h * ot[1], ot[2], at->t);
        NAME(ask_for)(k + next_b * kt[0] + next_h * kt[1], kt[2], at->s);
        NAME(ask_for)(v + next_b * vt[0] + next_h * vt[1], vt[2], at->s);
        const uint8_t *own = keep ? keep + b * mt[0] + h * mt[1] : NULL;
        if (own != seen) fill_bias(bias, own, at, width);
        seen = own;
        const STORE *own_q = q + b * qt[0] + h * qt[1], *own_grad = grad + b * ot[0] + h * ot[1];
        NAME(unpack)(qs, own_q, qt[2], at->t, at->k, wide);
        NAME(unpack)(gs, own_grad, ot[2], at->t, at->k, wide);
        NAME(unpack_across)(qs_across, own_q, qt[2], at->t, at->k, width);
        NAME(unpack_across)(gs_across, own_grad, ot[2], at->t, at->k, width);
        NAME(unpack)(ks, k + b * kt[0] + h * kt[1], kt[2], at->s, at->k, wide);
        NAME(unpack)(vs, v + b * vt[0] + h * vt[1], vt[2], at->s, at->k, wide);
        product(probs, ks, qs_across, keys, at->k, width, wide, 1);
        product(slopes, vs, gs_across, keys, at->k, width, wide, 1);
        softmax(probs, bias, at->s, width, at->scale);
        uint32_t first = (uint32_t)(n * at->t * at->s);
        memset(along, 0, width * sizeof(float));
        for (int64_t j = 0; j < at->s; j++) {
            const float *weights = probs + j * width;
            float *restrict slope = slopes + j * width;
            if (at->cut) fill_shares(shares, at, first + (uint32_t)j, width);
            for (int64_t i = 0; i < width; i++) {
                slope[i] *= shares[i];
                along[i] += slope[i] * weights[i];
            }
        }
        for (int64_t j = 0; j < at->s; j++) {
            float *restrict weights = probs + j * width, *restrict slope = slopes + j * width;
            for (int64_t i = 0; i < width; i++) slope[i] = weights[i] * (slope[i] - along[i]);
            if (!at->cut) continue;
            fill_shares(shares, at, first + (uint32_t)j, width);
            for (int64_t i = 0; i < width; i++) weights[i] *= shares[i];
        }
        product(result_q, slopes, ks, rows, at->s, wide, 1, width);
        NAME(pack)(grad_q + b * gq[0] + h * gq[1], result_q, gq[2], at->t, at->k, wide, at->scale);
        product(result, slopes, qs, keys, at->t, wide, width, 1);
        NAME(pack)(grad_k + b * gk[0] + h * gk[1], result, gk[2], at->s, at->k, wide, at->scale);
        product(result, probs, gs, keys, at->t, wide, width, 1);
        NAME(pack)(grad_v + b * gv[0] + h * gv[1], result, gv[2], at->s, at->k, wide, 1.0f);
    }
    free(qs);
}

/* `n` values, at most a lane each, and zeros. */
static inline __attribute__((always_inline)) lanes NAME(load_lanes)(const STORE *from, int64_t n) {
    lanes values = {0};
    for (int64_t i = 0; i < LANES; i++)
        if (i < n) values[i] = LOAD(from[i]);
    return values;
}

/* Ask for what a head will read of the next query's rows: all at once are more than can be on their
 * way. */
static inline void NAME(ask_for_rows)(const STORE *const *next, int64_t count, int64_t head,
                                      int64_t heads, int64_t k) {
    for (int64_t t = 0; t < count; t++)
        for (int64_t i = head * k; i < (head + 1) * k; i += 64 / (int64_t)sizeof **next) {
            __builtin_prefetch(next[t] + i, 0, 2);
            __builtin_prefetch(next[t] + heads * k + i, 0, 2);
        }
}

/* One query's attention over some rows of a store, all heads; k is a constant where it is inlined.
 * `probs` has room for whole lanes. */
static inline __attribute__((always_inline)) void NAME(attend_rows)(
    const STORE *query, const STORE *const *seen, int64_t length, const STORE *const *next,
    int64_t num_next, float *probs, STORE *out, int64_t heads, int64_t k, float scale) {
    int64_t padded = round_up(length, LANES);
    for (int64_t h = 0; h < heads; h++) {
        NAME(ask_for_rows)(next, num_next, h, heads, k);
        for (int64_t t = length; t < padded; t++) probs[t] = -INFINITY;
        for (int64_t t = 0; t < length; t++) {
            lanes dots = {0};
            for (int64_t i = 0; i < k; i += LANES)
                dots += NAME(load_lanes)(query + h * k + i, k - i) *
                        NAME(load_lanes)(seen[t] + h * k + i, k - i);
            probs[t] = sum_of(dots) * scale;
        }
        float top = -INFINITY, sum = 0.0f;
        for (int64_t t = 0; t < length; t++) top = probs[t] > top ? probs[t] : top;
        for (int64_t first = 0; first < padded; first += LANES) {
            lanes powers;
            for (int64_t t = 0; t < LANES; t++) powers[t] = exp_(probs[first + t] - top);
            memcpy(probs + first, &powers, sizeof powers);
            sum += sum_of(powers);
        }
        float share = 1.0f / sum;
        for (int64_t first = 0; first < k; first += 4 * LANES) {
            lanes mix[4] = {{0}};
            for (int64_t t = 0; t < length; t++)
                for (int64_t i = 0; i < 4 && first + i * LANES < k; i++)
                    mix[i] += probs[t] * NAME(load_lanes)(
                                             seen[t] + (heads + h) * k + first + i * LANES,
                                             k - first - i * LANES);
            for (int64_t i = 0; i < 4 * LANES && first + i < k; i++)
                out[h * k + first + i] = SAVE(mix[i / LANES][i % LANES] * share);
        }
    }
}

/* Find the rows of a store, `width` wide, that places name; return how many. */
static inline int64_t NAME(find_rows)(const STORE **found, const STORE *store,
                                      const int64_t *places, int64_t count, int64_t width) {
    int64_t length = 0;
    for (int64_t t = 0; t < count; t++)
        if (places[t] >= 0) found[length++] = store + places[t] * width;
    return length;
}

/* out = softmax(q k^T scale) v for each head of one query a row, over the rows of the store that
 * its places name; a row of the store is keys, then values, and a negative place is none. */
void NAME(attend)(const STORE *q, const STORE *store, const int64_t *places, STORE *out,
                  int64_t rows, int64_t count, int64_t heads, int64_t k, int64_t q_stride,
                  int64_t places_stride, float scale) {
    float *probs = malloc(round_up(count, LANES) * sizeof *probs);
    const STORE **found = malloc(2 * count * sizeof *found);
    int64_t width = 2 * heads * k, num_next = NAME(find_rows)(found, store, places, count, width);
    for (int64_t n = 0; n < rows; n++) {
        const STORE **seen = found + n % 2 * count, **next = found + (n + 1) % 2 * count;
        const STORE *query = q + n * q_stride;
        STORE *to = out + n * heads * k;
        int64_t length = num_next;
        num_next = 0;
        if (n + 1 < rows)
            num_next = NAME(find_rows)(next, store, places + (n + 1) * places_stride, count, width);
#define ATTEND(k) NAME(attend_rows)(query, seen, length, next, num_next, probs, to, heads, k, scale)
        if (k == 32) ATTEND(32);
        else if (k == 64) ATTEND(64);
        else ATTEND(k);
#undef ATTEND
    }
    free(found);
    free(probs);
}

#endif
