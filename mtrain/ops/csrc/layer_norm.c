/* Operations between matrix products, each in one pass over memory:
 *
 *      dropout         x [n] -> y [n]
 *      add_norm        x, y [rows, d] -> out = LayerNorm(x + dropout(y)); and its gradients
 *      topk            logits [rows, width] -> ids, log_probs [rows, count]
 *      cross_entropy   logits [rows, width] -> their gradient, in place, and the sums of the loss
 *
 * Values are stored as float or as bfloat16 (ELEM), and computed in float. The plain formula of each is
 * in the Python module of its name. Calls run on one thread: training splits the batch over threads,
 * not the operation. They return 0, or 1 if there is no memory. The file includes itself once for each
 * ELEM.
 */
#ifndef ELEM

#include "vec.h"

#define BLOCK 64 /* logits for which one maximum is kept */
#define PART 512 /* powers that are summed in float; their sums are summed in double */

static inline float sum_of_row(const float *row, int64_t n) {
    vec_float sums = {0}, values;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        memcpy(&values, row + i, sizeof values);
        sums += values;
    }
    float total = sum_of(sums);
    for (; i < n; i++) total += row[i];
    return total;
}

/* The `count`-th greatest value; -INFINITY if there are fewer. `tops` holds `count` numbers. */
static inline float nth_greatest(const float *values, int64_t n, int64_t count, float *tops) {
    for (int64_t i = 0; i < count; i++) tops[i] = -INFINITY;
    for (int64_t i = 0; i < n; i++) {
        if (!(values[i] > tops[count - 1])) continue;
        int64_t at = count - 1;
        for (; at > 0 && tops[at - 1] < values[i]; at--) tops[at] = tops[at - 1];
        tops[at] = values[i];
    }
    return tops[count - 1];
}

#define ELEM bf16
#include "layer_norm.c"
#undef ELEM
#define ELEM float
#include "layer_norm.c"
#undef ELEM

#else

/* y = dropout(x); its gradient is the same function of the gradient. */
int NAME(dropout)(const ELEM *restrict x, ELEM *restrict y, int64_t n, uint32_t cut, float scale, uint32_t seed) {
    for (int64_t i = 0; i < n; i++)
        y[i] = SAVE(apply_dropout(LOAD(x[i]), (uint32_t)i, seed, cut, scale));
    return 0;
}

/* out [rows, d] = LayerNorm(x + dropout(y)); stores each row's mean and 1 / sqrt(variance + eps). */
int NAME(add_norm)(const ELEM *x, const ELEM *y, const float *gain, const float *bias, ELEM *out,
                   float *mean, float *rstd, int64_t rows, int64_t d, float eps, uint32_t cut,
                   float scale, uint32_t seed) {
    float *restrict sum_row = malloc(d * sizeof(float));
    if (!sum_row) return 1;
    for (int64_t r = 0; r < rows; r++) {
        const ELEM *xr = x + r * d, *yr = y + r * d;
        ELEM *restrict or = out + r * d;
        uint32_t first = (uint32_t)(r * d);
        for (int64_t i = 0; i < d; i++)
            sum_row[i] = LOAD(xr[i]) + apply_dropout(LOAD(yr[i]), first + (uint32_t)i, seed, cut, scale);
        float m = sum_of_row(sum_row, d) / (float)d;
        for (int64_t i = 0; i < d; i++) sum_row[i] -= m;
        float s = 1.0f / sqrtf(dot(sum_row, sum_row, d) / (float)d + eps);
        for (int64_t i = 0; i < d; i++) or[i] = SAVE(sum_row[i] * s * gain[i] + bias[i]);
        mean[r] = m;
        rstd[r] = s;
    }
    free(sum_row);
    return 0;
}

/* The gradients of add_norm; those of gain and bias [d] are accumulated. */
int NAME(add_norm_grad)(const ELEM *grad, const ELEM *x, const ELEM *y, const float *gain,
                        const float *mean, const float *rstd, ELEM *grad_x, ELEM *grad_y,
                        float *grad_gain, float *grad_bias, int64_t rows, int64_t d, uint32_t cut,
                        float scale, uint32_t seed) {
    float *normal = malloc(2 * d * sizeof(float)), *upstream = normal + d;
    if (!normal) return 1;
    for (int64_t r = 0; r < rows; r++) {
        const ELEM *gr = grad + r * d, *xr = x + r * d, *yr = y + r * d;
        ELEM *restrict gx = grad_x + r * d, *restrict gy = grad_y + r * d;
        uint32_t first = (uint32_t)(r * d);
        float m = mean[r], s = rstd[r];
        for (int64_t i = 0; i < d; i++) {
            float sum = LOAD(xr[i]) + apply_dropout(LOAD(yr[i]), first + (uint32_t)i, seed, cut, scale);
            float g = LOAD(gr[i]);
            normal[i] = (sum - m) * s;
            grad_gain[i] += g * normal[i];
            grad_bias[i] += g;
            upstream[i] = g * gain[i];
        }
        float total = sum_of_row(upstream, d) / (float)d;
        float along = dot(upstream, normal, d) / (float)d;
        for (int64_t i = 0; i < d; i++) {
            float g = s * (upstream[i] - total - normal[i] * along);
            gx[i] = SAVE(g);
            gy[i] = SAVE(apply_dropout(g, first + (uint32_t)i, seed, cut, scale));
        }
    }
    free(normal);
    return 0;
}

/* ids [rows, count] of the greatest logits of each row, except those in `never`, greatest first and among
 * equals the first; and their log-probabilities over the whole row. Of a row only those blocks are
 * searched whose maximum can be among them: count + num_never blocks, or more where maxima are equal. */
int NAME(topk)(const ELEM *logits, const int64_t *never, int64_t *ids, float *log_probs,
                     int64_t rows, int64_t width, int64_t num_never, int64_t count) {
    int64_t blocks = (width + BLOCK - 1) / BLOCK;
    float *tops = malloc((blocks + count + num_never) * sizeof(float));
    if (!tops) return 1;
    for (int64_t r = 0; r < rows; r++) {
        const ELEM *row = logits + r * width;
        int64_t *own = ids + r * count, found = 0;
        float *best = log_probs + r * count, top = -INFINITY;
        double sum = 0.0;
        for (int64_t b = 0; b < blocks; b++) {
            int64_t end = (b + 1) * BLOCK < width ? (b + 1) * BLOCK : width;
            float most = -INFINITY;
#pragma omp simd reduction(max : most)
            for (int64_t i = b * BLOCK; i < end; i++) most = LOAD(row[i]) > most ? LOAD(row[i]) : most;
            tops[b] = most;
            top = most > top ? most : top;
        }
        for (int64_t first = 0; first < width; first += PART) {
            int64_t end = first + PART < width ? first + PART : width;
            float part = 0.0f;
#pragma omp simd reduction(+ : part)
            for (int64_t i = first; i < end; i++) part += exp_(LOAD(row[i]) - top);
            sum += part;
        }
        float threshold = nth_greatest(tops, blocks, count + num_never, tops + blocks);
        for (int64_t b = 0; b < blocks; b++) {
            if (tops[b] < threshold || (found == count && !(tops[b] > best[count - 1]))) continue;
            int64_t end = (b + 1) * BLOCK < width ? (b + 1) * BLOCK : width;
            for (int64_t i = b * BLOCK; i < end; i++) {
                float x = LOAD(row[i]);
                int is_taken = found < count || x > best[count - 1];
                for (int64_t j = 0; is_taken && j < num_never; j++) is_taken = never[j] != i;
                if (!is_taken) continue;
                int64_t at = found < count ? found++ : count - 1;
                for (; at > 0 && best[at - 1] < x; at--) {
                    best[at] = best[at - 1];
                    own[at] = own[at - 1];
                }
                best[at] = x;
                own[at] = i;
            }
        }
        double log_sum = top + log(sum);
        for (int64_t i = 0; i < count; i++) best[i] = (float)(best[i] - log_sum);
    }
    free(tops);
    return 0;
}

/* Add the label-smoothed cross-entropy and the negative log-likelihood of logits [rows, width], whose
 * rows are `stride` apart, to loss_and_nll [2]; overwrite them with the gradient if `with_grad`. */
int NAME(cross_entropy)(ELEM *logits, const int64_t *targets, int64_t rows, int64_t width,
                        int64_t stride, float smoothing, int with_grad, double *loss_and_nll) {
    float *power = malloc(width * sizeof(float));
    if (!power) return 1;
    float even = smoothing / (float)width;
    for (int64_t r = 0; r < rows; r++) {
        ELEM *row = logits + r * stride;
        float top = -INFINITY, sum = 0.0f, total = 0.0f, wanted = LOAD(row[targets[r]]);
#pragma omp simd reduction(max : top)
        for (int64_t i = 0; i < width; i++) top = LOAD(row[i]) > top ? LOAD(row[i]) : top;
#pragma omp simd reduction(+ : sum, total)
        for (int64_t i = 0; i < width; i++) {
            float x = LOAD(row[i]);
            total += x;
            power[i] = exp_(x - top);
            sum += power[i];
        }
        float log_sum = top + logf(sum);
        float part = log_sum - wanted;
        loss_and_nll[0] += (1.0f - smoothing) * part + smoothing * (log_sum - total / (float)width);
        loss_and_nll[1] += part;
        if (with_grad) {
            float share = 1.0f / sum;
            for (int64_t i = 0; i < width; i++) row[i] = SAVE(power[i] * share - even);
            row[targets[r]] = SAVE(power[targets[r]] * share - even - (1.0f - smoothing));
        }
    }
    free(power);
    return 0;
}

#endif
