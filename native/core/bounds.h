// Checks of numbers that came from outside before they are used as positions in memory. They are part of the core, as
// bindings are compiled for size: here a pass over offsets costs a fraction of reading the rows behind them.
#pragma once
#include <cstddef>
#include <cstdint>

namespace clickfleet {

// Whether n offsets (int32_t or int64_t) start at 0 or above, never fall and end at `end` or below.
template <class Offset>
bool ascending(const Offset* offsets, size_t n, size_t end);

// Whether every index (uint16_t or uint32_t) is below `end`.
template <class Index>
bool below(const Index* indices, size_t n, size_t end);

}  // namespace clickfleet
