/* The functions of the library. Each exists for float and for bfloat16, as name_float and name_bf16,
 * unless it says otherwise; `elem` is the type. Every file is compiled once for each type and
 * instruction set.
 *
 * For all of them:
 *   - A matrix [rows, columns] is contiguous, row after row, unless strides are given. Strides and sizes
 *     count elements.
 *   - Pointers need the alignment of their type, no more. Inputs and outputs do not overlap, unless the
 *     function works in place.
 *   - Values are stored as elem, those of a cache in bfloat16 too, and computed in float; a NaN among the inputs reaches each output that
 *     depends on it.
 *   - A call runs on the caller's thread, and has no state but its arguments.
 *   - The result is a `status`. Where it is not OPS_OK, outputs are undefined.
 */
#pragma once

#include <stdint.h>

#if !defined __BYTE_ORDER__ || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pairs of bfloat16 are read as 32-bit numbers in little-endian order"
#endif

typedef uint16_t bf16;

/* The element type of this translation unit: bfloat16 if BF16 is defined, else float. */
#ifdef BF16
typedef bf16 elem;
#define TYPE bf16
#else
typedef float elem;
#define TYPE float
#endif
#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)
#define FUNCTION(name) PASTE(name, TYPE)

typedef enum {
    OPS_OK = 0,
    OPS_NO_MEMORY = 1, /* the work space could not be allocated */
    OPS_BAD_INDEX = 2, /* a target, token or slot is out of range; nothing was read or written there */
} status;

/* Dropout: an element survives, times `scale`, unless a 16-bit hash of (seed, index) is below `cut`.
 * The index is the element's place in its contiguous tensor, modulo 2^32. cut = 0 drops nothing; then
 * `scale` must be 1. */

/* b sentences, h heads, t queries, s keys, all at least 1; head width k, at least 1; and strides for
 * sentence, head and position, of the output also those of its gradient. Elements of a head's row are
 * neighbours. `scale` multiplies the scores; the index of dropout is that of a weight in [b, h, t, s].
 * native.py has the same structure. */
typedef struct {
    int64_t b, h, t, s, k;
    int64_t q_strides[3], k_strides[3], v_strides[3], out_strides[3];
    int64_t grad_q_strides[3], grad_k_strides[3], grad_v_strides[3];
    int64_t keep_strides[4]; /* sentence, head, query, key; 0 where `keep` is broadcast */
    float scale, dropout_scale;
    uint32_t cut, seed;
} attention_shape;

/* How weights [m, k] are packed: as float; rounded to bfloat16, two of a row in 32 bits; or as whole numbers
 * from -127 to 127, four of a row in 32 bits. A row that is too short is filled up with zeros. */
enum { IN_FLOAT, IN_BF16, IN_INT8 };

/* A linear map x w^T + bias. Products in bfloat16 round x to it; products of whole numbers round each row of
 * x to multiples of a 127th of its greatest absolute number. Sums are exact, or in float. native.py has the
 * same structures. */
typedef struct {
    int64_t format;       /* of the weights */
    const void *packed;   /* [m, k] in tiles */
    const float *bias;    /* [m], or NULL */
    const float *scales;  /* what the whole numbers of a row of w are multiplied with, and */
    const int32_t *sums;  /* their sums; both [m], filled up with zeros to whole tiles */
} linear_map;

/* A post-norm layer, with three LayerNorms of d numbers. A layer of an encoder has no queries, cross_out and
 * second norm. */
typedef struct {
    linear_map self_in; /* [3 d, d]: queries, keys and values */
    linear_map self_out, queries, cross_out, inner, outer;
    const float *gain_1, *norm_bias_1, *gain_2, *norm_bias_2, *gain_3, *norm_bias_3;
    float eps_1, eps_2, eps_3;
} stack_layer;

/* Hypotheses, their attention heads of width k (d = heads k), and the caches [cache_rows, 2 d] of a layer,
 * with the slots of each hypothesis as in paged_attention. */
typedef struct {
    int64_t num_layers, rows, heads, k, d_ff;
    int64_t past_rows, past_count, past_stride; /* past_count is at least 1 */
    int64_t past_window;                        /* the last slots that are attended to */
    int64_t source_rows, source_count, source_stride;
    int64_t num_tokens, num_encodings; /* rows of the table of embeddings, and of the encodings */
    int64_t in_bf16;                   /* whether the caches are in bfloat16, else in float */
    float scale, table_scale;          /* of the scores of attention, and of embeddings */
} decoder_shape;

/* A beam search with `beam` slots for each sentence, of which num_best hypotheses are wanted. */
typedef struct {
    int64_t num_sentences, beam, num_best;
    int64_t num_positions;          /* the most that are decoded */
    int64_t written_count;          /* columns of tokens at first */
    int64_t num_free, num_penalties, num_never;
    int64_t window;                 /* the last slots that are attended to */
    int64_t eos, early_stop, argmax_only;
} search_shape;

/* Rows of the output layer, and the tokens [size] that they belong to, in ascending order. */
typedef struct {
    linear_map map;
    const int64_t *ids;
    int64_t size;
} shortlist;

/* The output layer [num_tokens, d], as in packed_topk and packed_argmax. */
typedef struct {
    linear_map map, scan; /* nothing is packed in `scan` where packed_argmax is not used */
    const float *weight, *bounds;
    const shortlist *shortlists; /* the tokens that are ranked for each sentence, or NULL: all */
} output_layer;

/* b sentences of s positions, and attention heads of width k (d = heads k). */
typedef struct {
    int64_t num_layers, b, s, heads, k, d_ff;
    float scale; /* of the scores of attention */
} encoder_shape;

/* What sources are read from and written to: the rows of the table of embeddings and of the encodings, and
 * a pool [pool_rows, 2 d] for the keys and values of each of num_pools layers of a decoder. */
typedef struct {
    int64_t num_tokens, num_encodings, num_pools, pool_rows;
    int64_t in_bf16;   /* whether the pools are in bfloat16, else in float */
    float table_scale; /* of embeddings */
} sources_shape;

#pragma GCC visibility push(default)

/* 1 if linear and projected_cross_entropy were measured to be faster than PyTorch's, else 0. */
extern const int64_t FUNCTION(fast_matmul);

/* P, the columns of one tile of packed weights [ceil(m / P), k, P]: element [i, j, p] is weight
 * [i P + p, j], or 0 past the last. */
extern const int64_t FUNCTION(tile_columns);

/* out [b, h, t, k] = dropout(softmax(q k^T scale)) v, for q [b, h, t, k] and k, v [b, h, s, k].
 *   keep: bytes [b, h, t, s], 0 leaves a key out; or NULL. A query that keeps nothing gets the mean of v. */
status FUNCTION(attention)(const attention_shape *at, const elem *q, const elem *k, const elem *v,
                           const uint8_t *keep, elem *out);

/* The gradients of attention, all overwritten: of q [b, h, t, k], and of k and v [b, h, s, k].
 *   grad: that of out [b, h, t, k], with out_strides. */
status FUNCTION(attention_grad)(const attention_shape *at, const elem *grad, const elem *q,
                                const elem *k, const elem *v, const uint8_t *keep, elem *grad_q,
                                elem *grad_k, elem *grad_v);

/* out [rows, heads k] = softmax(q k^T scale) v, for each head of one query a row.
 *   q: [rows, heads k], rows q_stride apart.
 *   cache: [cache_rows, 2 heads k], in bfloat16 if in_bf16, else of elem; a row is the keys of all heads,
 *     then the values.
 *   slots: [rows, count], rows slots_stride apart: rows of the cache below cache_rows; a negative slot is
 *     padding. A query whose slots are all padding gets NaN. */
status FUNCTION(paged_attention)(const elem *q, const void *cache, const int64_t *slots, elem *out,
                                 int64_t rows, int64_t count, int64_t heads, int64_t k, int64_t cache_rows,
                                 int64_t q_stride, int64_t slots_stride, int64_t in_bf16, float scale);

/* y [n] = dropout(x [n]). The gradient of x is the same function of the gradient of y. */
status FUNCTION(dropout)(const elem *x, elem *y, int64_t n, uint32_t cut, float scale, uint32_t seed);

/* out [rows, d] = LayerNorm(x + dropout(y)) for x, y [rows, d] and gain, bias [d]; d is at least 1.
 *   mean, rstd: [rows], written for add_norm_grad: the mean, and 1 / sqrt(variance + eps). */
status FUNCTION(add_norm)(const elem *x, const elem *y, const float *gain, const float *bias, elem *out,
                          float *mean, float *rstd, int64_t rows, int64_t d, float eps, uint32_t cut,
                          float scale, uint32_t seed);

/* The gradients of add_norm: grad_x, grad_y [rows, d] are overwritten, grad_gain, grad_bias [d] are
 * added to.
 *   grad: that of out [rows, d]. */
status FUNCTION(add_norm_grad)(const elem *grad, const elem *x, const elem *y, const float *gain,
                               const float *mean, const float *rstd, elem *grad_x, elem *grad_y,
                               float *grad_gain, float *grad_bias, int64_t rows, int64_t d,
                               uint32_t cut, float scale, uint32_t seed);

/* out [n, m] = x w^T + bias, or max(0, the same) if apply_relu, for x [n, k] and w [m, k].
 *   w, bias: w is rounded to elem; bias [m] is not, and may be NULL.
 *   For bfloat16, k is even. */
status FUNCTION(linear)(const elem *x, const float *w, const float *bias, elem *out, int64_t n,
                        int64_t k, int64_t m, int apply_relu);

/* The gradients of linear, all overwritten: grad_x [n, k], grad_w [m, k], grad_bias [m] or NULL.
 *   grad: that of out [n, m], before the max(0, .) if there is one; n is at least 1.
 *   input_is_relu: x is the result of max(0, .), and grad_x is 0 where x is.
 *   For bfloat16, k and m are even. */
status FUNCTION(linear_grad)(const elem *grad, const elem *x, const float *w, elem *grad_x,
                             float *grad_w, float *grad_bias, int64_t n, int64_t k, int64_t m,
                             int input_is_relu);

/* Add the label-smoothed cross-entropy of logits x w^T, and the negative log-likelihood of the targets,
 * to loss_and_nll [2]; for x [n, k], w [m, k], which is rounded to elem, and targets [n] from 0 to m - 1.
 *   grad_x, grad_w: [n, k] and [m, k], the gradients of the loss, overwritten; or both NULL.
 *   n and m are at least 1. For bfloat16, k is even. */
status FUNCTION(projected_cross_entropy)(const elem *x, const float *w, const int64_t *targets,
                                         elem *grad_x, float *grad_w, int64_t n, int64_t k, int64_t m,
                                         float smoothing, double *loss_and_nll);

/* The same for logits [rows, width], rows `stride` apart, and targets [rows] from 0 to width - 1.
 *   with_grad: overwrite the logits with their gradient. */
status FUNCTION(cross_entropy)(elem *logits, const int64_t *targets, int64_t rows, int64_t width,
                               int64_t stride, float smoothing, int with_grad, double *loss_and_nll);

/* ids [rows, count] of the greatest logits of each row, except those in `never`, greatest first and among
 * equals the first; and their log-probabilities over the whole row.
 *   logits: [rows, width]; never: [num_never], from 0 to width - 1.
 *   1 <= count <= width - the number of different tokens in `never`. */
status FUNCTION(topk)(const elem *logits, const int64_t *never, int64_t *ids, float *log_probs,
                      int64_t rows, int64_t width, int64_t num_never, int64_t count);

#ifndef BF16 /* the following for float only */

/* 1 if products of whole numbers are faster than those of floats, else 0. */
extern const int64_t fast_int8_float;

/* out [n, m] = x w^T + bias, or max(0, the same) if apply_relu. */
status packed_linear_float(const linear_map *map, const float *x, float *out, int64_t n, int64_t k, int64_t m,
                           int apply_relu);

/* The same without max(0, .), bit for bit, faster where most of x is 0. */
status packed_linear_sparse_float(const linear_map *map, const float *x, float *out, int64_t n, int64_t k,
                                  int64_t m);

/* topk of the logits that a map without a bias makes of x. */
status packed_topk_float(const linear_map *map, const float *x, const int64_t *never, int64_t *ids,
                         float *log_probs, int64_t n, int64_t k, int64_t m, int64_t num_never,
                         int64_t count);

/* ids [n]: the token of the greatest logit of each row, except those in `never`; -1 if none is finite.
 *   scan: a map without a bias, in bfloat16 or whole numbers.
 *   w: [m, k], not packed: the greatest logit x w^T is found, in float, though only those are computed that
 *     can be the greatest by what `scan` makes of x; or NULL: the greatest of these.
 *   bounds: [2, blocks of 64 rows of w] or NULL: in each the greatest |w_i|, and the greatest error of a
 *     product of `scan` with a rounded vector of length 1. */
status packed_argmax_float(const linear_map *scan, const float *x, const float *w, const float *bounds,
                           const int64_t *never, int64_t *ids, int64_t n, int64_t k, int64_t m,
                           int64_t num_never);

/* x [b, s, d], the input of the first layer, becomes the output of the last.
 *   layers: [num_layers]; keep: bytes [b, s], 0 leaves a position out. */
status encoder_float(const encoder_shape *at, const stack_layer *layers, const uint8_t *keep, float *x);

/* Encode sources, and write the keys and values of each layer of a decoder to the rows of its pool that `slots`
 * names. The first layer's input is table[id] * table_scale + encodings[position].
 *   layers: [num_layers]; maps, [2 d, d] each, and pools: [num_pools].
 *   ids, slots: [b, s]; a negative slot is padding. */
status encode_sources_float(const encoder_shape *at, const stack_layer *layers, const sources_shape *to,
                            const linear_map *maps, void *const *pools, const float *table,
                            const float *encodings, const int64_t *ids, const int64_t *slots);

/* states [rows, d] after all layers, for the newest token of each hypothesis: the layers' input is
 * table[id] * table_scale + encodings[position]. Keys and values are written to the row of `pasts` that the
 * last of its slots names.
 *   layers: [num_layers]; pasts, sources: a cache for each layer.
 *   ids, positions: [rows]; positions after the last of the encodings have that one. */
status decoder_step_float(const decoder_shape *at, const stack_layer *layers, void *const *pasts,
                          const void *const *sources, const int64_t *ids, const int64_t *positions,
                          const float *table, const float *encodings, const int64_t *past_slots,
                          const int64_t *source_slots, float *states);

/* Decode up to num_positions positions of a beam search, for `rows` hypotheses, sorted by sentence. It ends
 * before a position for which a target is as long as it may be, slots are missing, or a log-probability is
 * not finite; and after one with which a sentence ends, which is all its slots finished, or no open hypothesis
 * with a bound above its num_best-th score. With R = num_sentences * beam and P = num_positions:
 *   never: [num_never] tokens that are not generated.
 *   penalties: [num_penalties], which scores are divided by, for each length with eos.
 *   max_lengths: [num_sentences], without eos.
 *   free_slots: [num_free] rows of `pasts`, taken in their order.
 *   num_places [num_sentences], best_scores [num_sentences, num_best]: slots without a finished hypothesis,
 *     and the best scores of those, best first; both are brought up to date.
 *   ints [R, 4 + W + T + S]: sentence, cell, last token and length; W = written_count + P tokens;
 *     T = past_count + P slots; S = source_count slots. P columns of W and T are to be filled.
 *   reals [R, 1 + W]: the log-probability, and that of each token.
 *   ended_ints [R, 2 + W], ended_reals [R, 2 + W]: the hypotheses that end, in that order: sentence, length
 *     and tokens, right-aligned; log-probability, score, and log-probabilities of the tokens.
 *   counts: [4] positions, open hypotheses, ended hypotheses, and slots taken. */
status search_steps_float(const search_shape *is, const decoder_shape *decoder, const stack_layer *layers,
                          void *const *pasts, const void *const *sources, const output_layer *output,
                          const float *table, const float *encodings, const int64_t *never,
                          const double *penalties, const int64_t *max_lengths, const int64_t *free_slots,
                          int64_t *num_places, double *best_scores, int64_t *ints, double *reals,
                          int64_t *ended_ints, double *ended_reals, int64_t *counts);

#endif

#pragma GCC visibility pop
