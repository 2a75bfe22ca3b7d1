// Lines of text from columns, for every text format: what differs between them is only which text stands around a
// value.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace clickfleet {

// One column of `rows` values (or lists of values, where `starts` is given).
struct PrintColumn {
  enum class Kind { text, int64, uint64, float32, float64 };
  Kind kind = Kind::text;
  const void* values = nullptr;      // numbers, or the bytes of all texts
  const int32_t* ends = nullptr;     // text only: value i is bytes [ends[i], ends[i + 1])
  const int64_t* starts = nullptr;   // lists only: row i is values [starts[i], starts[i + 1])
  const uint8_t* present = nullptr;  // 0 where the row's value is missing
  const float* weights = nullptr;    // printed after every value, behind a colon
  std::string before;                // once per row, before the column
  std::string prefix, suffix;        // around every value
  std::string absent;                // what a missing value or an empty list prints, without prefix and suffix
  std::string between;               // between the values of a list; empty: the separator
  bool skip_absent = false;          // print nothing at all instead, not even the separator
  bool bare = false;                 // a whole number without a point, as it stands in raw logs
  int digits = 0;        // at most so many significant digits of a real number; 0: as few as read back the same
  bool counted = false;  // the number of values first (MultiSlot)
};

// Appends rows [0, rows) to `out`, columns joined by `separator`, each row ended by a newline.
void print_rows(const std::vector<PrintColumn>& columns, size_t rows, char separator, std::string& out);

}  // namespace clickfleet
