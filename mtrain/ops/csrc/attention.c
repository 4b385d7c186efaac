/* Attention and its gradients for training, and that of one query at a time for decoding.
 *
 * Values are stored as float or as bfloat16 (STORE), and computed in float. Every function has a
 * plain twin in kernels.py. One thread runs each call, which returns 0, or 1 if the memory does not
 * hold what it works with.
 *
 * The file includes itself once for each type of storage.
 */
#ifndef STORE

#include "vec.h"

#define SCORED 8 /* keys whose scores are added up at once */

static inline float *zeros(int64_t count) {
    float *numbers = room(count);
    return numbers ? memset(numbers, 0, 4 * count) : NULL;
}

/* One word of each of two vectors in turn: of their first halves, and of their second. */
#if LANES == 16
#define IN_TURN(f) f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)
#elif LANES == 8
#define IN_TURN(f) f(0), f(1), f(2), f(3)
#else
#define IN_TURN(f) f(0), f(1)
#endif
#define FIRST(i) i, i + LANES
#define SECOND(i) i + LANES / 2, i + LANES / 2 + LANES
#ifdef __clang__
#define ZIP(a, b, half) __builtin_shufflevector(a, b, IN_TURN(half))
#else
#define ZIP(a, b, half) __builtin_shuffle(a, b, (words){IN_TURN(half)})
#endif

/* Turn rows of words into columns, in place: as to halve a deck of cards and to riffle the halves
 * does with the number of each, to zip the halves of the rows turns that of each word by one bit. */
static inline void transpose(words *rows) {
    words zipped[LANES];
    for (int size = 1; size < LANES; size *= 2) {
        for (int i = 0; i < LANES / 2; i++) {
            zipped[2 * i] = ZIP(rows[i], rows[i + LANES / 2], FIRST);
            zipped[2 * i + 1] = ZIP(rows[i], rows[i + LANES / 2], SECOND);
        }
        memcpy(rows, zipped, sizeof zipped);
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

/* `n` values, at most a lane each, and zeros. */
static inline __attribute__((always_inline)) lanes NAME(load_lanes)(const STORE *from, int64_t n) {
    lanes whole, part = {0};
    if (n >= LANES) {
        for (int64_t i = 0; i < LANES; i++) whole[i] = LOAD(from[i]);
        return whole;
    }
    for (int64_t i = 0; i < n; i++) part[i] = LOAD(from[i]);
    return part;
}

/* The first `n` values of a vector, at most all. */
static inline __attribute__((always_inline)) void NAME(save_lanes)(STORE *to, lanes values, int64_t n) {
    if (n >= LANES) NAME(save_whole)(to, values);
    else
        for (int64_t i = 0; i < n; i++) to[i] = SAVE(values[i]);
}

/* Words of rows [n, k] whose numbers stand below each other: [words of n, wide], and zeros. */
static inline void NAME(lay_down)(uint32_t *to, const STORE *from, int64_t stride, int64_t n,
                                  int64_t k, int64_t wide) {
    int64_t size = 4 / sizeof(STORE);
    for (int64_t i = 0; i < n; i += size)
        for (int64_t j = 0; j < wide; j += LANES, to += LANES) {
            const STORE *own = from + i * stride + j;
            lanes below = {0};
            if (i + 1 < n) below = NAME(load_lanes)(own + stride, k - j);
            words both = NAME(stacked)(NAME(load_lanes)(own, k - j), below);
            memcpy(to, &both, sizeof both);
        }
}

/* c [n, k] = a b `scale`: a word of a lies at r * a_row + i * a_column, b is laid out down. The rows
 * of a come in fours. */
static inline __attribute__((always_inline)) void NAME(product_tile)(
    STORE *c, int64_t c_row, int64_t n, int64_t k, const STORE *a, int64_t a_row, int64_t a_column,
    const uint32_t *b, int64_t inner, int64_t wide, float scale, int vectors) {
    lanes sums[4][2] = {{{0}}};
    for (int64_t i = 0; i < inner; i++)
        for (int v = 0; v < vectors; v++) {
            words others;
            memcpy(&others, b + i * wide + v * LANES, sizeof others);
            for (int j = 0; j < 4; j++) {
                uint32_t word;
                memcpy(&word, a + j * a_row + i * a_column, sizeof word);
                sums[j][v] = NAME(add)(sums[j][v], word, others);
            }
        }
    for (int j = 0; j < 4 && j < n; j++)
        for (int v = 0; v < vectors; v++)
            NAME(save_lanes)(c + j * c_row + v * LANES, sums[j][v] * scale, k - v * LANES);
}

static inline void NAME(product)(STORE *restrict c, int64_t c_row, int64_t n, int64_t k,
                                 const STORE *restrict a, int64_t a_row, int64_t a_column,
                                 const uint32_t *restrict b, int64_t inner, int64_t wide,
                                 float scale) {
    for (int64_t r = 0; r < n; r += 4, a += 4 * a_row, c += 4 * c_row) {
        int64_t w = 0;
        for (; w + 2 * LANES <= wide; w += 2 * LANES)
            NAME(product_tile)(c + w, c_row, n - r, k - w, a, a_row, a_column, b + w, inner, wide,
                               scale, 2);
        if (w < wide)
            NAME(product_tile)(c + w, c_row, n - r, k - w, a, a_row, a_column, b + w, inner, wide,
                               scale, 1);
    }
}

/* Scores [n, width] as a left factor whose rows are their columns; `room` holds it if need be. */
static inline const STORE *NAME(stack)(STORE *room, const float *scores, int64_t n, int64_t width) {
    int64_t size = 4 / sizeof(STORE);
    STORE *to = room;
    if (size == 1) return (const STORE *)scores;
    for (int64_t i = 0; i < n; i += size)
        for (int64_t w = 0; w < width; w += LANES, to += LANES * size) {
            lanes own, below = {0};
            memcpy(&own, scores + i * width + w, sizeof own);
            if (i + 1 < n) memcpy(&below, scores + (i + 1) * width + w, sizeof below);
            words both = NAME(stacked)(NAME(rounded)(own), NAME(rounded)(below));
            memcpy(to, &both, sizeof both);
        }
    return room;
}

/* Scores as a left factor whose rows are theirs. */
static inline const STORE *NAME(pack)(STORE *room, const float *scores, int64_t count) {
    if (sizeof(STORE) == sizeof(float)) return (const STORE *)scores;
    for (int64_t i = 0; i < count; i += LANES) {
        lanes own;
        memcpy(&own, scores + i, sizeof own);
        NAME(save_whole)(room + i, own);
    }
    return room;
}

/* A vector of the numbers of a row, of which `left` are left; and zeros. */
static inline words NAME(load_words)(const STORE *row, int64_t left) {
    STORE numbers[sizeof(words) / sizeof(STORE)] = {0};
    words result;
    if (left * sizeof(STORE) >= sizeof result) return *(words *)memcpy(&result, row, sizeof result);
    for (int64_t i = 0; i < left; i++) numbers[i] = row[i];
    return *(words *)memcpy(&result, numbers, sizeof result);
}

/* Lay a head [n, k] out across: [words of k, width]. */
static inline void NAME(lay_across)(uint32_t *to, const STORE *from, int64_t stride, int64_t n,
                                    int64_t k, int64_t width) {
    int64_t size = 4 / sizeof(STORE), num_words = round_up(k, size) / size;
    for (int64_t row = 0; row < width; row += LANES)
        for (int64_t word = 0; word < num_words; word += LANES) {
            words block[LANES];
            for (int64_t i = 0; i < LANES; i++) {
                const STORE *own = from + (row + i) * stride + word * size;
                block[i] = row + i < n ? NAME(load_words)(own, k - word * size) : (words){0};
            }
            transpose(block);
            for (int64_t i = 0; i < LANES && word + i < num_words; i++)
                memcpy(to + (word + i) * width + row, &block[i], sizeof *block);
        }
}

/* More for the scores of some rows: of their numbers from the one at `at` on. */
static inline __attribute__((always_inline)) void NAME(add_scores)(lanes *sums,
                                                                   const STORE *const *rows,
                                                                   int64_t at, int64_t size,
                                                                   const uint32_t *across) {
    words others;
    memcpy(&others, across, sizeof others);
    for (int r = 0; r < SCORED; r++) {
        uint32_t word = 0;
        memcpy(&word, rows[r] + at, size * sizeof(STORE));
        sums[r] = NAME(add)(sums[r], word, others);
    }
}

/* scores [n, width] = a head [n, k] times another that is laid out across; for n, SCORED more of them
 * may be written. */
static inline void NAME(score)(float *scores, const STORE *head, int64_t stride, int64_t n,
                               int64_t k, const uint32_t *across, int64_t width) {
    int64_t size = 4 / sizeof(STORE);
    for (int64_t j = 0; j < n; j += SCORED) {
        const STORE *rows[SCORED];
        for (int r = 0; r < SCORED; r++) rows[r] = head + least(j + r, n - 1) * stride;
        for (int64_t w = 0; w < width; w += LANES) {
            lanes sums[SCORED] = {{0}};
            const uint32_t *others = across + w;
            int64_t i = 0;
            for (; i + size <= k; i += size, others += width)
                NAME(add_scores)(sums, rows, i, size, others);
            if (i < k) NAME(add_scores)(sums, rows, i, 1, others);
            for (int r = 0; r < SCORED; r++)
                memcpy(scores + (j + r) * width + w, &sums[r], sizeof(lanes));
        }
    }
}

/* Ask for the rows of a head before they are read: they lie too far apart to be foreseen. */
static inline void NAME(ask_for)(const STORE *head, int64_t stride, int64_t n) {
    for (int64_t i = 0; i < n; i++) __builtin_prefetch(head + i * stride);
}

/* Where a head begins. */
static inline const STORE *NAME(head)(const STORE *of, const int64_t *strides, int64_t b, int64_t h) {
    return of + b * strides[0] + h * strides[1];
}

/* out = dropout(softmax(q k^T scale)) v over the kept keys. Scores have a row for each key, so that
 * a vector holds as many queries and nothing is added up within one. */
int NAME(attention)(const attention_shape *at, const STORE *q, const STORE *k, const STORE *v,
                    const uint8_t *keep, STORE *out) {
    int64_t keys = round_up(at->s, SCORED), size = 4 / sizeof(STORE);
    int64_t width = round_up(at->t, LANES), wide = round_up(at->k, LANES);
    const int64_t *qt = at->q_strides, *kt = at->k_strides, *vt = at->v_strides;
    const int64_t *ot = at->out_strides, *mt = at->keep_strides;
    float *probs = zeros((at->k + 3 * keys + 1) * width + keys * wide);
    if (!probs) return 1;
    float *bias = probs + keys * width, *shares = bias + keys * width;
    STORE *factor = (STORE *)(shares + width);
    uint32_t *vs_down = (uint32_t *)(shares + (keys + 1) * width), *qs_across = vs_down + keys * wide;
    const uint8_t *seen = NULL;
    for (int64_t n = 0; n < at->b * at->h; n++) {
        int64_t b = n / at->h, h = n % at->h;
        int64_t next_b = (n + 1) / at->h % at->b, next_h = (n + 1) % at->h;
        NAME(ask_for)(NAME(head)(q, qt, next_b, next_h), qt[2], at->t);
        NAME(ask_for)(NAME(head)(k, kt, next_b, next_h), kt[2], at->s);
        NAME(ask_for)(NAME(head)(v, vt, next_b, next_h), vt[2], at->s);
        const uint8_t *own = keep ? keep + b * mt[0] + h * mt[1] : NULL;
        if (own != seen) fill_bias(bias, own, at, width);
        seen = own;
        NAME(ask_for)(NAME(head)(out, ot, b, h), ot[2], at->t);
        NAME(lay_across)(qs_across, NAME(head)(q, qt, b, h), qt[2], at->t, at->k, width);
        NAME(lay_down)(vs_down, NAME(head)(v, vt, b, h), vt[2], at->s, at->k, wide);
        NAME(score)(probs, NAME(head)(k, kt, b, h), kt[2], at->s, at->k, qs_across, width);
        softmax(probs, bias, at->s, width, at->scale);
        uint32_t first = (uint32_t)(n * at->t * at->s);
        for (int64_t j = 0; at->cut && j < at->s; j++) {
            fill_shares(shares, at, first + (uint32_t)j, width);
            for (int64_t i = 0; i < width; i++) probs[j * width + i] *= shares[i];
        }
        NAME(product)(out + b * ot[0] + h * ot[1], ot[2], at->t, at->k,
                      NAME(stack)(factor, probs, at->s, width), size, size * width, vs_down,
                      round_up(at->s, size) / size, wide, 1.0f);
    }
    free(probs);
    return 0;
}

/* The gradients of attention. */
int NAME(attention_grad)(const attention_shape *at, const STORE *grad, const STORE *q,
                         const STORE *k, const STORE *v, const uint8_t *keep, STORE *grad_q,
                         STORE *grad_k, STORE *grad_v) {
    int64_t keys = round_up(at->s, SCORED), size = 4 / sizeof(STORE);
    int64_t width = round_up(at->t, LANES), wide = round_up(at->k, LANES);
    int64_t num_t = round_up(at->t, size) / size, num_s = round_up(at->s, size) / size;
    const int64_t *qt = at->q_strides, *kt = at->k_strides, *vt = at->v_strides;
    const int64_t *ot = at->out_strides, *mt = at->keep_strides, *gq = at->grad_q_strides;
    const int64_t *gk = at->grad_k_strides, *gv = at->grad_v_strides;
    int64_t across = at->k * width, square = keys * width, down = width * wide;
    float *probs = zeros(4 * square + 2 * across + 2 * down + keys * wide + 2 * width);
    if (!probs) return 1;
    float *slopes = probs + square, *bias = slopes + square, *shares = bias + square;
    float *along = shares + width;
    STORE *factor = (STORE *)(along + width);
    uint32_t *qs_across = (uint32_t *)(along + width) + square, *gs_across = qs_across + across;
    uint32_t *qs_down = gs_across + across, *gs_down = qs_down + down, *ks_down = gs_down + down;
    const uint8_t *seen = NULL;
    for (int64_t i = 0; i < width; i++) shares[i] = 1.0f;
    for (int64_t n = 0; n < at->b * at->h; n++) {
        int64_t b = n / at->h, h = n % at->h;
        int64_t next_b = (n + 1) / at->h % at->b, next_h = (n + 1) % at->h;
        NAME(ask_for)(NAME(head)(q, qt, next_b, next_h), qt[2], at->t);
        NAME(ask_for)(NAME(head)(grad, ot, next_b, next_h), ot[2], at->t);
        NAME(ask_for)(NAME(head)(k, kt, next_b, next_h), kt[2], at->s);
        NAME(ask_for)(NAME(head)(v, vt, next_b, next_h), vt[2], at->s);
        const uint8_t *own = keep ? keep + b * mt[0] + h * mt[1] : NULL;
        if (own != seen) fill_bias(bias, own, at, width);
        seen = own;
        const STORE *own_q = NAME(head)(q, qt, b, h), *own_grad = NAME(head)(grad, ot, b, h);
        const STORE *own_k = NAME(head)(k, kt, b, h), *own_v = NAME(head)(v, vt, b, h);
        NAME(lay_down)(qs_down, own_q, qt[2], at->t, at->k, wide);
        NAME(lay_down)(gs_down, own_grad, ot[2], at->t, at->k, wide);
        NAME(lay_down)(ks_down, own_k, kt[2], at->s, at->k, wide);
        NAME(lay_across)(qs_across, own_q, qt[2], at->t, at->k, width);
        NAME(lay_across)(gs_across, own_grad, ot[2], at->t, at->k, width);
        NAME(score)(probs, own_k, kt[2], at->s, at->k, qs_across, width);
        NAME(score)(slopes, own_v, vt[2], at->s, at->k, gs_across, width);
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
        NAME(product)(grad_q + b * gq[0] + h * gq[1], gq[2], at->t, at->k,
                      NAME(stack)(factor, slopes, at->s, width), size, size * width, ks_down, num_s,
                      wide, at->scale);
        NAME(product)(grad_k + b * gk[0] + h * gk[1], gk[2], at->s, at->k,
                      NAME(pack)(factor, slopes, at->s * width), width, size, qs_down, num_t, wide,
                      at->scale);
        NAME(product)(grad_v + b * gv[0] + h * gv[1], gv[2], at->s, at->k,
                      NAME(pack)(factor, probs, at->s * width), width, size, gs_down, num_t, wide,
                      1.0f);
    }
    free(probs);
    return 0;
}

/* Ask for the share of the next query's rows that falls to a head of this one: all at once are more
 * than can be on their way. */
static inline void NAME(ask_for_rows)(const STORE *const *next, int64_t count, int64_t head,
                                      int64_t heads, int64_t k) {
    for (int64_t t = count * head / heads; t < count * (head + 1) / heads; t++)
        for (int64_t i = 0; i < 2 * heads * k; i += ALIGNMENT / (int64_t)sizeof **next)
            __builtin_prefetch(next[t] + i, 0, 2);
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
#pragma GCC unroll 8
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
#pragma GCC unroll 4
                for (int64_t i = 0; i < 4; i++) {
                    int64_t at = first + i * LANES;
                    const STORE *value = seen[t] + (heads + h) * k + at;
                    if (at < k) mix[i] += probs[t] * NAME(load_lanes)(value, k - at);
                }
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
int NAME(paged_attention)(const STORE *q, const STORE *store, const int64_t *places, STORE *out,
                 int64_t rows, int64_t count, int64_t heads, int64_t k, int64_t q_stride,
                 int64_t places_stride, float scale) {
    int64_t padded = round_up(count, LANES);
    float *probs = malloc(padded * sizeof *probs + 2 * count * sizeof(STORE *));
    if (!probs) return 1;
    const STORE **found = (const STORE **)(probs + padded);
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
    free(probs);
    return 0;
}

#endif
