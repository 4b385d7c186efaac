/* Dropout whose mask is a hash of seed and index; the gradient computes it again. */
#include "vec.h"

status FUNCTION(dropout)(const elem *restrict x, elem *restrict y, int64_t n, uint32_t cut, float scale, uint32_t seed) {
    for (int64_t i = 0; i < n; i++)
        y[i] = save(apply_dropout(load(x[i]), (uint32_t)i, seed, cut, scale));
    return OPS_OK;
}
