/* projected_cross_entropy: label-smoothed cross-entropy over a vocabulary with its output projection,
 * for states x [n, k], weights w [m, k] and targets [n]; its sums, and the gradients [n, k] and [m, k].
 *
 * For position t and vocabulary entry v let e_tv = exp(logit_tv - shift_t), and s_t the sum of e_tv over all v. The
 * gradient of logit_tv is
 *
 *      e_tv / s_t - even - (1 - smoothing) [v is the target of t],  with even = smoothing / m
 *
 * where only e_tv depends on both t and v. So the powers e_tv are stored instead of the logits, rounded
 * to elem, and both gradients are matrix products with them; division, shift and smoothing are applied to
 * the other factor, or to the result. The gradient of the target's logit is computed separately in float,
 * since subtracting 1 - smoothing may cancel most of it. The shift of a position is the logit of its
 * target, so that not all of its powers underflow; if one could overflow, they are computed again with the
 * greatest logit as the shift. Of large logits, the shift may differ from the logit that the loss is computed
 * with, because they are sums in a different order; powers are then computed again, too.
 *
 * States and powers are float or bfloat16 (elem); weights are floats, rounded to elem.
 */
#include "gemm.h"

#define TOKENS TILE_COLUMNS /* positions in a tile of logits */
#define CHUNK 512    /* positions whose powers are stored at once */
#define DEPTH 512    /* vocabulary entries whose powers are multiplied with the weights at once */
#define STRIDE (CHUNK + 32) /* of powers_across; a power of two would map its rows to the same cache sets */
#define GREATEST 60.0f /* the greatest shifted logit; powers are computed again if one is above it */
#define FARTHEST 1.0f  /* between a target's logit and its shift; else powers are computed again */

/* Statistics of the positions of a chunk. */
typedef struct {
    float shift[CHUNK], sums[CHUNK], tops[CHUNK]; /* tops: the greatest logits */
    float wanted[CHUNK], means[CHUNK];            /* the target's logit, and the mean of all logits */
    float slopes[CHUNK];                          /* the gradient of the target's logit */
} tokens;

/* e^x, with a relative error of about 1e-7 (1 + |x|), and not less than 2^-125; NaN stays NaN. */
static inline vec_float power_of_e(vec_float x) {
    vec_float exponent = x * 1.44269504f;
#pragma omp simd
    for (int i = 0; i < LANES; i++) exponent[i] = -125.0f > exponent[i] ? -125.0f : exponent[i];
    vec_float shifted = exponent + 12582912.0f; /* 1.5 times 2^23, where floats are whole numbers */
    vec_float rest = exponent - (shifted - 12582912.0f);
    vec_float power = rest * 1.326472725e-3f + 9.671512786e-3f; /* 2^rest, nearest to it over [-0.5, 0.5] */
    power = power * rest + 5.550733744e-2f;
    power = power * rest + 2.402224208e-1f;
    power = power * rest + 6.931469776e-1f;
    power = power * rest + 1.0f;
    return power * (vec_float)(((vec_u32)shifted + 127) << 23);
}

/* Use the greatest logit as the shift of positions whose powers could overflow, or whose shift is not near
 * the target's logit; return whether there are any. */
static int shift_more(tokens *of, int64_t rows) {
    int is_any = 0;
    for (int64_t c = 0; c < rows; c++) {
        float top = of->tops[c], shift = of->shift[c];
        int is_far = top > shift + GREATEST || fabsf(of->wanted[c] - shift) > FARTHEST;
        if (is_far && shift != top) of->shift[c] = top, is_any = 1;
    }
    return is_any;
}

/* Add the loss and the negative log-likelihood of a chunk to loss_and_nll [2]. Logits are subtracted from the
 * shift first, so that log-probabilities are not rounded at the size of a logit. */
static void add_losses(const tokens *of, int64_t rows, float smoothing, double *loss_and_nll) {
    for (int64_t c = 0; c < rows; c++) {
        float log_sum = logf(of->sums[c]), nll = log_sum + (of->shift[c] - of->wanted[c]);
        float uniform = log_sum + (of->shift[c] - of->means[c]);
        loss_and_nll[0] += (1.0f - smoothing) * nll + smoothing * uniform;
        loss_and_nll[1] += nll;
    }
}

/* The buffers of a workspace, and their sizes in numbers of 4 bytes; the second list is for gradients. */
#define BUFFERS(PART)                                                         \
    PART(w, m * k / K_GROUP)                                                   \
    PART(sum_w, k)                                                          \
    PART(states_across, CHUNK * k / K_GROUP)
#define GRADIENT_BUFFERS(PART)                                            \
    PART(even_x, k)                                                         \
    PART(w_down, round_up(m, DEPTH) / DEPTH * packed_size(DEPTH / K_GROUP, k))  \
    PART(scaled, CHUNK * k / K_GROUP)                                          \
    PART(states_down, packed_size(CHUNK / K_GROUP, k))                          \
    PART(mixed, CHUNK * k)                                                  \
    PART(powers_down, DEPTH / K_GROUP * TOKENS)                                \
    PART(powers_across, m * STRIDE / K_GROUP)
#define COUNT(name, size) total += round_up(size, LANES);
#define TAKE(name, size) in->name = (void *)next, next += round_up(size, LANES);

/* The buffers of a call. */
typedef struct {
    int64_t k, m, num_groups; /* num_groups: k-groups of a row */
    elem *w;                /* weights [m, k], rounded */
    uint32_t *w_down;        /* w packed, DEPTH entries at a time */
    float *sum_w, *even_x;   /* [k]: the sum of the rows of w; the sum of the rows of x times -even */
    uint32_t *states_across; /* x^T of a chunk, packed, TOKENS columns a tile */
    uint32_t *states_down;   /* x / sum, packed */
    elem *scaled;           /* x / sum */
    float *mixed;            /* powers times w [CHUNK, k] */
    uint32_t *powers_down;   /* [DEPTH / K_GROUP, TOKENS], k-groups of vocabulary entries */
    elem *powers_across;    /* [m, STRIDE], k-groups of the positions of a chunk */
} workspace;

/* Powers rounded to elem, in the low bits of 32-bit numbers. */
static inline vec_u32 to_groups(vec_float powers) {
    return K_GROUP == 1 ? (vec_u32)powers : widen(round_to_half(powers));
}

/* Compute e^(logit - shift) for logits [pieces, TOKENS] of the TOKENS positions from `first` on; update their
 * sums and greatest logits; store the powers in `down` and `across`, if `down` is not NULL. Not inlined: its
 * constants would take registers from the sums of tiles. */
static __attribute__((noinline)) void store_powers(const float *logits, int64_t pieces,
                                                        tokens *of, int64_t first, uint32_t *down,
                                                        elem *across) {
    vec_float shifts[VECTORS], sums[VECTORS], tops[VECTORS];
    memcpy(shifts, of->shift + first, sizeof shifts);
    memcpy(sums, of->sums + first, sizeof sums);
    memcpy(tops, of->tops + first, sizeof tops);
    for (int64_t r = 0; r < pieces; r += K_GROUP)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            vec_u32 pairs = {0};
            for (int64_t i = 0; i < K_GROUP && r + i < pieces; i++) {
                vec_float logit = load_vec_float(logits + (r + i) * TOKENS + v * LANES, LANES);
#pragma omp simd
                for (int j = 0; j < LANES; j++)
                    tops[v][j] = logit[j] > tops[v][j] ? logit[j] : tops[v][j];
                vec_float power = power_of_e(logit - shifts[v]);
                sums[v] += power;
                if (!down) continue;
                pairs |= to_groups(power) << (uint32_t)(16 * i);
                store_vec(across + (r + i) * STRIDE + v * LANES, power, LANES);
            }
            if (down) memcpy(down + r / K_GROUP * TOKENS + v * LANES, &pairs, sizeof pairs);
        }
    memcpy(of->sums + first, sums, sizeof sums);
    memcpy(of->tops + first, tops, sizeof tops);
}

/* Allocate the buffers in one block, which starts at `w`; return a status. */
static status alloc_workspace(workspace *in, int64_t k, int64_t m, int with_grad) {
    int64_t total = 0;
    BUFFERS(COUNT)
    if (with_grad) { GRADIENT_BUFFERS(COUNT) }
    uint32_t *next = alloc_floats(total);
    if (!next) return OPS_NO_MEMORY;
    *in = (workspace){.k = k, .m = m, .num_groups = k / K_GROUP};
    BUFFERS(TAKE)
    if (with_grad) { GRADIENT_BUFFERS(TAKE) }
    return OPS_OK;
}

/* Round weights [m, k], pack them, and sum their rows. */
static void prepare_weights(workspace *in, const float *w) {
    int64_t k = in->k, block_size = packed_size(DEPTH / K_GROUP, k);
    memset(in->sum_w, 0, k * sizeof(float));
    for (int64_t r = 0; r < in->m; r++)
        for (int64_t i = 0; i < k; i++) {
            in->w[r * k + i] = save(w[r * k + i]);
            in->sum_w[i] += load(in->w[r * k + i]);
        }
    for (int64_t first = 0; in->w_down && first < in->m; first += DEPTH)
        pack_rows(in->w_down + first / DEPTH * block_size, in->w + first * k,
                            min_of(in->m - first, DEPTH), k);
}

/* Pack states [rows, k]^T, and compute their shifts and mean logits. */
static void prepare_states(const workspace *in, tokens *of, const elem *x,
                             const int64_t *targets, int64_t rows) {
    for (int64_t c = 0; c < round_up(rows, TOKENS); c++) {
        const elem *own = x + c * in->k, *w = in->w;
        uint32_t *to = in->states_across + c / TOKENS * TOKENS * in->num_groups + c % TOKENS;
        float shift = 0.0f, total = 0.0f;
        of->shift[c] = 0.0f;
        for (int64_t i = 0; i < in->num_groups; i++) to[i * TOKENS] = 0;
        if (c >= rows) continue;
        for (int64_t i = 0; i < in->num_groups; i++)
            memcpy(to + i * TOKENS, own + i * K_GROUP, sizeof *to);
        w += targets[c] * in->k;
#pragma omp simd reduction(+ : shift, total)
        for (int64_t i = 0; i < in->k; i++) {
            shift += load(own[i]) * load(w[i]);
            total += load(own[i]) * in->sum_w[i];
        }
        of->shift[c] = shift;
        of->means[c] = total / (float)in->m;
    }
}

/* Compute the powers of all logits of a chunk, and their product with the weights; in the product, and in the
 * stored powers, those of targets are 0. Store the logits of targets. */
static void accumulate_powers(const workspace *in, tokens *of, const int64_t *targets, int64_t rows) {
    float logits[ROW_BLOCK * TOKENS] __attribute__((aligned(ALIGNMENT)));
    int64_t k = in->k, num_groups = in->num_groups;
    for (int64_t c = 0; c < CHUNK; c++) of->sums[c] = 0.0f, of->tops[c] = -INFINITY;
    for (int64_t piece = 0; piece < in->m; piece += DEPTH)
        for (int64_t first = 0; first < rows; first += TOKENS) {
            int64_t pieces = min_of(in->m - piece, DEPTH), count = min_of(rows - first, TOKENS);
            for (int64_t own = 0; own < pieces; own += ROW_BLOCK) {
                int64_t few = min_of(pieces - own, ROW_BLOCK);
                gemm_out to_logits = {.sums = logits, .stride = TOKENS};
                gemm(to_logits, few, TOKENS, in->w + (piece + own) * k, num_groups, 1,
                               in->states_across + first * num_groups, num_groups);
                for (int64_t c = 0; c < count; c++) {
                    int64_t target = targets[first + c] - piece - own;
                    if (target >= 0 && target < few) of->wanted[first + c] = logits[target * TOKENS + c];
                }
                uint32_t *down = NULL;
                elem *across = NULL;
                if (in->powers_down) {
                    down = in->powers_down + own / K_GROUP * TOKENS;
                    across = in->powers_across + (piece + own) * STRIDE + first;
                }
                store_powers(logits, few, of, first, down, across);
            }
            if (!in->powers_down) continue;
            for (int64_t c = 0; c < count; c++) {
                int64_t own = targets[first + c] - piece;
                if (own < 0 || own >= pieces) continue;
                in->powers_across[(piece + own) * STRIDE + first + c] = 0;
                elem *group = (elem *)(in->powers_down + own / K_GROUP * TOKENS + c);
                group[own % K_GROUP] = 0;
            }
            gemm_out to_mixed = {.sums = in->mixed + first * k, .accumulate = piece > 0, .stride = k};
            gemm(to_mixed, count, k, in->powers_down, 1, TOKENS,
                           in->w_down + piece / DEPTH * packed_size(DEPTH / K_GROUP, k),
                           (pieces + K_GROUP - 1) / K_GROUP);
        }
}

/* Compute the gradients of the states of a chunk, and x / sum for the gradients of the weights. */
static void write_grad_x(const workspace *in, tokens *of, const elem *x,
                              const int64_t *targets, int64_t rows, float smoothing,
                              elem *grad_x) {
    int64_t k = in->k;
    float even = smoothing / (float)in->m;
    for (int64_t c = 0; c < rows; c++) {
        float share = 1.0f / of->sums[c];
        float slope = expf(of->wanted[c] - of->shift[c]) * share - (1.0f - smoothing);
        const elem *own = x + c * k, *w = in->w + targets[c] * k;
        const float *mixed = in->mixed + c * k;
        elem *restrict grad = grad_x + c * k, *restrict scaled = in->scaled + c * k;
        for (int64_t i = 0; i < k; i++) {
            grad[i] = save(mixed[i] * share + slope * load(w[i]) - even * in->sum_w[i]);
            scaled[i] = save(load(own[i]) * share);
        }
        of->slopes[c] = slope;
    }
}

/* Accumulate the gradients of the weights; in the first chunk they begin with `even_x`. */
static void add_grad_w(const workspace *in, const tokens *of, const elem *x,
                             const int64_t *targets, int64_t rows, int is_first, float *grad_w) {
    int64_t k = in->k;
    pack_rows(in->states_down, in->scaled, rows, k);
    for (int64_t piece = 0; piece < in->m; piece += ROW_BLOCK) {
        gemm_out to = {.bias = is_first ? in->even_x : NULL, .sums = grad_w + piece * k, .accumulate = !is_first, .stride = k};
        const elem *powers = in->powers_across + piece * STRIDE;
        gemm(to, min_of(in->m - piece, ROW_BLOCK), k, powers, STRIDE / K_GROUP, 1,
                       in->states_down, (rows + K_GROUP - 1) / K_GROUP);
    }
    for (int64_t c = 0; c < rows; c++) {
        float *restrict grad = grad_w + targets[c] * k;
        for (int64_t i = 0; i < k; i++) grad[i] += of->slopes[c] * load(x[c * k + i]);
    }
}

status FUNCTION(projected_cross_entropy)(const elem *x, const float *w, const int64_t *targets,
                                  elem *grad_x, float *grad_w, int64_t n, int64_t k, int64_t m,
                                  float smoothing, double *loss_and_nll) {
    workspace in;
    tokens of;
    if (!all_below(targets, n, m)) return OPS_BAD_INDEX;
    if (alloc_workspace(&in, k, m, grad_w != NULL)) return OPS_NO_MEMORY;
    prepare_weights(&in, w);
    if (grad_w) memset(in.even_x, 0, k * sizeof(float));
    for (int64_t r = 0; grad_w && r < n; r++)
        for (int64_t i = 0; i < k; i++) in.even_x[i] -= smoothing / (float)m * load(x[r * k + i]);
    for (int64_t start = 0; start < n; start += CHUNK) {
        int64_t rows = min_of(n - start, CHUNK);
        const elem *own = x + start * k;
        prepare_states(&in, &of, own, targets + start, rows);
        do accumulate_powers(&in, &of, targets + start, rows);
        while (shift_more(&of, rows));
        add_losses(&of, rows, smoothing, loss_and_nll);
        if (!grad_w) continue;
        write_grad_x(&in, &of, own, targets + start, rows, smoothing, grad_x + start * k);
        add_grad_w(&in, &of, own, targets + start, rows, start == 0, grad_w);
    }
    free(in.w);
    return OPS_OK;
}

status FUNCTION(cross_entropy)(elem *logits, const int64_t *targets, int64_t rows, int64_t width,
                        int64_t stride, float smoothing, int with_grad, double *loss_and_nll) {
    if (!all_below(targets, rows, width)) return OPS_BAD_INDEX;
    float *power = alloc_floats(width);
    if (!power) return OPS_NO_MEMORY;
    float even = smoothing / (float)width;
    for (int64_t r = 0; r < rows; r++) {
        elem *row = logits + r * stride;
        float top = -INFINITY, sum = 0.0f, total = 0.0f, wanted = load(row[targets[r]]);
#pragma omp simd reduction(max : top)
        for (int64_t i = 0; i < width; i++) top = load(row[i]) > top ? load(row[i]) : top;
#pragma omp simd reduction(+ : sum, total)
        for (int64_t i = 0; i < width; i++) {
            float x = load(row[i]);
            total += x;
            power[i] = exp_(x - top);
            sum += power[i];
        }
        float log_sum = logf(sum), part = log_sum + (top - wanted);
        float uniform = log_sum + (top - total / (float)width);
        loss_and_nll[0] += (1.0f - smoothing) * part + smoothing * uniform;
        loss_and_nll[1] += part;
        if (with_grad) {
            float share = 1.0f / sum;
            for (int64_t i = 0; i < width; i++) row[i] = save(power[i] * share - even);
            row[targets[r]] = save(power[targets[r]] * share - even - (1.0f - smoothing));
        }
    }
    free(power);
    return OPS_OK;
}
