// The inner loops that profit from wide vectors, compiled once per CPU level. Every level gives the same bits.
#pragma once
#include "skipgram.h"

namespace clickfleet {

struct Kernels {
  // Takes one step of the rule at this index of the list with the gradient g·by, then clamps every weight to its bounds
  // (NaN becomes the lower bound).
  using Apply = void (*)(const void* rule, Bounds bounds, float* w, float* state, const float* g, int n, float by);
  Apply apply[kRules];
  // Trains the pairs of one centre word: either updates the rows or sums their gradients.
  using Skipgram = void (*)(const Window& window, const StepSettings& step_settings);
  Skipgram move_pairs, sum_pairs;
};

const Kernels& kernels(const char* level = nullptr);  // of the named level, by default the best one of this CPU
const char* cpu_level();                              // "avx512", or "base": x86-64-v3, or plain C++ on other CPUs

}  // namespace clickfleet
