#include "kernels.h"

namespace clickfleet::CLICKFLEET_LEVEL {

namespace {

template <int I>
void apply(const void* rule, Bounds bounds, float* w, float* state, const float* g, int n, float by) {
  static_cast<const std::variant_alternative_t<I, Rule>*>(rule)->apply(w, state, g, n, by);
  for (int i = 0; i < n; ++i) {
    const float x = w[i] > bounds.lower ? w[i] : bounds.lower;  // false for NaN
    w[i] = x < bounds.upper ? x : bounds.upper;
  }
}

template <bool Moves>
void pairs(const Window& window, const StepSettings& step_settings) {
  train_window<Moves>(window, step_settings);
}

template <int... I>
constexpr Kernels all(std::integer_sequence<int, I...>) {
  return {{apply<I>...}, pairs<true>, pairs<false>};
}

}  // namespace

extern const Kernels kernels;
const Kernels kernels = all(std::make_integer_sequence<int, kRules>{});

}  // namespace clickfleet::CLICKFLEET_LEVEL
