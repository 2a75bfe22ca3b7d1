#include "print.h"

#include <charconv>
#include <cmath>
#include <cstring>

namespace clickfleet {
namespace {

using Kind = PrintColumn::Kind;

// Enough space for any number as text; the longest is a float64 in scientific notation.
constexpr size_t kNumber = 32;

template <class T>
void append_integer(T value, std::string& out) {
  char text[kNumber];
  out.append(text, std::to_chars(text, text + kNumber, value).ptr - text);
}

template <class T>
void append_real(T value, int digits, bool bare, std::string& out) {
  char text[kNumber];
  if (bare && value == std::trunc(value) && std::abs(value) < T(1e15))
    return append_integer(static_cast<int64_t>(value), out);
  char* const end = digits ? std::to_chars(text, text + kNumber, value, std::chars_format::general, digits).ptr
                           : std::to_chars(text, text + kNumber, value).ptr;
  const std::string_view number(text, end - text);
  out.append(number);
  if (std::isfinite(value) && number.find_first_of(".e") == std::string_view::npos) out.append(".0");
}

void append_value(const PrintColumn& column, int64_t i, std::string& out) {
  switch (column.kind) {
    case Kind::text: {
      const auto* bytes = static_cast<const char*>(column.values);
      out.append(bytes + column.ends[i], column.ends[i + 1] - column.ends[i]);
      break;
    }
    case Kind::int64:
      append_integer(static_cast<const int64_t*>(column.values)[i], out);
      break;
    case Kind::uint64:
      append_integer(static_cast<const uint64_t*>(column.values)[i], out);
      break;
    case Kind::float32:
      append_real(static_cast<const float*>(column.values)[i], column.digits, column.bare, out);
      break;
    case Kind::float64:
      append_real(static_cast<const double*>(column.values)[i], column.digits, column.bare, out);
      break;
  }
}

}  // namespace

void print_rows(const std::vector<PrintColumn>& columns, size_t rows, char separator, std::string& out) {
  for (size_t row = 0; row < rows; ++row) {
    bool first = true;
    for (const PrintColumn& column : columns) {
      int64_t begin = static_cast<int64_t>(row), end = begin + 1;
      if (column.starts) {
        begin = column.starts[row];
        end = column.starts[row + 1];
      }
      if (column.present && !column.present[row]) end = begin;
      if (begin == end && column.skip_absent) continue;
      if (!first) out.push_back(separator);
      first = false;
      out.append(column.before);
      if (begin == end) {
        out.append(column.absent);
        continue;
      }
      if (column.counted) {
        append_integer(end - begin, out);
        out.push_back(separator);
      }
      for (int64_t i = begin; i < end; ++i) {
        if (i > begin) column.between.empty() ? out.push_back(separator) : void(out.append(column.between));
        out.append(column.prefix);
        append_value(column, i, out);
        out.append(column.suffix);
        if (column.weights) {
          out.push_back(':');
          append_real(column.weights[i], 0, true, out);
        }
      }
    }
    out.push_back('\n');
  }
}

}  // namespace clickfleet
