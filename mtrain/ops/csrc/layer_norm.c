/* LayerNorm(x + dropout(y)) in one pass over memory, and its gradients. */
#include "vec.h"

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

status FUNCTION(add_norm)(const elem *x, const elem *y, const float *gain, const float *bias, elem *out,
                   float *mean, float *rstd, int64_t rows, int64_t d, float eps, uint32_t cut,
                   float scale, uint32_t seed) {
    float *restrict sum_row = alloc_floats(d);
    if (!sum_row) return OPS_NO_MEMORY;
    for (int64_t r = 0; r < rows; r++) {
        const elem *xr = x + r * d, *yr = y + r * d;
        elem *restrict or = out + r * d;
        uint32_t first = (uint32_t)(r * d);
        for (int64_t i = 0; i < d; i++)
            sum_row[i] = load(xr[i]) + apply_dropout(load(yr[i]), first + (uint32_t)i, seed, cut, scale);
        float m = sum_of_row(sum_row, d) / (float)d;
        for (int64_t i = 0; i < d; i++) sum_row[i] -= m;
        float s = 1.0f / sqrtf(dot(sum_row, sum_row, d) / (float)d + eps);
        for (int64_t i = 0; i < d; i++) or[i] = save(sum_row[i] * s * gain[i] + bias[i]);
        mean[r] = m;
        rstd[r] = s;
    }
    free(sum_row);
    return OPS_OK;
}

/* For each row, with u = grad * gain and z = (x + dropout(y) - mean) rstd:
 * grad_x = (u - mean(u) - z mean(u z)) rstd, and grad_y = dropout(grad_x). */
status FUNCTION(add_norm_grad)(const elem *grad, const elem *x, const elem *y, const float *gain,
                        const float *mean, const float *rstd, elem *grad_x, elem *grad_y,
                        float *grad_gain, float *grad_bias, int64_t rows, int64_t d, uint32_t cut,
                        float scale, uint32_t seed) {
    float *normal = alloc_floats(2 * d);
    if (!normal) return OPS_NO_MEMORY;
    float *upstream = normal + d;
    for (int64_t r = 0; r < rows; r++) {
        const elem *gr = grad + r * d, *xr = x + r * d, *yr = y + r * d;
        elem *restrict gx = grad_x + r * d, *restrict gy = grad_y + r * d;
        uint32_t first = (uint32_t)(r * d);
        float m = mean[r], s = rstd[r];
        for (int64_t i = 0; i < d; i++) {
            float sum = load(xr[i]) + apply_dropout(load(yr[i]), first + (uint32_t)i, seed, cut, scale);
            float g = load(gr[i]);
            normal[i] = (sum - m) * s;
            grad_gain[i] += g * normal[i];
            grad_bias[i] += g;
            upstream[i] = g * gain[i];
        }
        float total = sum_of_row(upstream, d) / (float)d;
        float along = dot(upstream, normal, d) / (float)d;
        for (int64_t i = 0; i < d; i++) {
            float g = s * (upstream[i] - total - normal[i] * along);
            gx[i] = save(g);
            gy[i] = save(apply_dropout(g, first + (uint32_t)i, seed, cut, scale));
        }
    }
    free(normal);
    return OPS_OK;
}
