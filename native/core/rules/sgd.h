// Plain gradient descent: no state.
#pragma once

namespace clickfleet {

struct Sgd {
  float lr = 0.05F;
  static constexpr auto name = "sgd";
  static constexpr Scale scale = Scale::batch;
  static constexpr auto fields() { return std::tuple{Field<Sgd>{"lr", &Sgd::lr, "learning rate"}}; }
  static int state(int) { return 0; }
  void init(const float*, float*, int) const {}
  CLICKFLEET_INLINE void apply(float* w, float*, const float* g, int n, float by) const {
    for (int i = 0; i < n; ++i) w[i] -= lr * (g[i] * by);
  }
};

}  // namespace clickfleet
