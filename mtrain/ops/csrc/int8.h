/* Products with weights in int8; compiled for float only. */
#pragma once

#include "ops.h"

/* packed_linear with weights in int8.
 *   errors: [n], written: the length of the rounding error of each row of x; or NULL. */
status multiply_int8(const linear_map *map, const float *x, float *out, float *errors, int64_t n, int64_t k,
                     int64_t m, int apply_relu);
