#include "bounds.h"

namespace clickfleet {

template <class Offset>
bool ascending(const Offset* offsets, size_t n, size_t end) {
  if (n == 0) return false;
  Offset falls = offsets[0] < 0;  // as wide as an offset and branch-free, so that the compiler vectorizes the loop
  for (size_t i = 1; i < n; ++i) falls |= static_cast<Offset>(offsets[i] < offsets[i - 1]);
  return falls == 0 && static_cast<uint64_t>(offsets[n - 1]) <= end;
}

template <class Index>
bool below(const Index* indices, size_t n, size_t end) {
  Index most = 0;
  for (size_t i = 0; i < n; ++i) most = indices[i] > most ? indices[i] : most;
  return n == 0 || most < end;
}

template bool ascending(const int32_t*, size_t, size_t);
template bool ascending(const int64_t*, size_t, size_t);
template bool below(const uint16_t*, size_t, size_t);
template bool below(const uint32_t*, size_t, size_t);

}  // namespace clickfleet
