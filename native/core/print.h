// Prints columns as lines of text, for every text format. Formats differ only in the text around a value.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace clickfleet {

// One column of `rows` values, or of lists of values if `starts` is given.
struct PrintColumn {
  enum class Kind { text, int64, uint64, float32, float64 };
  Kind kind = Kind::text;
  const void* values = nullptr;      // numbers, or the bytes of all texts
  const int32_t* ends = nullptr;     // text only: value i is bytes [ends[i], ends[i + 1])
  const int64_t* starts = nullptr;   // lists only: row i is values [starts[i], starts[i + 1])
  const uint8_t* present = nullptr;  // 0 where the row's value is missing
  const float* weights = nullptr;    // printed after every value, separated by a colon
  std::string before;                // once per row, before the column
  std::string prefix, suffix;        // around every value
  std::string absent;                // printed for a missing value or an empty list, without prefix and suffix
  std::string between;               // between the values of a list; if empty, the separator
  bool skip_absent = false;          // print nothing instead, not even the separator
  bool bare = false;                 // print a whole number without a decimal point, as raw logs do
  int digits = 0;        // maximum significant digits of a real number; 0: the fewest that read back the same
  bool counted = false;  // print the number of values first (MultiSlot)
};

// Appends rows [0, rows) to `out`. Columns are joined by `separator`; each row ends with a newline.
void print_rows(const std::vector<PrintColumn>& columns, size_t rows, char separator, std::string& out);

}  // namespace clickfleet
