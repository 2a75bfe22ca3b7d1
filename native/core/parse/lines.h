// Walks over the lines of a block, for the grammars of tokens.
#pragma once
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "layout.h"

namespace clickfleet::parse {

inline bool blank(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\v' || c == '\f'; }

inline const char* find_char(const char* p, const char* end, char c) {
  const void* const found = std::memchr(p, c, static_cast<size_t>(end - p));
  return found == nullptr ? end : static_cast<const char*>(found);
}

inline size_t count_lines(std::string_view block) {
  if (!block.empty() && block.back() != '\n') throw std::invalid_argument("a block must end with a newline");
  return static_cast<size_t>(std::count(block.begin(), block.end(), '\n'));
}

// Calls `parse_line(begin, end)` for every line without its newline, which returns whether the row is complete.
template <class Row, class ParseLine>
Rows each_line(std::string_view block, OnBad on_bad, Row& row, ParseLine parse_line) {
  const char* const end = block.data() + block.size();
  const bool has_nul = std::memchr(block.data(), 0, block.size()) != nullptr;
  for (const char* line = block.data(); line < end;) {
    const char* const newline = find_char(line, end, '\n');
    const char* last = newline;
    while (last > line && blank(last[-1])) --last;
    row.start();
    bool good;
    if (has_nul && std::memchr(line, 0, static_cast<size_t>(newline - line)) != nullptr)
      good = row.fail_line(Why::nul_byte);
    else if (line == last)
      good = row.fail_line(Why::empty_line);
    else
      good = parse_line(line, last) && row.commit();
    const bool go_on = good || row.refuse(line, newline, on_bad);
    ++row.out.lines;
    if (!go_on) break;
    line = newline + 1;
  }
  return std::move(row.out);
}

}  // namespace clickfleet::parse
