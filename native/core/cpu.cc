#include <cstring>

#include "kernels.h"

namespace clickfleet {

namespace base {
extern const Kernels kernels;
}
#ifdef CLICKFLEET_X86
namespace avx512 {
extern const Kernels kernels;
}
#endif

const char* cpu_level() {
#if defined(CLICKFLEET_X86) && defined(__GNUC__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return "avx512";
#endif
  return "base";
}

const Kernels& kernels(const char* level) {
#ifdef CLICKFLEET_X86
  if (std::strcmp(level == nullptr ? cpu_level() : level, "avx512") == 0) return avx512::kernels;
#endif
  static_cast<void>(level);
  return base::kernels;
}

}  // namespace clickfleet
