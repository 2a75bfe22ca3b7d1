// Initial weights: a pure function of (seed, key, column). Arrival order, threads and shards never change them.
#pragma once
#include <cmath>
#include <cstdint>

#include "hash.h"

namespace clickfleet {

// The quantile function of the normal distribution (Wichura 1988, algorithm AS 241, PPND16), with a relative accuracy
// of about 1e-16.
inline double normal_quantile(double p) {
  const double q = p - 0.5;
  if (std::fabs(q) <= 0.425) {
    const double r = 0.180625 - q * q;
    return q *
           (((((((2.5090809287301226727e3 * r + 3.3430575583588128105e4) * r + 6.7265770927008700853e4) * r +
                4.5921953931549871457e4) *
                   r +
               1.3731693765509461125e4) *
                  r +
              1.9715909503065514427e3) *
                 r +
             1.3314166789178437745e2) *
                r +
            3.3871328727963666080e0) /
           (((((((5.2264952788528545610e3 * r + 2.8729085735721942674e4) * r + 3.9307895800092710610e4) * r +
                2.1213794301586595867e4) *
                   r +
               5.3941960214247511077e3) *
                  r +
              6.8718700749205790830e2) *
                 r +
             4.2313330701600911252e1) *
                r +
            1.0);
  }
  double r = std::sqrt(-std::log(q < 0 ? p : 1 - p));
  double x = 0;
  if (r <= 5) {
    r -= 1.6;
    x = (((((((7.74545014278341407640e-4 * r + 2.27238449892691845833e-2) * r + 2.41780725177450611770e-1) * r +
             1.27045825245236838258e0) *
                r +
            3.64784832476320460504e0) *
               r +
           5.76949722146069140550e0) *
              r +
          4.63033784615654529590e0) *
             r +
         1.42343711074968357734e0) /
        (((((((1.05075007164441684324e-9 * r + 5.47593808499534494600e-4) * r + 1.51986665636164571966e-2) * r +
             1.48103976427480074590e-1) *
                r +
            6.89767334985100004550e-1) *
               r +
           1.67638483018380384940e0) *
              r +
          2.05319162663775882187e0) *
             r +
         1.0);
  } else {
    r -= 5;
    x = (((((((2.01033439929228813265e-7 * r + 2.71155556874348757815e-5) * r + 1.24266094738807843860e-3) * r +
             2.65321895265761230930e-2) *
                r +
            2.96560571828504891230e-1) *
               r +
           1.78482653991729133580e0) *
              r +
          5.46378491116411436990e0) *
             r +
         6.65790464350110377720e0) /
        (((((((2.04426310338993978564e-15 * r + 1.42151175831644588870e-7) * r + 1.84631831751005468180e-5) * r +
             7.86869131145613259100e-4) *
                r +
            1.48753612908506148525e-2) *
               r +
           1.36929880922735805310e-1) *
              r +
          5.99832206555887937690e-1) *
             r +
         1.0);
  }
  return q < 0 ? -x : x;
}

struct Init {
  enum Kind : uint8_t { zero, uniform, normal, truncated };
  Kind kind = zero;
  float a = 0, b = 0;  // uniform(a, b); normal(a) and truncated(a): a is the standard deviation

  // Writes columns [first, first + n) of the row of `key`. Column 0 is embed_w.
  void fill(uint64_t seed, uint64_t key, uint32_t first, int n, float* out) const {
    if (kind == zero) {
      for (int i = 0; i < n; ++i) out[i] = 0;
      return;
    }
    constexpr uint64_t step = 0x9e3779b97f4a7c15ULL;
    const uint64_t start = mix64(key ^ mix64(seed + step));
    if (kind == uniform) {
      // 24 bits fit into an int, and compilers vectorize the conversion from int to float.
      for (int i = 0; i < n; ++i) {
        const uint64_t bits = mix64(start + step * (first + static_cast<uint64_t>(i) + 1));
        out[i] = a + (b - a) * (static_cast<float>(static_cast<int32_t>(bits >> 40)) * 0x1p-24F);
      }
      return;
    }
    for (int i = 0; i < n; ++i) out[i] = value(mix64(start + step * (first + static_cast<uint64_t>(i) + 1)));
  }

 private:
  float value(uint64_t bits) const {
    double p = (static_cast<double>(bits >> 11) + 0.5) * 0x1p-53;
    constexpr double below = 0.022750131948179207;  // the probability mass below -2 standard deviations
    if (kind == truncated) p = below + (1 - 2 * below) * p;
    return static_cast<float>(static_cast<double>(a) * normal_quantile(p));
  }
};

}  // namespace clickfleet
