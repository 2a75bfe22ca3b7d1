// Checks of numbers that came from outside before they are used as positions in memory.
#pragma once
#include <cstddef>
#include <cstdint>

namespace clickfleet {

// Whether n offsets start at 0 or above, never fall and end at `end` or below.
template <class Offset>
bool ascending(const Offset* offsets, size_t n, size_t end) {
  if (n == 0) return false;
  Offset falls = offsets[0] < 0;  // as wide as an offset and without a branch, so that the compiler uses vectors
  for (size_t i = 1; i < n; ++i) falls |= static_cast<Offset>(offsets[i] < offsets[i - 1]);
  return falls == 0 && static_cast<uint64_t>(offsets[n - 1]) <= end;
}

// Whether every index is below `end`.
template <class Index>
bool below(const Index* indices, size_t n, size_t end) {
  Index most = 0;
  for (size_t i = 0; i < n; ++i) most = indices[i] > most ? indices[i] : most;
  return n == 0 || most < end;
}

}  // namespace clickfleet
