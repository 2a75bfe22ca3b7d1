// Lazy Adam (arXiv:1412.6980): only pushed rows move, each with its own step counter.
#pragma once

namespace clickfleet {

struct Adam {
  float lr = 0.001F, beta1 = 0.9F, beta2 = 0.999F, epsilon = 1e-8F;
  static constexpr auto name = "adam";
  static constexpr Scale scale = Scale::batch;
  static constexpr auto fields() {
    return std::tuple{
        Field<Adam>{"lr", &Adam::lr, "learning rate"},
        Field<Adam>{"beta1", &Adam::beta1, "decay rate of the first moment"},
        Field<Adam>{"beta2", &Adam::beta2, "decay rate of the second moment"},
        Field<Adam>{"epsilon", &Adam::epsilon, "added to the root of the second moment to avoid division by zero"}};
  }
  static int state(int n) { return 2 * n + 2; }  // m[n], v[n], beta1^t, beta2^t
  void init(const float*, float* s, int n) const {
    for (int i = 0; i < 2 * n; ++i) s[i] = 0;
    s[2 * n] = beta1;
    s[2 * n + 1] = beta2;
  }
  CLICKFLEET_INLINE void apply(float* w, float* s, const float* g, int n, float by) const {
    float *m = s, *v = s + n, *power = s + 2 * n;
    const float step = lr * std::sqrt(1 - power[1]) / (1 - power[0]);
    const float keep1 = 1 - beta1, keep2 = 1 - beta2;
    for (int i = 0; i < n; ++i) {
      const float x = g[i] * by;
      m[i] = beta1 * m[i] + keep1 * x;
      v[i] = beta2 * v[i] + keep2 * (x * x);
      w[i] -= step * m[i] / (std::sqrt(v[i]) + epsilon);
    }
    power[0] *= beta1;
    power[1] *= beta2;
  }
};

}  // namespace clickfleet
