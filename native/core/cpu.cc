#include "kernels.h"

namespace clickfleet {

const char* cpu_level() {
#if defined(CLICKFLEET_X86) && defined(__GNUC__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return "avx512";
#endif
  return "base";
}

}  // namespace clickfleet
