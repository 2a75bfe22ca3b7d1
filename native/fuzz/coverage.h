#pragma once
#include <cstddef>
#include <cstdint>

namespace clickfleet::fuzz {

inline constexpr size_t kPlaces = size_t{1} << 16;
extern uint8_t reached[kPlaces];

}  // namespace clickfleet::fuzz
