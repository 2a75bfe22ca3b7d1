// The update rules for the weights of a row: one header per rule in rules/, listed once here.
//
// A rule defines: `name`; `fields()`, from which Python takes keywords, defaults and help; `scale`, the default divisor
// of a gradient; `state(n)`, the number of floats kept beside n weights; `init(w, s, n)`, their initial values; and
// `apply(w, s, g, n, by)`, one step with the gradient g·by. All arithmetic is in float32, in an order that does not
// depend on the vector width.
#pragma once
#include <cmath>
#include <cstdint>
#include <tuple>
#include <variant>

#if defined(_MSC_VER)
#define CLICKFLEET_INLINE __forceinline
#else
#define CLICKFLEET_INLINE \
  [[gnu::always_inline]] inline  // kernels.cc is compiled per CPU level, so no out-of-line copy may be shared
#endif

namespace clickfleet {

struct Bounds {  // every weight is clamped to these
  float lower = -10.0F, upper = 10.0F;
};

enum class Scale : uint8_t { show, batch, none };

template <class Rule>
struct Field {
  const char* name;
  float Rule::* value;
  const char* help;
};

// Sum of (g·by)² in eight lanes, added in one fixed tree, then the rest in order. Scalar, AVX2 and AVX-512 code agree
// bit for bit.
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
