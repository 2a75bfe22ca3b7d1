#include "tower.h"

#include <algorithm>

namespace clickfleet {

void add_bias_relu(float* x, const float* bias, size_t rows, size_t width) {
  for (size_t b = 0; b < rows; ++b, x += width)
    for (size_t i = 0; i < width; ++i) {
      const float sum = x[i] + bias[i];
      x[i] = sum < 0 ? 0 : sum;
    }
}

void relu_backward(float* __restrict g, const float* __restrict h, float* __restrict d_bias, size_t rows,
                   size_t width) {
  std::fill_n(d_bias, width, 0.0F);
  for (size_t b = 0; b < rows; ++b, g += width, h += width)
    for (size_t i = 0; i < width; ++i) {
      const float kept = h[i] <= 0 ? 0 : g[i];
      g[i] = kept;
      d_bias[i] += kept;
    }
}

void relu_backward_of_product(const float* column, const float* __restrict row, float* __restrict g,
                              const float* __restrict h, float* __restrict d_bias, size_t rows, size_t width) {
  std::fill_n(d_bias, width, 0.0F);
  for (size_t b = 0; b < rows; ++b, g += width, h += width) {
    const float c = column[b];
    for (size_t i = 0; i < width; ++i) {
      const float product = c * row[i];
      const float kept = h[i] <= 0 ? 0 : product;
      g[i] = kept;
      d_bias[i] += kept;
    }
  }
}

}  // namespace clickfleet
