// AdaGrad with one sum per row, added before the step and without a start value.
#pragma once

namespace clickfleet {

struct AdagradV2 {
  float lr = 0.05F;
  static constexpr auto name = "adagrad_v2";
  static constexpr Scale scale = Scale::show;
  static constexpr auto fields() { return std::tuple{Field<AdagradV2>{"lr", &AdagradV2::lr, "step size"}}; }
  static int state(int) { return 1; }
  void init(const float*, float* s, int) const { *s = 0; }
  CLICKFLEET_INLINE void apply(float* w, float* g2sum, const float* g, int n, float by) const {
    *g2sum += sum_squares(g, n, by) / static_cast<float>(n);
    const float root = std::sqrt(*g2sum) + 1e-8F;
    for (int i = 0; i < n; ++i) w[i] -= lr * (g[i] * by) / root;
  }
};

}  // namespace clickfleet
