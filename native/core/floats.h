#pragma once
#include <cstddef>
#include <cstring>

namespace clickfleet {

// Copies a few floats, a whole vector at a time. This is faster than a call of memcpy.
inline void copy_floats(const float* from, float* to, size_t n) {
  if (n >= 8) {
    for (size_t i = 0; i + 8 <= n; i += 8) std::memcpy(to + i, from + i, 32);
    std::memcpy(to + n - 8, from + n - 8, 32);  // the last vector may overlap the previous one
  } else {
    for (size_t i = 0; i < n; ++i) to[i] = from[i];
  }
}

}  // namespace clickfleet
