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

// Days from 1970-01-01 to a day of the Gregorian calendar.
inline int64_t days_to(int64_t year, int64_t month, int64_t day) {
  year -= month <= 2;
  const int64_t era = (year >= 0 ? year : year - 399) / 400, of_era = year - era * 400;
  const int64_t of_year = (153 * (month + (month > 2 ? -3 : 9)) + 2) / 5 + day - 1;
  return era * 146097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719468;
}

// Reads exactly `n` digits and advances past them.
inline bool to_digits(const char*& p, const char* end, int n, int64_t& out) {
  out = 0;
  for (int i = 0; i < n; ++i, ++p) {
    if (p >= end || static_cast<unsigned char>(*p - '0') > 9) return false;
    out = out * 10 + (*p - '0');
  }
  return true;
}

// Advances past one character if it is `expected`.
inline bool to_char(const char*& p, const char* end, char expected) {
  if (p >= end || *p != expected) return false;
  ++p;
  return true;
}

// Parses a date or a moment of ISO 8601 to seconds since 1970: 2024-05-01, 2024-05-01T10:20[:30[.5]][Z|+02:00]. A space
// may replace the T. Without a zone, the moment is one of UTC. Fractions of a second are dropped.
inline bool to_moment(const char* p, const char* end, int64_t& out) {
  int64_t year, month, day, hour = 0, minute = 0, second = 0, zone = 0;
  if (!to_digits(p, end, 4, year) || !to_char(p, end, '-') || !to_digits(p, end, 2, month) || !to_char(p, end, '-') ||
      !to_digits(p, end, 2, day) || month < 1 || month > 12 || day < 1 || day > 31)
    return false;
  if (p < end) {
    if (!to_char(p, end, 'T') && !to_char(p, end, ' ')) return false;
    if (!to_digits(p, end, 2, hour) || !to_char(p, end, ':') || !to_digits(p, end, 2, minute)) return false;
    if (to_char(p, end, ':') && !to_digits(p, end, 2, second)) return false;
    if (p < end && *p == '.') {
      const char* const digits = ++p;
      while (p < end && static_cast<unsigned char>(*p - '0') <= 9) ++p;
      if (p == digits) return false;
    }
    if (p < end && *p == 'Z') {
      ++p;
    } else if (p < end && (*p == '+' || *p == '-')) {
      const int64_t sign = *p++ == '-' ? -1 : 1;
      int64_t hours, minutes = 0;
      if (!to_digits(p, end, 2, hours)) return false;
      if (p < end && *p == ':') ++p;
      if (p < end && !to_digits(p, end, 2, minutes)) return false;
      if (hours > 23 || minutes > 59) return false;
      zone = sign * (hours * 3600 + minutes * 60);
    }
  }
  if (p != end || hour > 24 || minute > 59 || second > 60) return false;
  out = days_to(year, month, day) * 86400 + hour * 3600 + minute * 60 + second - zone;
  return true;
}

// Converts a time: an integer of any unit, a moment of ISO 8601, or a number whose fraction is dropped.
inline bool to_time(const char* p, const char* end, int64_t& out) {
  if (to_i64(p, end, out) || to_moment(p, end, out)) return true;
  double x;
  if (!to_double(p, end, x) || !(std::fabs(x) < 9007199254740992.0)) return false;
  out = static_cast<int64_t>(std::floor(x));
  return true;
}

}  // namespace clickfleet::parse
