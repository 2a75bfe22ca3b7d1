// AdaGrad with one sum per row: a row slows down by the gradients it has already seen. The first step has size lr.
#pragma once

namespace clickfleet {

struct Adagrad {
  float lr = 0.05F, initial_g2sum = 3.0F;
  static constexpr auto name = "adagrad";
  static constexpr Scale scale = Scale::show;
  static constexpr auto fields() {
    return std::tuple{Field<Adagrad>{"lr", &Adagrad::lr, "step size"},
                      Field<Adagrad>{"initial_g2sum", &Adagrad::initial_g2sum, "how slowly the step shrinks at first"}};
  }
  static int state(int) { return 1; }
  void init(const float*, float* s, int) const { *s = 0; }
  CLICKFLEET_INLINE void apply(float* w, float* g2sum, const float* g, int n, float div) const {
    const float step = lr * std::sqrt(initial_g2sum / (initial_g2sum + *g2sum));
    const float square = sum_squares(g, n, div);
    for (int i = 0; i < n; ++i) w[i] -= step * (g[i] / div);
    *g2sum += square / static_cast<float>(n);
  }
};

}  // namespace clickfleet
