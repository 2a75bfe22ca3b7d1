// FTRL-Proximal (McMahan et al. 2013, "Ad click prediction: a view from the trenches", algorithm 1).
#pragma once

namespace clickfleet {

struct Ftrl {
  float lr = 0.05F, beta = 1.0F, l1 = 0.0F, l2 = 0.0F;
  static constexpr auto name = "ftrl";
  static constexpr Scale scale = Scale::batch;
  static constexpr auto fields() {
    return std::tuple{
        Field<Ftrl>{"lr", &Ftrl::lr, "learning rate, alpha in the paper"},
        Field<Ftrl>{"beta", &Ftrl::beta, "smooths the learning rate: with larger values it falls more slowly at first"},
        Field<Ftrl>{"l1", &Ftrl::l1, "strength of L1 regularization, which sets small weights to exactly zero"},
        Field<Ftrl>{"l2", &Ftrl::l2, "strength of L2 regularization"}};
  }
  static int state(int n) { return 2 * n; }  // z[n], then the sums of squared gradients
  // Chooses z such that the closed form below returns the initial weight, so that random factors stay random.
  void init(const float* w, float* s, int n) const {
    for (int i = 0; i < n; ++i) {
      const float sign = w[i] > 0 ? 1.0F : w[i] < 0 ? -1.0F : 0.0F;
      s[i] = -w[i] * (beta / lr + l2) - sign * l1;
      s[n + i] = 0;
    }
  }
  CLICKFLEET_INLINE void apply(float* w, float* s, const float* g, int n, float by) const {
    for (int i = 0; i < n; ++i) {
      float &z = s[i], &sum = s[n + i];
      const float x = g[i] * by;
      const float next = sum + x * x;
      const float root = std::sqrt(next);
      z += x - (root - std::sqrt(sum)) / lr * w[i];
      sum = next;
      const float shrunk = z > l1 ? z - l1 : z < -l1 ? z + l1 : 0.0F;
      w[i] = -shrunk / ((beta + root) / lr + l2);
    }
  }
};

}  // namespace clickfleet
