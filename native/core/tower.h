// What stands between the matrix products of a ReLU tower, in one pass over the memory each. Rows of `width` floats.
#pragma once
#include <cstddef>

namespace clickfleet {

// x = max(x + bias, 0); a NaN stays one.
void add_bias_relu(float* x, const float* bias, size_t rows, size_t width);

// Back through that ReLU, whose result was `h`: g = 0 where h <= 0, and d_bias = the sum of g over the rows.
void relu_backward(float* g, const float* h, float* d_bias, size_t rows, size_t width);

// The same where g is still the product of a column and a row: g[b, :] = column[b] · row[:].
void relu_backward_of_product(const float* column, const float* row, float* g, const float* h, float* d_bias,
                              size_t rows, size_t width);

}  // namespace clickfleet
