// AdaGrad with one sum of squares per row: the more gradients a row has seen, the smaller its steps. The first step has
// size lr.
#pragma once

namespace clickfleet {

struct Adagrad {
  float lr = 0.05F, initial_g2sum = 3.0F;
  static constexpr auto name = "adagrad";
  static constexpr Scale scale = Scale::show;
  static constexpr auto fields() {
    return std::tuple{
        Field<Adagrad>{"lr", &Adagrad::lr, "learning rate"},
        Field<Adagrad>{
            "initial_g2sum", &Adagrad::initial_g2sum,
            "initial sum of squared gradients: with larger values the learning rate falls more slowly at first"}};
  }
  static int state(int) { return 1; }
  void init(const float*, float* s, int) const { *s = 0; }
  CLICKFLEET_INLINE void apply(float* w, float* g2sum, const float* g, int n, float by) const {
    const float step = lr * std::sqrt(initial_g2sum / (initial_g2sum + *g2sum));
    const float square = sum_squares(g, n, by);
    for (int i = 0; i < n; ++i) w[i] -= step * (g[i] * by);
    *g2sum += square / static_cast<float>(n);
  }
};

}  // namespace clickfleet
