// Lines of fields between separators (criteo, csv): every field has one role, fixed by its column.
#pragma once
#include <string_view>
#include <utility>
#include <vector>

#include "layout.h"

namespace clickfleet::parse {

struct Delimited {
  Layout layout;
  char separator = '\t';
  char list_separator = '\0';  // between the values of a multi-valued slot; zero: a field is one value
  bool quotes = false;         // "…" may hide separators; a newline may not be hidden
  std::vector<Field> fields;
  std::vector<std::pair<size_t, Field>> also;  // further uses of a column: a user may be a slot and the group

  // `block` holds whole lines, the last one with its newline.
  Rows parse(std::string_view block, OnBad on_bad) const;
};

}  // namespace clickfleet::parse
