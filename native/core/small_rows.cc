#include "small_rows.h"

namespace clickfleet {
namespace {

constexpr float kMost = 127;          // largest byte
constexpr uint16_t kNoHalf = 0x7c00;  // exponent of infinities and NaN

bool pack_half(float number, uint8_t* to) {
  if (!std::isfinite(number)) return false;
  const uint16_t half = to_half(number);
  std::memcpy(to, &half, 2);
  return (half & kNoHalf) != kNoHalf;
}

// Returns whether a number rounds to a byte at this scale.
bool fits(float number, int code) { return std::nearbyint(number / to_scale(static_cast<uint8_t>(code))) <= kMost; }

// Returns the code of the least scale at which a number fits; above 255 if there is none.
int least_scale(float number) {
  const auto bits = std::bit_cast<uint32_t>(number / kMost);
  const int code = std::max(0, static_cast<int>(bits >> 20) - 824);  // rounded down, so at most one step too small
  return code > 255 || fits(number, code) ? code : code + 1;
}

bool pack_bytes(const float* row, size_t factors, uint8_t* record) {
  float most = 0;
  bool finite = true;
  for (size_t k = 0; k < factors; ++k) {
    finite = finite && std::isfinite(row[k]);
    most = std::max(most, std::abs(row[k]));
  }
  if (!finite) return false;
  int code = least_scale(most);
  if (code > 255) return false;
  // If the largest factor was rounded down to what the next smaller scale can hold, unpacking and packing again would
  // choose that scale. Choose it now.
  const float scale = to_scale(static_cast<uint8_t>(code));
  if (code > 0 && fits(std::nearbyint(most / scale) * scale, code - 1)) --code;
  const float chosen = to_scale(static_cast<uint8_t>(code));
  for (size_t k = 0; k < factors; ++k) {
    const float steps = std::nearbyint(row[k] / chosen);
    record[k] = static_cast<uint8_t>(static_cast<int8_t>(std::clamp(steps, -kMost, kMost)));
  }
  record[factors + 2] = static_cast<uint8_t>(code);
  return true;
}

}  // namespace

bool pack(RowFormat format, float weight, const float* row, size_t factors, uint8_t* record) {
  if (format == RowFormat::kInt8 && factors > 0)
    return pack_half(weight, record + factors) && pack_bytes(row, factors, record);
  if (format == RowFormat::kFloat32) {
    std::memcpy(record, &weight, 4);
    if (factors > 0) std::memcpy(record + 4, row, 4 * factors);
    return true;
  }
  bool packed = pack_half(weight, record);
  for (size_t k = 0; packed && k < factors; ++k) packed = pack_half(row[k], record + 2 * (1 + k));
  return packed;
}

size_t pack_rows(RowFormat format, const float* weights, const float* x, size_t rows, size_t factors,
                 uint8_t* records) {
  const size_t bytes = record_bytes(format, factors);
  for (size_t i = 0; i < rows; ++i)
    if (!pack(format, weights[i], x + i * factors, factors, records + i * bytes)) return i;
  return rows;
}

}  // namespace clickfleet
