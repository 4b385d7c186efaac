/* The functions of the library. Each exists for float and for bfloat16, as name_float and name_bf16,
 * unless it says otherwise; `elem` is the type. Every file is compiled once for each type and
 * instruction set.
 *
 * For all of them:
 *   - A matrix [rows, columns] is contiguous, row after row, unless strides are given. Strides and sizes
 *     count elements.
 *   - Pointers need the alignment of their type, no more. Inputs and outputs do not overlap, unless the
 *     function works in place.
 *   - Values are stored as elem, or in a cache also as bfloat16, and computed in float. A NaN in an input
 *     makes each output that depends on it NaN.
 *   - A call runs on the caller's thread, and has no state but its arguments.
 *   - The result is a `status`. Where it is not OPS_OK, outputs are undefined.
 *
 * `header.py` reads the structures and functions from this text.
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

/* Dropout: an element becomes 0 if a 16-bit hash of (seed, index) is below `cut`, else it is multiplied by
 * `scale`. The index is that of the element in its contiguous tensor, modulo 2^32. cut = 0 drops nothing;
 * then `scale` must be 1. */

/* Sizes, each at least 1: b sentences, h heads, t queries, s keys, head width k. Strides are those of
 * sentence, head and position; the last dimension, of size k, is contiguous. The gradient of the output has
 * out_strides, too. `scale` multiplies the scores; the index of dropout is that of a weight in [b, h, t, s]. */
typedef struct {
    int64_t b, h, t, s, k;
    int64_t q_strides[3], k_strides[3], v_strides[3], out_strides[3];
    int64_t grad_q_strides[3], grad_k_strides[3], grad_v_strides[3];
    int64_t keep_strides[4]; /* sentence, head, query, key; 0 where `keep` is broadcast */
    float scale, dropout_scale;
    uint32_t cut, seed;
} attention_shape;

/* Formats of packed weights [m, k]: float; bfloat16, two neighbours in k in 32 bits; or int8 from -127 to
 * 127, four neighbours in k in 32 bits. Rows are padded with zeros to whole groups of 32 bits. */
enum { IN_FLOAT, IN_BF16, IN_INT8 };

/* A linear map x w^T + bias. With weights in bfloat16, x is rounded to bfloat16; with weights in int8, each
 * row of x is quantised to int8 with the scale max |x| / 127. Sums of products are in float; for int8 they are
 * exact up to k = 133144 (2^31 / 127^2). */
typedef struct {
    int64_t format;       /* of the weights */
    const void *packed;   /* [m, k] in tiles */
    const float *bias;    /* [m], or NULL */
    const float *scales;  /* int8 only: the scale of each row of w; [m], zero-padded to whole tiles */
    const int32_t *sums;  /* int8 only: the sum of the int8 values of each row of w; padded likewise */
} linear_map;

/* A post-norm layer; d is the model width, and norms have d gains and biases. Encoder layers do not use
 * `queries`, `cross_out` and the second norm. */
typedef struct {
    linear_map self_in; /* [3 d, d]: queries, keys and values */
    linear_map self_out, queries, cross_out, inner, outer;
    const float *gain_1, *norm_bias_1, *gain_2, *norm_bias_2, *gain_3, *norm_bias_3;
    float eps_1, eps_2, eps_3;
} stack_layer;

/* `rows` hypotheses, attention heads of width k (d = heads k), and two caches for each layer: `past`
 * [past_rows, 2 d] for self-attention, `source` [source_rows, 2 d] for cross-attention. `count` and `stride`
 * are those of the slots of a hypothesis, as in paged_attention. */
typedef struct {
    int64_t num_layers, rows, heads, k, d_ff;
    int64_t past_rows, past_count, past_stride; /* past_count is at least 1 */
    int64_t past_window;                        /* attend to this many of the last slots */
    int64_t source_rows, source_count, source_stride;
    int64_t num_tokens, num_encodings; /* rows of the embeddings, and of the positional encodings */
    int64_t in_bf16;                   /* whether the caches are in bfloat16, else in float */
    float scale, table_scale;          /* of the scores of attention, and of embeddings */
} decoder_shape;

/* A beam search of width `beam` for the num_best best hypotheses of each sentence. With early_stop, the score
 * that an open hypothesis may reach is bounded at its present length, not at its maximum. With argmax_only,
 * log-probabilities are not computed, but 0. num_* without a comment are lengths of arrays, see below. */
typedef struct {
    int64_t num_sentences, beam, num_best;
    int64_t num_positions;          /* decode at most this many positions */
    int64_t written_count;          /* columns of tokens before the call */
    int64_t num_free, num_penalties, num_never;
    int64_t window;                 /* attend to this many of the last slots */
    int64_t eos, early_stop, argmax_only;
} search_shape;

/* A subset of the rows of the output layer: `map` [size, d], and their token ids [size], ascending. */
typedef struct {
    linear_map map;
    const int64_t *ids;
    int64_t size;
} shortlist;

/* The output layer [num_tokens, d], as in packed_topk and packed_argmax. */
typedef struct {
    linear_map map, scan; /* scan.packed is NULL where packed_argmax is not used */
    const float *weight, *bounds;
    const shortlist *shortlists; /* [num_sentences], the tokens that are ranked; NULL ranks all */
} output_layer;

/* b sentences of s positions, and attention heads of width k (d = heads k). */
typedef struct {
    int64_t num_layers, b, s, heads, k, d_ff;
    float scale; /* of the scores of attention */
} encoder_shape;

/* Sizes for encode_sources: rows of the table of embeddings and of the positional encodings, and num_pools
 * pools [pool_rows, 2 d], one for the cross-attention keys and values of each decoder layer. */
typedef struct {
    int64_t num_tokens, num_encodings, num_pools, pool_rows;
    int64_t in_bf16;   /* whether the pools are in bfloat16, else in float */
    float table_scale; /* of embeddings */
} sources_shape;

#pragma GCC visibility push(default)

/* 1 if linear and projected_cross_entropy were measured to be faster than PyTorch's with this instruction
 * set, else 0. */
extern const int64_t FUNCTION(fast_matmul);

/* P, the columns of one tile of packed weights [ceil(m / P), k, P]: element [i, j, p] is weight
 * [i P + p, j], or 0 if i P + p >= m. */
extern const int64_t FUNCTION(tile_columns);

/* out [b, h, t, k] = dropout(softmax(q k^T scale)) v, for q [b, h, t, k] and k, v [b, h, s, k].
 *   keep: bytes [b, h, t, s], 0 masks a key; or NULL. A query whose keys are all masked gets the mean
 *     of v. */
status FUNCTION(attention)(const attention_shape *at, const elem *q, const elem *k, const elem *v,
                           const uint8_t *keep, elem *out);

/* The gradients of attention, all overwritten: of q [b, h, t, k], and of k and v [b, h, s, k].
 *   grad: the gradient of out [b, h, t, k], with out_strides. */
status FUNCTION(attention_grad)(const attention_shape *at, const elem *grad, const elem *q,
                                const elem *k, const elem *v, const uint8_t *keep, elem *grad_q,
                                elem *grad_k, elem *grad_v);

/* out [rows, heads k] = softmax(q k^T scale) v for each head; each row is one query.
 *   q: [rows, heads k], rows q_stride apart.
 *   cache: [cache_rows, 2 heads k], bfloat16 if in_bf16, else elem; a row is the keys of all heads, then
 *     the values.
 *   slots: [rows, count], rows slots_stride apart: the cache rows that each query attends to; a negative
 *     slot is padding. A query whose slots are all padding gets NaN. */
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

/* The gradients of add_norm: grad_x and grad_y [rows, d] are overwritten, grad_gain and grad_bias [d] are
 * accumulated.
 *   grad: the gradient of out [rows, d]. */
status FUNCTION(add_norm_grad)(const elem *grad, const elem *x, const elem *y, const float *gain,
                               const float *mean, const float *rstd, elem *grad_x, elem *grad_y,
                               float *grad_gain, float *grad_bias, int64_t rows, int64_t d,
                               uint32_t cut, float scale, uint32_t seed);

/* out [n, m] = x w^T + bias, or max(0, x w^T + bias) if apply_relu, for x [n, k] and w [m, k].
 *   w, bias: w is rounded to elem; bias [m] is not, and may be NULL.
 *   For bfloat16, k is even. */
status FUNCTION(linear)(const elem *x, const float *w, const float *bias, elem *out, int64_t n,
                        int64_t k, int64_t m, int apply_relu);

/* The gradients of linear, all overwritten: grad_x [n, k], grad_w [m, k], grad_bias [m] or NULL.
 *   grad: the gradient of x w^T + bias [n, m], before max(0, .); n is at least 1.
 *   input_is_relu: x is the output of max(0, .), and grad_x is 0 where x is 0.
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

/* projected_cross_entropy for given logits [rows, width], rows `stride` apart, and targets [rows] from 0 to
 * width - 1.
 *   with_grad: overwrite the logits with their gradient. */
status FUNCTION(cross_entropy)(elem *logits, const int64_t *targets, int64_t rows, int64_t width,
                               int64_t stride, float smoothing, int with_grad, double *loss_and_nll);

/* ids [rows, count] of the greatest logits of each row, except those in `never`, greatest first, among equal
 * logits the lowest id first; and log_probs [rows, count], normalised over the whole row.
 *   logits: [rows, width]; never: [num_never], from 0 to width - 1.
 *   1 <= count <= width - the number of different tokens in `never`. */
status FUNCTION(topk)(const elem *logits, const int64_t *never, int64_t *ids, float *log_probs,
                      int64_t rows, int64_t width, int64_t num_never, int64_t count);

#ifndef BF16 /* the following for float only */

/* 1 if int8 products are faster than float products with this instruction set, else 0. */
extern const int64_t fast_int8_float;

/* out [n, m] = x w^T + bias, or max(0, x w^T + bias) if apply_relu, for x [n, k] and packed w [m, k]. */
status packed_linear_float(const linear_map *map, const float *x, float *out, int64_t n, int64_t k, int64_t m,
                           int apply_relu);

/* packed_linear without max(0, .), for finite weights with the same bits, faster where most of x is 0. NaN and
 * inf weights of a zero in x are skipped. */
status packed_linear_sparse_float(const linear_map *map, const float *x, float *out, int64_t n, int64_t k,
                                  int64_t m);

/* topk of the logits x w^T [n, m], for x [n, k] and a map without a bias. */
status packed_topk_float(const linear_map *map, const float *x, const int64_t *never, int64_t *ids,
                         float *log_probs, int64_t n, int64_t k, int64_t m, int64_t num_never,
                         int64_t count);

/* ids [n]: the token of the greatest logit of each row, except those in `never`; -1 if it is not finite.
 *   scan: a map without a bias, in bfloat16 or int8, which approximates all logits.
 *   w: [m, k] in float, not packed: the result is the argmax of the float logits x w^T, of which only those
 *     are computed that can be the greatest by their approximation. NULL: the argmax of the approximations.
 *   bounds: [2, ceil(m / 64)], for each block of 64 rows of w: the greatest length |w_i|, and the greatest
 *     error of a logit of `scan` for a rounded x of length 1. NULL if w is NULL. */
status packed_argmax_float(const linear_map *scan, const float *x, const float *w, const float *bounds,
                           const int64_t *never, int64_t *ids, int64_t n, int64_t k, int64_t m,
                           int64_t num_never);

/* Encode sources, and write the cross-attention keys and values of each decoder layer to its pool. The input
 * of the first layer is table[id] * table_scale + encodings[position].
 *   layers: [num_layers]; maps [2 d, d], from states to keys and values, and pools: one for each
 *     decoder layer.
 *   ids: [b, s]; slots: [b, s], the row of the pools for each position; a negative slot is padding. */
status encode_sources_float(const encoder_shape *at, const stack_layer *layers, const sources_shape *to,
                            const linear_map *maps, void *const *pools, const float *table,
                            const float *encodings, const int64_t *ids, const int64_t *slots);

/* states [rows, d] after all layers, for the newest token of each hypothesis. The input of the first layer is
 * table[id] * table_scale + encodings[position]. The keys and values of the token are written to the row of
 * each of `pasts` that is the last past slot of its hypothesis.
 *   layers: [num_layers]; pasts, sources: a cache for each layer.
 *   ids, positions: [rows]; positions beyond the encodings have the last encoding.
 *   past_slots: [rows, past_count]; source_slots: [rows, source_count]. */
status decoder_step_float(const decoder_shape *at, const stack_layer *layers, void *const *pasts,
                          const void *const *sources, const int64_t *ids, const int64_t *positions,
                          const float *table, const float *encodings, const int64_t *past_slots,
                          const int64_t *source_slots, float *states);

/* Decode up to num_positions positions of a beam search, for `rows` hypotheses, sorted by sentence.
 *
 * The call returns before a position at which a target has reached its maximum length, free slots are
 * missing, or a log-probability is not finite. It returns after a position at which the search of a sentence
 * ends: all its `beam` hypotheses are finished, or no open one can get a score above the num_best-th best
 * finished one. With R = num_sentences * beam and P = num_positions:
 *   never: [num_never] tokens that are not generated.
 *   penalties: [num_penalties], the length penalty for each length with eos; scores are divided by it.
 *   max_lengths: [num_sentences], without eos.
 *   free_slots: [num_free] rows of `pasts`, taken in their order.
 *   num_places: [num_sentences], `beam` minus the number of finished hypotheses; updated.
 *   best_scores: [num_sentences, num_best], the best scores of finished hypotheses, best first; updated.
 *   ints: [R, 4 + W + T + S], updated, for each open hypothesis: its sentence; its cell, sentence * beam +
 *     its rank among the candidates of its sentence; its last token; its length; W = written_count + P
 *     tokens; T = past_count + P past slots; S = source_count source slots. The call fills the last P columns
 *     of W and T.
 *   reals: [R, 1 + W], updated: the log-probability of the hypothesis, and of each of its tokens.
 *   ended_ints: [R, 2 + W], written, for each finished hypothesis: sentence, length, and tokens,
 *     right-aligned.
 *   ended_reals: [R, 2 + W], written: log-probability, score, and log-probabilities of the tokens,
 *     right-aligned.
 *   counts: [4], written: positions decoded, open hypotheses, finished hypotheses, and free slots taken. */
status search_steps_float(const search_shape *is, const decoder_shape *decoder, const stack_layer *layers,
                          void *const *pasts, const void *const *sources, const output_layer *output,
                          const float *table, const float *encodings, const int64_t *never,
                          const double *penalties, const int64_t *max_lengths, const int64_t *free_slots,
                          int64_t *num_places, double *best_scores, int64_t *ints, double *reals,
                          int64_t *ended_ints, double *ended_reals, int64_t *counts);

#endif

#pragma GCC visibility pop
