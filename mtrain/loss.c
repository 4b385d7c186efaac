/* The label-smoothed cross-entropy over a vocabulary, with its output projection, in bfloat16.
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
 * For processors with the products of tiles.h; elsewhere this file is empty, and products.py takes
 * PyTorch's, with the function of kernels.c between them. One thread runs each call.
 */
#include "tiles.h"

#ifdef __AVX512BF16__

#define TOKENS PANEL /* whose logits lie side by side */
#define CHUNK 512    /* tokens whose powers are held at once */
#define DEPTH 1024   /* pieces whose share of a gradient is added up at once */
#define STRIDE (CHUNK + 2 * SUMS) /* of a piece's powers: powers of two share few lines of a cache */
#define GREATEST 60.0f /* logit whose power is taken, after the shift */

/* What is known of the tokens of a chunk. */
typedef struct {
    float shift[CHUNK], sums[CHUNK], tops[CHUNK]; /* tops: the greatest logits */
    float wanted[CHUNK], means[CHUNK];            /* logits: of the target, and of all in the mean */
    float slopes[CHUNK];                          /* the gradient of the target's logit */
} tokens;

/* What a call works with. */
typedef struct {
    int64_t k, m, num_pairs;
    pair *w;              /* weights [m, k], rounded */
    pair *w_down;         /* and in panels, DEPTH pieces at a time */
    float *sum_w, *even_x; /* the sum of the rows of w, and of those of x times -even */
    pair *states_across;  /* x^T of a chunk in panels of TOKENS columns, */
    pair *states_down;    /* and x / sum, in panels */
    bf16 *scaled;         /* x / sum */
    float *mixed;         /* powers times w [CHUNK, k] */
    pair *powers_down;    /* of DEPTH pieces and TOKENS tokens, pieces in pairs: [DEPTH / 2, TOKENS] */
    bf16 *powers_across;  /* of a chunk, tokens in pairs: [m, STRIDE] */
} rooms;

/* e^x, to about 1e-7 of it and as much again for each unit of x; 2^-126 where it is smaller. */
static inline __m512 power_of_e(__m512 x) {
    __m512 exponent = _mm512_max_ps(_mm512_set1_ps(-126.0f), x * 1.44269504f);
    __m512 rest = _mm512_reduce_ps(exponent, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 power = _mm512_set1_ps(1.8671305e-3f); /* 2^rest, nearest to it over [0, 1) */
    power = power * rest + 9.0170288e-3f;
    power = power * rest + 5.5799913e-2f;
    power = power * rest + 2.4016444e-1f;
    power = power * rest + 6.9315130e-1f;
    power = power * rest + 1.0f;
    return _mm512_scalef_ps(power, exponent);
}

/* The power of e of each logit less its shift, rounded; note the greatest logits, and the sums. */
static inline __m256i take_power(const float *logits, __m512 shift, __m512 *sums, __m512 *tops) {
    __m512 logit = _mm512_loadu_ps(logits);
    *tops = _mm512_max_ps(*tops, logit);
    __m512 power = power_of_e(logit - shift);
    *sums += power;
    return (__m256i)_mm512_cvtneps_pbh(power);
}

/* Take the powers of logits [pieces, TOKENS] of the tokens from `first` on, and store them, if `down`
 * is not NULL. Not part of its caller: its constants would take registers from the sums of tiles. */
static __attribute__((noinline)) void take_powers(const float *logits, int64_t pieces, tokens *of,
                                                  int64_t first, pair *down, bf16 *across) {
    __m512 shifts[VECTORS], sums[VECTORS], tops[VECTORS];
    for (int64_t v = 0; v < VECTORS; v++) {
        shifts[v] = _mm512_loadu_ps(of->shift + first + v * SUMS);
        sums[v] = _mm512_loadu_ps(of->sums + first + v * SUMS);
        tops[v] = _mm512_loadu_ps(of->tops + first + v * SUMS);
    }
    for (int64_t r = 0; r < pieces; r += 2, logits += 2 * TOKENS)
        for (int64_t v = 0; v < VECTORS; v++) {
            const float *own = logits + v * SUMS;
            __m256i upper = take_power(own, shifts[v], &sums[v], &tops[v]), lower = {0};
            if (r + 1 < pieces) lower = take_power(own + TOKENS, shifts[v], &sums[v], &tops[v]);
            if (!down) continue;
            __m512i low = _mm512_cvtepu16_epi32(upper), high = _mm512_cvtepu16_epi32(lower);
            __m512i both = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
            _mm512_storeu_si512(down + r / 2 * TOKENS + v * SUMS, both);
            _mm256_storeu_si256((__m256i *)(across + r * STRIDE + v * SUMS), upper);
            if (r + 1 < pieces)
                _mm256_storeu_si256((__m256i *)(across + (r + 1) * STRIDE + v * SUMS), lower);
        }
    for (int64_t v = 0; v < VECTORS; v++) {
        _mm512_storeu_ps(of->sums + first + v * SUMS, sums[v]);
        _mm512_storeu_ps(of->tops + first + v * SUMS, tops[v]);
    }
}

/* Numbers of 4 bytes that each part takes. */
#define PARTS(PART)                                                         \
    PART(w, m * k / 2)                                                      \
    PART(sum_w, k)                                                          \
    PART(states_across, CHUNK * k / 2)
#define PARTS_OF_GRADIENTS(PART)                                            \
    PART(even_x, k)                                                         \
    PART(w_down, round_up(m, DEPTH) / DEPTH * panel_size(DEPTH / 2, k))     \
    PART(scaled, CHUNK * k / 2)                                             \
    PART(states_down, panel_size(CHUNK / 2, k))                             \
    PART(mixed, CHUNK * k)                                                  \
    PART(powers_down, DEPTH / 2 * TOKENS)                                   \
    PART(powers_across, m * STRIDE / 2)
#define COUNT(name, size) total += round_up(size, SUMS);
#define TAKE(name, size) in->name = (void *)next, next += round_up(size, SUMS);

/* Find room; return 1 if there is none. */
static int find_room(rooms *in, int64_t k, int64_t m, int with_grad) {
    int64_t total = 0;
    PARTS(COUNT)
    if (with_grad) { PARTS_OF_GRADIENTS(COUNT) }
    pair *next = room(total);
    if (!next) return 1;
    *in = (rooms){.k = k, .m = m, .num_pairs = k / 2};
    PARTS(TAKE)
    if (with_grad) { PARTS_OF_GRADIENTS(TAKE) }
    return 0;
}

/* Round weights [m, k], lay them out, and add up their rows. */
static void lay_weights(rooms *in, const float *w) {
    int64_t k = in->k, block_size = panel_size(DEPTH / 2, k);
    bf16 *rounded = (bf16 *)in->w;
    memset(in->sum_w, 0, k * sizeof(float));
    for (int64_t r = 0; r < in->m; r++)
        for (int64_t i = 0; i < k; i++) {
            rounded[r * k + i] = store_bf16(w[r * k + i]);
            in->sum_w[i] += load_bf16(rounded[r * k + i]);
        }
    for (int64_t first = 0; in->w_down && first < in->m; first += DEPTH)
        lay_rows_down(in->w_down + first / DEPTH * block_size, rounded + first * k,
                      least(in->m - first, DEPTH), k);
}

/* Lay states [rows, k] out across, and find the logits of their targets and of all in the mean. */
static void lay_states(const rooms *in, tokens *of, const bf16 *x, const int64_t *targets,
                       int64_t rows) {
    for (int64_t c = 0; c < round_up(rows, TOKENS); c++) {
        const bf16 *own = x + c * in->k, *w = (bf16 *)in->w;
        pair *to = in->states_across + c / TOKENS * TOKENS * in->num_pairs + c % TOKENS;
        float wanted = 0.0f, total = 0.0f;
        of->shift[c] = 0.0f;
        for (int64_t p = 0; p < in->num_pairs; p++) to[p * TOKENS] = 0;
        if (c >= rows) continue;
        for (int64_t p = 0; p < in->num_pairs; p++) memcpy(to + p * TOKENS, own + 2 * p, sizeof *to);
        w += targets[c] * in->k;
#pragma omp simd reduction(+ : wanted, total)
        for (int64_t i = 0; i < in->k; i++) {
            wanted += load_bf16(own[i]) * load_bf16(w[i]);
            total += load_bf16(own[i]) * in->sum_w[i];
        }
        of->shift[c] = of->wanted[c] = wanted;
        of->means[c] = total / (float)in->m;
    }
}

/* Take the powers of all logits of a chunk; multiply them by the weights, but for those of targets. */
static void add_up(const rooms *in, tokens *of, const int64_t *targets, int64_t rows) {
    float logits[STRIPE * TOKENS] __attribute__((aligned(ALIGNMENT)));
    int64_t k = in->k, num_pairs = in->num_pairs;
    for (int64_t c = 0; c < CHUNK; c++) of->sums[c] = 0.0f, of->tops[c] = -INFINITY;
    for (int64_t piece = 0; piece < in->m; piece += DEPTH)
        for (int64_t first = 0; first < rows; first += TOKENS) {
            int64_t pieces = least(in->m - piece, DEPTH), count = least(rows - first, TOKENS);
            for (int64_t own = 0; own < pieces; own += STRIPE) {
                int64_t few = least(pieces - own, STRIPE);
                const pair *w = in->w + (piece + own) * num_pairs;
                target to_logits = {NULL, NULL, logits, 0, TOKENS};
                multiply(to_logits, few, TOKENS, w, num_pairs, 1,
                         in->states_across + first * num_pairs, num_pairs);
                pair *down = NULL;
                bf16 *across = NULL;
                if (in->powers_down) {
                    down = in->powers_down + own / 2 * TOKENS;
                    across = in->powers_across + (piece + own) * STRIDE + first;
                }
                take_powers(logits, few, of, first, down, across);
            }
            if (!in->powers_down) continue;
            for (int64_t c = 0; c < count; c++) {
                int64_t own = targets[first + c] - piece;
                if (own < 0 || own >= pieces) continue;
                in->powers_across[(piece + own) * STRIDE + first + c] = 0;
                in->powers_down[own / 2 * TOKENS + c] &= own % 2 ? 0x0000ffff : 0xffff0000;
            }
            target to_mixed = {NULL, NULL, in->mixed + first * k, piece > 0, k};
            multiply(to_mixed, count, k, in->powers_down, 1, TOKENS,
                     in->w_down + piece / DEPTH * panel_size(DEPTH / 2, k), (pieces + 1) / 2);
        }
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

/* Find the gradients of the states of a chunk, and scale these for those of the weights. */
static void find_grad_x(const rooms *in, tokens *of, const bf16 *x, const int64_t *targets,
                        int64_t rows, float smoothing, bf16 *grad_x) {
    int64_t k = in->k;
    float even = smoothing / (float)in->m;
    for (int64_t c = 0; c < rows; c++) {
        float share = 1.0f / of->sums[c];
        float slope = expf(of->wanted[c] - of->shift[c]) * share - (1.0f - smoothing);
        const bf16 *own = x + c * k, *w = (bf16 *)in->w + targets[c] * k;
        const float *mixed = in->mixed + c * k;
        bf16 *restrict grad = grad_x + c * k, *restrict scaled = in->scaled + c * k;
        for (int64_t i = 0; i < k; i++) {
            grad[i] = store_bf16(mixed[i] * share + slope * load_bf16(w[i]) - even * in->sum_w[i]);
            scaled[i] = store_bf16(load_bf16(own[i]) * share);
        }
        of->slopes[c] = slope;
    }
}

/* Add up the gradients of the weights, or, in the first chunk, begin with `even_x` for each. */
static void add_grad_w(const rooms *in, const tokens *of, const bf16 *x, const int64_t *targets,
                       int64_t rows, int is_first, float *grad_w) {
    int64_t k = in->k;
    lay_rows_down(in->states_down, in->scaled, rows, k);
    for (int64_t piece = 0; piece < in->m; piece += STRIPE) {
        target to = {is_first ? in->even_x : NULL, NULL, grad_w + piece * k, !is_first, k};
        const pair *powers = (const pair *)(in->powers_across + piece * STRIDE);
        multiply(to, least(in->m - piece, STRIPE), k, powers, STRIDE / 2, 1, in->states_down,
                 (rows + 1) / 2);
    }
    for (int64_t c = 0; c < rows; c++) {
        float *restrict grad = grad_w + targets[c] * k;
        for (int64_t i = 0; i < k; i++) grad[i] += of->slopes[c] * load_bf16(x[c * k + i]);
    }
}

/* Add up the loss and the negative log-likelihood of targets [n] under logits x w^T, for x [n, k]
 * and w [m, k], and find the gradients, if they are wanted; n is not 0, and k is even. Return 0, or 1
 * if the memory does not hold what this works with. */
int projected_cross_entropy_bf16(const bf16 *x, const float *w, const int64_t *targets,
                                 bf16 *grad_x, float *grad_w, int64_t n, int64_t k, int64_t m,
                                 float smoothing, double *loss_and_nll) {
    rooms in;
    tokens of;
    if (find_room(&in, k, m, grad_w != NULL)) return 1;
    lay_weights(&in, w);
    if (grad_w) memset(in.even_x, 0, k * sizeof(float));
    for (int64_t r = 0; grad_w && r < n; r++)
        for (int64_t i = 0; i < k; i++) in.even_x[i] -= smoothing / (float)m * load_bf16(x[r * k + i]);
    for (int64_t start = 0; start < n; start += CHUNK) {
        int64_t rows = least(n - start, CHUNK);
        const bf16 *own = x + start * k;
        lay_states(&in, &of, own, targets + start, rows);
        do add_up(&in, &of, targets + start, rows);
        while (shift_more(&of, rows));
        add_losses(&of, rows, smoothing, loss_and_nll);
        if (!grad_w) continue;
        find_grad_x(&in, &of, own, targets + start, rows, smoothing, grad_x + start * k);
        add_grad_w(&in, &of, own, targets + start, rows, start == 0, grad_w);
    }
    free(in.w);
    return 0;
}

#endif
