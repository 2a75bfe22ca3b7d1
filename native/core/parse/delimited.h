// Lines of fields between separators (criteo, csv). The column of a field decides its role.
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
  // Further uses of a column: a user id may be both a slot and the group.
  std::vector<std::pair<size_t, Field>> further_uses;
  bool missing_words = false;     // NA, null and the like are missing numbers
  bool blank_is_missing = false;  // a field of spaces is an empty field

  // `block` must hold whole lines, each with its newline.
  Rows parse(std::string_view block, OnBad on_bad) const;
};

}  // namespace clickfleet::parse
