// AdaGrad with one sum of squares per weight.
#pragma once

namespace clickfleet {

struct StdAdagrad {
  float lr = 0.05F, initial_g2sum = 3.0F;
  static constexpr auto name = "std_adagrad";
  static constexpr Scale scale = Scale::show;
  static constexpr auto fields() {
    return std::tuple{
        Field<StdAdagrad>{"lr", &StdAdagrad::lr, "learning rate"},
        Field<StdAdagrad>{
            "initial_g2sum", &StdAdagrad::initial_g2sum,
            "initial sum of squared gradients: with larger values the learning rate falls more slowly at first"}};
  }
  static int state(int n) { return n; }
  void init(const float*, float* s, int n) const {
    for (int i = 0; i < n; ++i) s[i] = 0;
  }
  CLICKFLEET_INLINE void apply(float* w, float* g2sum, const float* g, int n, float by) const {
    for (int i = 0; i < n; ++i) {
      const float x = g[i] * by;
      w[i] -= lr * std::sqrt(initial_g2sum / (initial_g2sum + g2sum[i])) * x;
      g2sum[i] += x * x;
    }
  }
};

}  // namespace clickfleet
