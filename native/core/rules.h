// The update rules of a row's weights: one header each in rules/, listed once here.
//
// A rule has: `name`; `fields()`, from which Python takes keywords, defaults and help; `scale`, what a gradient is
// divided by unless the user says otherwise; `state(n)`, the floats kept beside n weights; `init(w, s, n)`, their first
// values; and `apply(w, s, g, n, by)`, one step with the gradient g·by. All of it in float32, in an order that vector
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

struct Bounds {  // every weight is kept within
  float lower = -10.0F, upper = 10.0F;
};

enum class Scale : uint8_t { show, batch, none };

template <class Rule>
struct Field {
  const char* name;
  float Rule::* value;
  const char* help;
};

// Sum of (g·by)² in eight lanes, one fixed tree and the rest in order, so that scalar, AVX2 and AVX-512 code agree to
// the bit.
CLICKFLEET_INLINE float sum_squares(const float* g, int n, float by) {
  float lane[8] = {};
  int i = 0;
  for (; i + 8 <= n; i += 8)
    for (int j = 0; j < 8; ++j) {
      const float x = g[i + j] * by;
      lane[j] += x * x;
    }
  float sum = ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
  for (; i < n; ++i) {
    const float x = g[i] * by;
    sum += x * x;
  }
  return sum;
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
