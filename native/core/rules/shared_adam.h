// Adam with one first and one second moment per row, shared by all weights: four floats of state instead of 2n + 2.
#pragma once

namespace clickfleet {

struct SharedAdam {
  float lr = 0.001F, beta1 = 0.9F, beta2 = 0.999F, epsilon = 1e-8F;
  static constexpr auto name = "shared_adam";
  static constexpr Scale scale = Scale::batch;
  static constexpr auto fields() {
    return std::tuple{Field<SharedAdam>{"lr", &SharedAdam::lr, "learning rate"},
                      Field<SharedAdam>{"beta1", &SharedAdam::beta1, "decay rate of the first moment"},
                      Field<SharedAdam>{"beta2", &SharedAdam::beta2, "decay rate of the second moment"},
                      Field<SharedAdam>{"epsilon", &SharedAdam::epsilon,
                                        "added to the root of the second moment to avoid division by zero"}};
  }
  static int state(int) { return 4; }  // m, v, beta1^t, beta2^t
  void init(const float*, float* s, int) const {
    s[0] = s[1] = 0;
    s[2] = beta1;
    s[3] = beta2;
  }
  CLICKFLEET_INLINE void apply(float* w, float* s, const float* g, int n, float by) const {
    const float step = lr * std::sqrt(1 - s[3]) / (1 - s[2]);
    const float keep1 = 1 - beta1, keep2 = 1 - beta2;
    float sum_m = 0, sum_v = 0;
    for (int i = 0; i < n; ++i) {
      const float x = g[i] * by;
      const float m = beta1 * s[0] + keep1 * x;
      const float v = beta2 * s[1] + keep2 * (x * x);
      w[i] -= step * m / (std::sqrt(v) + epsilon);
      sum_m += m;
      sum_v += v;
    }
    s[0] = sum_m / static_cast<float>(n);
    s[1] = sum_v / static_cast<float>(n);
    s[2] *= beta1;
    s[3] *= beta2;
  }
};

}  // namespace clickfleet
