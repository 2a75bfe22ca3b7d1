// The inner loops that gain from wide vectors, compiled once per CPU level; every level gives the same bits.
#pragma once
#include "skipgram.h"

namespace clickfleet {

struct Kernels {
  // One step with g·by of the rule with this place in the list, then every weight into its bounds (NaN becomes the
  // lower one).
  using Apply = void (*)(const void* rule, Bounds bounds, float* w, float* state, const float* g, int n, float by);
  Apply apply[kRules];
  // The pairs of one centre word: rows are moved, or their gradients summed up.
  using Skipgram = void (*)(const Window& window, const Motion& motion);
  Skipgram move_pairs, sum_pairs;
};

const Kernels& kernels(const char* level = nullptr);  // of the best level of this CPU, or of the one named
const char* cpu_level();                              // "avx512", or "base": x86-64-v3, or plain C++ on other CPUs

}  // namespace clickfleet
