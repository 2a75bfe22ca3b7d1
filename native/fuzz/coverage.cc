// Records which pairs of places in the core an input reaches. g++ and clang++ both call this function from code
// compiled with -fsanitize-coverage=trace-pc; this file is compiled without it.
#include "coverage.h"

namespace clickfleet::fuzz {

uint8_t reached[kPlaces];

}  // namespace clickfleet::fuzz

namespace {
thread_local uintptr_t before = 0;
}

extern "C" void __sanitizer_cov_trace_pc() {
  // Relative to a place in this file, because the load address differs from run to run.
  const auto here = reinterpret_cast<uintptr_t>(__builtin_return_address(0)) -
                    reinterpret_cast<uintptr_t>(&clickfleet::fuzz::reached);
  const uintptr_t place = here * 0x9e3779b97f4a7c15ULL >> 44;
  clickfleet::fuzz::reached[(place ^ before >> 1) & (clickfleet::fuzz::kPlaces - 1)] = 1;
  before = place;
}
