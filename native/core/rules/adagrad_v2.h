// AdaGrad with one sum of squares per row, updated before the step. No gradient, however large, moves a row by more
// than lr (root mean square). With an initial value above 0, a row seen once or twice moves less than a row seen often.
#pragma once

namespace clickfleet {

struct AdagradV2 {
  float lr = 0.05F, initial_g2sum = 0.0F;
  static constexpr auto name = "adagrad_v2";
  static constexpr Scale scale = Scale::show;
  static constexpr auto fields() {
    return std::tuple{Field<AdagradV2>{"lr", &AdagradV2::lr, "learning rate"},
                      Field<AdagradV2>{"initial_g2sum", &AdagradV2::initial_g2sum, "initial sum of squared gradients"}};
  }
  static int state(int) { return 1; }
  void init(const float*, float* s, int) const { *s = 0; }
  CLICKFLEET_INLINE void apply(float* w, float* g2sum, const float* g, int n, float by) const {
    *g2sum += sum_squares(g, n, by) / static_cast<float>(n);
    const float root = std::sqrt(initial_g2sum + *g2sum) + 1e-8F;
    for (int i = 0; i < n; ++i) w[i] -= lr * (g[i] * by) / root;
  }
};

}  // namespace clickfleet
