// Bounds checks for numbers that come from outside, before they are used as positions in memory. In the core they are
// vectorized: a pass over the offsets costs a fraction of reading the rows they point to.
#pragma once
#include <cstddef>
#include <cstdint>

namespace clickfleet {

// Returns whether n offsets (int32_t or int64_t) start at 0 or above, never decrease, and end at `end` or below.
template <class Offset>
bool ascending(const Offset* offsets, size_t n, size_t end);

// Returns whether every index (uint16_t or uint32_t) is below `end`.
template <class Index>
bool below(const Index* indices, size_t n, size_t end);

}  // namespace clickfleet
