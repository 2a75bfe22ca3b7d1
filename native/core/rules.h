// The update rules of a row's weights: one header each in rules/, listed once here.
//
// A rule has: `name`; `fields()`, from which Python takes keywords, defaults and help; `scale`, what a gradient is
// divided by unless the user says otherwise; `state(n)`, the floats kept beside n weights; `init(w, s, n)`, their first
// values; and `apply(w, s, g, n, div)`, one step with the gradient g/div. All of it in float32, in an order that vector
// widths cannot change.
#pragma once
#include <cmath>
#include <cstdint>
#include <tuple>
#include <variant>

#if defined(_MSC_VER)
#define CLICKFLEET_INLINE __forceinline
#else
#define CLICKFLEET_INLINE \
  [[gnu::always_inline]] inline  // kernels.cc is compiled per CPU level: no shared out-of-line copy
#endif

namespace clickfleet {

enum class Scale : uint8_t { show, batch, none };

template <class Rule>
struct Field {
  const char* name;
  float Rule::* value;
  const char* help;
};

// Sum of (g/div)² in sixteen lanes and one fixed tree, so that scalar, AVX2 and AVX-512 code agree to the bit.
CLICKFLEET_INLINE float sum_squares(const float* g, int n, float div) {
  float lane[16] = {};
  int i = 0;
  for (; i + 16 <= n; i += 16)
    for (int j = 0; j < 16; ++j) {
      const float x = g[i + j] / div;
      lane[j] += x * x;
    }
  for (int j = 0; i + j < n; ++j) {
    const float x = g[i + j] / div;
    lane[j] += x * x;
  }
  for (int width = 8; width > 0; width /= 2)
    for (int j = 0; j < width; ++j) lane[j] += lane[j + width];
  return lane[0];
}

}  // namespace clickfleet

#include "rules/adagrad.h"
#include "rules/adagrad_v2.h"
#include "rules/adam.h"
#include "rules/ftrl.h"
#include "rules/sgd.h"
#include "rules/shared_adam.h"
#include "rules/std_adagrad.h"

namespace clickfleet {

using Rule = std::variant<Sgd, Adagrad, StdAdagrad, AdagradV2, Adam, SharedAdam, Ftrl>;
inline constexpr int kRules = static_cast<int>(std::variant_size_v<Rule>);

}  // namespace clickfleet
