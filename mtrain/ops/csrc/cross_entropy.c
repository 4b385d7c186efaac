/* The label-smoothed cross-entropy over a vocabulary, with its output projection.
 *
 * For token t and piece v let e_tv = exp(logit_tv - shift_t), and s_t the sum of e_tv over all v. The
 * gradient of logit_tv is
 *
 *      e_tv / s_t - even - (1 - smoothing) [v is the target of t],  with even = smoothing / m
 *
 * where only e_tv varies with both t and v. So logits are never stored: the powers e_tv are, rounded
 * once, and both gradients are products of these; what divides, shifts and smooths goes to the other
 * factor, or is added at the end. The slope of the target alone, where 1 - smoothing may cancel all
 * but a little, is kept apart, as a float. A token's shift is the logit of its target, so that not all
 * of its powers vanish; if one could overflow, they are made again below its greatest logit.
 *
 * States are float or bfloat16, STORE, and so are powers; weights are floats, and rounded on the way.
 * One thread runs each call. The file includes itself once for each type of storage.
 */
#ifndef STORE

#include "gemm.h"

#define TOKENS PANEL /* whose logits lie side by side */
#define CHUNK 512    /* tokens whose powers are held at once */
#define DEPTH 512    /* pieces whose share of a gradient is added up at once */
#define STRIDE (CHUNK + 32) /* of a piece's powers: powers of two share few lines of a cache */
#define GREATEST 60.0f /* logit whose power is taken, after the shift */

/* What is known of the tokens of a chunk. */
typedef struct {
    float shift[CHUNK], sums[CHUNK], tops[CHUNK]; /* tops: the greatest logits */
    float wanted[CHUNK], means[CHUNK];            /* logits: of the target, and of all in the mean */
    float slopes[CHUNK];                          /* the gradient of the target's logit */
} tokens;

/* e^x, to about 1e-7 of it and as much again for each unit of x; 2^-125 where it is smaller; what
 * is no number stays none. */
static inline lanes power_of_e(lanes x) {
    lanes exponent = x * 1.44269504f;
#pragma omp simd
    for (int i = 0; i < LANES; i++) exponent[i] = -125.0f > exponent[i] ? -125.0f : exponent[i];
    lanes shifted = exponent + 12582912.0f; /* 1.5 times 2^23, where floats are whole numbers */
    lanes rest = exponent - (shifted - 12582912.0f);
    lanes power = rest * 1.326472725e-3f + 9.671512786e-3f; /* 2^rest, nearest to it over [-0.5, 0.5] */
    power = power * rest + 5.550733744e-2f;
    power = power * rest + 2.402224208e-1f;
    power = power * rest + 6.931469776e-1f;
    power = power * rest + 1.0f;
    return (lanes)((words)power + ((words)shifted << 23));
}

/* Take the greatest logit off those of tokens whose powers could overflow; tell whether there were any. */
static int shift_more(tokens *of, int64_t rows) {
    int is_any = 0;
    for (int64_t c = 0; c < rows; c++)
        if (of->tops[c] > of->shift[c] + GREATEST) of->shift[c] = of->tops[c], is_any = 1;
    return is_any;
}

/* Add up the loss and the negative log-likelihood of a chunk. */
static void add_losses(const tokens *of, int64_t rows, float smoothing, double *loss_and_nll) {
    for (int64_t c = 0; c < rows; c++) {
        float log_sum = of->shift[c] + logf(of->sums[c]), nll = log_sum - of->wanted[c];
        loss_and_nll[0] += (1.0f - smoothing) * nll + smoothing * (log_sum - of->means[c]);
        loss_and_nll[1] += nll;
    }
}

/* Numbers of 4 bytes that each part of what a call works with takes. */
#define PARTS(PART)                                                         \
    PART(w, m * k / SIZE)                                                   \
    PART(sum_w, k)                                                          \
    PART(states_across, CHUNK * k / SIZE)
#define PARTS_OF_GRADIENTS(PART)                                            \
    PART(even_x, k)                                                         \
    PART(w_down, round_up(m, DEPTH) / DEPTH * panel_size(DEPTH / SIZE, k))  \
    PART(scaled, CHUNK * k / SIZE)                                          \
    PART(states_down, panel_size(CHUNK / SIZE, k))                          \
    PART(mixed, CHUNK * k)                                                  \
    PART(powers_down, DEPTH / SIZE * TOKENS)                                \
    PART(powers_across, m * STRIDE / SIZE)
#define COUNT(name, size) total += round_up(size, LANES);
#define TAKE(name, size) in->name = (void *)next, next += round_up(size, LANES);

#define STORE bf16
#include "cross_entropy.c"
#undef STORE
#define STORE float
#include "cross_entropy.c"
#undef STORE

#else
#include "gemm.h"

/* What a call works with. */
typedef struct {
    int64_t k, m, num_words; /* of a row of k numbers */
    STORE *w;                /* weights [m, k], rounded, */
    uint32_t *w_down;        /* and in panels, DEPTH pieces at a time */
    float *sum_w, *even_x;   /* the sum of the rows of w, and of those of x times -even */
    uint32_t *states_across; /* x^T of a chunk in panels of TOKENS columns, */
    uint32_t *states_down;   /* and x / sum, in panels */
    STORE *scaled;           /* x / sum */
    float *mixed;            /* powers times w [CHUNK, k] */
    uint32_t *powers_down;   /* of DEPTH pieces and TOKENS tokens, words of pieces: [.., TOKENS] */
    STORE *powers_across;    /* of a chunk, words of tokens: [m, STRIDE] */
} NAME(rooms);

/* A vector of powers in the low bits of words, as they are stored. */
static inline words NAME(words_of)(lanes powers) {
    return SIZE == 1 ? (words)powers : widened(round_lanes(powers));
}

/* Take the powers of logits [pieces, TOKENS] of the tokens from `first` on, less their shifts; note the
 * sums and the greatest logits; store the powers, if `down` is not NULL. Not part of its caller: its
 * constants would take registers from the sums of tiles. */
static __attribute__((noinline)) void NAME(take_powers)(const float *logits, int64_t pieces,
                                                        tokens *of, int64_t first, uint32_t *down,
                                                        STORE *across) {
    lanes shifts[VECTORS], sums[VECTORS], tops[VECTORS];
    memcpy(shifts, of->shift + first, sizeof shifts);
    memcpy(sums, of->sums + first, sizeof sums);
    memcpy(tops, of->tops + first, sizeof tops);
    for (int64_t r = 0; r < pieces; r += SIZE)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            words pairs = {0};
            for (int64_t i = 0; i < SIZE && r + i < pieces; i++) {
                lanes logit = get_float(logits + (r + i) * TOKENS + v * LANES, LANES);
#pragma omp simd
                for (int j = 0; j < LANES; j++)
                    tops[v][j] = logit[j] > tops[v][j] ? logit[j] : tops[v][j];
                lanes power = power_of_e(logit - shifts[v]);
                sums[v] += power;
                if (!down) continue;
                pairs |= NAME(words_of)(power) << (uint32_t)(16 * i);
                PASTE(put, STORE)(across + (r + i) * STRIDE + v * LANES, power, LANES);
            }
            if (down) memcpy(down + r / SIZE * TOKENS + v * LANES, &pairs, sizeof pairs);
        }
    memcpy(of->sums + first, sums, sizeof sums);
    memcpy(of->tops + first, tops, sizeof tops);
}

/* Find room; return 1 if there is none. */
static int NAME(find_room)(NAME(rooms) *in, int64_t k, int64_t m, int with_grad) {
    int64_t total = 0;
    PARTS(COUNT)
    if (with_grad) { PARTS_OF_GRADIENTS(COUNT) }
    uint32_t *next = room(total);
    if (!next) return 1;
    *in = (NAME(rooms)){.k = k, .m = m, .num_words = k / SIZE};
    PARTS(TAKE)
    if (with_grad) { PARTS_OF_GRADIENTS(TAKE) }
    return 0;
}

/* Round weights [m, k], lay them out, and add up their rows. */
static void NAME(lay_weights)(NAME(rooms) *in, const float *w) {
    int64_t k = in->k, block_size = panel_size(DEPTH / SIZE, k);
    memset(in->sum_w, 0, k * sizeof(float));
    for (int64_t r = 0; r < in->m; r++)
        for (int64_t i = 0; i < k; i++) {
            in->w[r * k + i] = SAVE(w[r * k + i]);
            in->sum_w[i] += LOAD(in->w[r * k + i]);
        }
    for (int64_t first = 0; in->w_down && first < in->m; first += DEPTH)
        NAME(lay_rows_down)(in->w_down + first / DEPTH * block_size, in->w + first * k,
                            least(in->m - first, DEPTH), k);
}

/* Lay states [rows, k] out across, and find the logits of their targets and of all in the mean. */
static void NAME(lay_states)(const NAME(rooms) *in, tokens *of, const STORE *x,
                             const int64_t *targets, int64_t rows) {
    for (int64_t c = 0; c < round_up(rows, TOKENS); c++) {
        const STORE *own = x + c * in->k, *w = in->w;
        uint32_t *to = in->states_across + c / TOKENS * TOKENS * in->num_words + c % TOKENS;
        float wanted = 0.0f, total = 0.0f;
        of->shift[c] = 0.0f;
        for (int64_t i = 0; i < in->num_words; i++) to[i * TOKENS] = 0;
        if (c >= rows) continue;
        for (int64_t i = 0; i < in->num_words; i++)
            memcpy(to + i * TOKENS, own + i * SIZE, sizeof *to);
        w += targets[c] * in->k;
#pragma omp simd reduction(+ : wanted, total)
        for (int64_t i = 0; i < in->k; i++) {
            wanted += LOAD(own[i]) * LOAD(w[i]);
            total += LOAD(own[i]) * in->sum_w[i];
        }
        of->shift[c] = of->wanted[c] = wanted;
        of->means[c] = total / (float)in->m;
    }
}

/* Take the powers of all logits of a chunk; multiply them by the weights, but for those of targets. */
static void NAME(add_up)(const NAME(rooms) *in, tokens *of, const int64_t *targets, int64_t rows) {
    float logits[STRIPE * TOKENS] __attribute__((aligned(ALIGNMENT)));
    int64_t k = in->k, num_words = in->num_words;
    for (int64_t c = 0; c < CHUNK; c++) of->sums[c] = 0.0f, of->tops[c] = -INFINITY;
    for (int64_t piece = 0; piece < in->m; piece += DEPTH)
        for (int64_t first = 0; first < rows; first += TOKENS) {
            int64_t pieces = least(in->m - piece, DEPTH), count = least(rows - first, TOKENS);
            for (int64_t own = 0; own < pieces; own += STRIPE) {
                int64_t few = least(pieces - own, STRIPE);
                target to_logits = {.sums = logits, .stride = TOKENS};
                NAME(multiply)(to_logits, few, TOKENS, in->w + (piece + own) * k, num_words, 1,
                               in->states_across + first * num_words, num_words);
                uint32_t *down = NULL;
                STORE *across = NULL;
                if (in->powers_down) {
                    down = in->powers_down + own / SIZE * TOKENS;
                    across = in->powers_across + (piece + own) * STRIDE + first;
                }
                NAME(take_powers)(logits, few, of, first, down, across);
            }
            if (!in->powers_down) continue;
            for (int64_t c = 0; c < count; c++) {
                int64_t own = targets[first + c] - piece;
                if (own < 0 || own >= pieces) continue;
                in->powers_across[(piece + own) * STRIDE + first + c] = 0;
                STORE *word = (STORE *)(in->powers_down + own / SIZE * TOKENS + c);
                word[own % SIZE] = 0;
            }
            target to_mixed = {.sums = in->mixed + first * k, .adds = piece > 0, .stride = k};
            NAME(multiply)(to_mixed, count, k, in->powers_down, 1, TOKENS,
                           in->w_down + piece / DEPTH * panel_size(DEPTH / SIZE, k),
                           (pieces + SIZE - 1) / SIZE);
        }
}

/* Find the gradients of the states of a chunk, and scale these for those of the weights. */
static void NAME(find_grad_x)(const NAME(rooms) *in, tokens *of, const STORE *x,
                              const int64_t *targets, int64_t rows, float smoothing,
                              STORE *grad_x) {
    int64_t k = in->k;
    float even = smoothing / (float)in->m;
    for (int64_t c = 0; c < rows; c++) {
        float share = 1.0f / of->sums[c];
        float slope = expf(of->wanted[c] - of->shift[c]) * share - (1.0f - smoothing);
        const STORE *own = x + c * k, *w = in->w + targets[c] * k;
        const float *mixed = in->mixed + c * k;
        STORE *restrict grad = grad_x + c * k, *restrict scaled = in->scaled + c * k;
        for (int64_t i = 0; i < k; i++) {
            grad[i] = SAVE(mixed[i] * share + slope * LOAD(w[i]) - even * in->sum_w[i]);
            scaled[i] = SAVE(LOAD(own[i]) * share);
        }
        of->slopes[c] = slope;
    }
}

/* Add up the gradients of the weights, or, in the first chunk, begin with `even_x` for each. */
static void NAME(add_grad_w)(const NAME(rooms) *in, const tokens *of, const STORE *x,
                             const int64_t *targets, int64_t rows, int is_first, float *grad_w) {
    int64_t k = in->k;
    NAME(lay_rows_down)(in->states_down, in->scaled, rows, k);
    for (int64_t piece = 0; piece < in->m; piece += STRIPE) {
        target to = {.bias = is_first ? in->even_x : NULL, .sums = grad_w + piece * k, .adds = !is_first, .stride = k};
        const STORE *powers = in->powers_across + piece * STRIDE;
        NAME(multiply)(to, least(in->m - piece, STRIPE), k, powers, STRIDE / SIZE, 1,
                       in->states_down, (rows + SIZE - 1) / SIZE);
    }
    for (int64_t c = 0; c < rows; c++) {
        float *restrict grad = grad_w + targets[c] * k;
        for (int64_t i = 0; i < k; i++) grad[i] += of->slopes[c] * LOAD(x[c * k + i]);
    }
}

/* Add up the loss and the negative log-likelihood of targets [n] under logits x w^T, for x [n, k]
 * and w [m, k], and find the gradients, if they are wanted; n is not 0, and k is whole words. Return
 * 0, or 1 if the memory does not hold what this works with. */
int NAME(projected_cross_entropy)(const STORE *x, const float *w, const int64_t *targets,
                                  STORE *grad_x, float *grad_w, int64_t n, int64_t k, int64_t m,
                                  float smoothing, double *loss_and_nll) {
    NAME(rooms) in;
    tokens of;
    if (NAME(find_room)(&in, k, m, grad_w != NULL)) return 1;
    NAME(lay_weights)(&in, w);
    if (grad_w) memset(in.even_x, 0, k * sizeof(float));
    for (int64_t r = 0; grad_w && r < n; r++)
        for (int64_t i = 0; i < k; i++) in.even_x[i] -= smoothing / (float)m * LOAD(x[r * k + i]);
    for (int64_t start = 0; start < n; start += CHUNK) {
        int64_t rows = least(n - start, CHUNK);
        const STORE *own = x + start * k;
        NAME(lay_states)(&in, &of, own, targets + start, rows);
        do NAME(add_up)(&in, &of, targets + start, rows);
        while (shift_more(&of, rows));
        add_losses(&of, rows, smoothing, loss_and_nll);
        if (!grad_w) continue;
        NAME(find_grad_x)(&in, &of, own, targets + start, rows, smoothing, grad_x + start * k);
        NAME(add_grad_w)(&in, &of, own, targets + start, rows, start == 0, grad_w);
    }
    free(in.w);
    return 0;
}

#endif
