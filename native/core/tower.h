// The elementwise operations between the matrix products of a ReLU tower, each in one pass over memory. Rows have
// `width` floats.
#pragma once
#include <cstddef>

namespace clickfleet {

// x = max(x + bias, 0); NaN stays NaN.
void add_bias_relu(float* x, const float* bias, size_t rows, size_t width);

// The gradient of that ReLU, given its result `h`: g = 0 where h <= 0, and d_bias = the sum of g over the rows.
void relu_backward(float* g, const float* h, float* d_bias, size_t rows, size_t width);

// The same, where g is the product of a column and a row: g[b, :] = column[b] · row[:].
void relu_backward_of_product(const float* column, const float* row, float* g, const float* h, float* d_bias,
                              size_t rows, size_t width);

}  // namespace clickfleet
