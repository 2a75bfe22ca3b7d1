// Converts text to numbers without locale, allocation or lookup table. A number is exact to the last bit, or it is
// rejected.
#pragma once
#include <charconv>
#include <cmath>
#include <cstdint>

#include "../hash.h"
#include "real.h"

namespace clickfleet::parse {

// Converts eight decimal digits, the first one in the lowest byte. Sets `valid` to false if any byte is not a digit.
inline uint64_t eight_digits(uint64_t w, bool& valid) {
  w ^= 0x3030303030303030ULL;
  valid = (((w + 0x0606060606060606ULL) | w) & 0xf0f0f0f0f0f0f0f0ULL) == 0;
  w = (w * 10) + (w >> 8);
  w = (((w & 0x000000ff000000ffULL) * 0x000f424000000064ULL) +
       (((w >> 16) & 0x000000ff000000ffULL) * 0x0000271000000001ULL)) >>
      32;
  return w & 0xffffffffULL;
}

// Converts 0 to 8 digits that end at `end`; the eight bytes before it must be readable. Of a longer text, converts the
// last eight.
inline uint64_t few_digits(const char* end, size_t n, bool& valid) {
  const uint64_t keep = n == 0 ? 0 : n >= 8 ? ~0ULL : ~0ULL << (64 - 8 * n);
  return eight_digits((hashing::load64(end - 8) & keep) | (0x3030303030303030ULL & ~keep), valid);
}

inline bool to_u64(const char* p, const char* end, uint64_t& out) {
  if (p == end || end - p > 20) return false;
  uint64_t x = 0;
  if (end - p <= 19) {
    for (; p < end; ++p) {
      const unsigned digit = static_cast<unsigned char>(*p) - '0';
      if (digit > 9) return false;
      x = x * 10 + digit;
    }
    out = x;
    return true;
  }
  const auto [stop, error] = std::from_chars(p, end, out);
  return error == std::errc() && stop == end;
}

inline bool to_i64(const char* p, const char* end, int64_t& out) {
  const auto [stop, error] = std::from_chars(p, end, out);
  return error == std::errc() && stop == end && p != end;
}

inline constexpr double kPowersOfTen[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                                          1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};

// Reads digits into `x` (which wraps if there are too many) and advances past them.
inline void read_digits(const char*& p, const char* end, uint64_t& x) {
  while (end - p >= 8) {
    bool valid;
    const uint64_t eight = eight_digits(hashing::load64(p), valid);
    if (!valid) break;
    x = x * 100000000 + eight;
    p += 8;
  }
  for (; p < end && static_cast<unsigned char>(*p - '0') <= 9; ++p) x = x * 10 + static_cast<unsigned>(*p - '0');
}

// Parses [+-] digits [. digits] [e [+-] digits], finite. Up to 15 digits without an exponent need one exact division.
inline bool to_double(const char* p, const char* end, double& out) {
  const char* const text = p;
  const bool negative = p < end && *p == '-';
  if (p < end && (*p == '-' || *p == '+')) ++p;
  uint64_t mantissa = 0;
  const char* const digits = p;
  read_digits(p, end, mantissa);
  ptrdiff_t seen = p - digits, fraction = 0;
  if (p < end && *p == '.') {
    const char* const point = p++;
    read_digits(p, end, mantissa);
    fraction = p - point - 1;
    seen += fraction;
  }
  if (seen == 0) return false;
  if (p == end && seen <= 15) {
    const double x = static_cast<double>(mantissa) / kPowersOfTen[fraction];
    out = negative ? -x : x;
    return true;
  }
  const char* const start = *text == '+' ? text + 1 : text;
  return read_real(start, end, out) && std::isfinite(out);
}

}  // namespace clickfleet::parse
