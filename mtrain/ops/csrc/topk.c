/* The greatest logits of each row, and their log-probabilities. */
#include "vec.h"

#define BLOCK 64 /* logits for which one maximum is kept */
#define PART 512 /* powers that are summed in float; the sums of parts are added in double */

/* The `count`-th greatest of n values; -INFINITY if there are fewer. `tops` is a buffer [count]. */
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

/* Only the blocks of a row whose maximum can be among the best logits are searched: count + num_never blocks,
 * or more if maxima are equal. */
status FUNCTION(topk)(const elem *logits, const int64_t *never, int64_t *ids, float *log_probs,
                     int64_t rows, int64_t width, int64_t num_never, int64_t count) {
    if (!all_below(never, num_never, width)) return OPS_BAD_INDEX;
    int64_t blocks = (width + BLOCK - 1) / BLOCK;
    float *tops = alloc_floats(blocks + count + num_never);
    if (!tops) return OPS_NO_MEMORY;
    for (int64_t r = 0; r < rows; r++) {
        const elem *row = logits + r * width;
        int64_t *own = ids + r * count, found = 0;
        float *best = log_probs + r * count, top = -INFINITY;
        double sum = 0.0;
        for (int64_t b = 0; b < blocks; b++) {
            int64_t end = min_of((b + 1) * BLOCK, width);
            float most = -INFINITY;
#pragma omp simd reduction(max : most)
            for (int64_t i = b * BLOCK; i < end; i++) most = load(row[i]) > most ? load(row[i]) : most;
            tops[b] = most;
            top = most > top ? most : top;
        }
        for (int64_t first = 0; first < width; first += PART) {
            int64_t end = min_of(first + PART, width);
            float part = 0.0f;
#pragma omp simd reduction(+ : part)
            for (int64_t i = first; i < end; i++) part += exp_(load(row[i]) - top);
            sum += part;
        }
        float threshold = nth_greatest(tops, blocks, count + num_never, tops + blocks);
        for (int64_t b = 0; b < blocks; b++) {
            if (tops[b] < threshold || (found == count && !(tops[b] > best[count - 1]))) continue;
            int64_t end = min_of((b + 1) * BLOCK, width);
            for (int64_t i = b * BLOCK; i < end; i++) {
                float x = load(row[i]);
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
    return OPS_OK;
}
