/* Products of whole numbers, in float only. */
#pragma once

#include "ops.h"

/* packed_linear of weights in whole numbers.
 *   errors: [n], written: the length of what rounding changes in each row of x; or NULL. */
status multiply_int8(const linear_map *map, const float *x, float *out, float *errors, int64_t n, int64_t k,
                     int64_t m, int apply_relu);
