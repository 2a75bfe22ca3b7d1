// The slow path for real numbers: std::from_chars, or strtod if the standard library lacks it for them (libc++ before
// 20).
#pragma once
#include <charconv>
#include <version>

#if defined(CLICKFLEET_PORTABLE) || (defined(_LIBCPP_VERSION) && _LIBCPP_VERSION < 200000)
#define CLICKFLEET_STRTOD
#include <cerrno>
#include <clocale>
#include <cmath>
#include <cstdlib>
#include <string>
#if defined(__APPLE__)
#include <xlocale.h>
#endif
#endif

namespace clickfleet::parse {

// Returns whether all of [start, end) is one decimal number. The caller has already checked digits, sign and point.
inline bool read_real(const char* start, const char* end, double& out) {
#if defined(CLICKFLEET_STRTOD)
  const std::string text(start, end);
  if (text.find_first_not_of("+-.0123456789eE") != std::string::npos) return false;  // such as hexadecimal
  errno = 0;
  char* stop = nullptr;
#if defined(_WIN32)
  static const _locale_t plain = _create_locale(LC_ALL, "C");
  const double x = _strtod_l(text.c_str(), &stop, plain);
#else
  static const locale_t plain = newlocale(LC_ALL_MASK, "C", static_cast<locale_t>(nullptr));
  const double x = strtod_l(text.c_str(), &stop, plain);
#endif
  if (stop != text.c_str() + text.size() || (errno == ERANGE && (x == 0 || std::isinf(x)))) return false;
  out = x;
  return true;
#else
  const auto [stop, error] = std::from_chars(start, end, out);
  return error == std::errc() && stop == end;
#endif
}

}  // namespace clickfleet::parse
