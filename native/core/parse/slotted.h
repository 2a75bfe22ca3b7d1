// Lines of tokens that name their slot (slots, feasign, libffm), and lines of counted blocks in a fixed order
// (multislot).
#pragma once
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "layout.h"

namespace clickfleet::parse {

// Several dense columns that share a name: the first value fills the first column, and so on.
using DenseGroup = std::vector<int>;

struct Slotted {
  enum class Token {
    name_value,      // slots: name:value; a further colon ends the value; tabs separate tokens, too
    value_name,      // feasign: value:name, after an optional id and a tab
    name_key_value,  // libffm: a label, then name:value:weight
  };

  Layout layout;
  Token token = Token::name_value;
  std::vector<DenseGroup> groups;

  void name(const std::string& text, Field field) { fields_[text].push_back(field); }
  Rows parse(std::string_view block, OnBad on_bad) const;
  const std::vector<Field>* find(std::string_view text) const;  // all uses of a name, or nullptr

  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view s) const { return hash_bytes(0, s.data(), s.size()); }
  };
  using Names = std::unordered_map<std::string, std::vector<Field>, Hash, std::equal_to<>>;
  const Names& names() const { return fields_; }

 private:
  Names fields_;
};

struct MultiSlot {
  struct Step {
    std::vector<Field> uses;
    int width;  // 0: any number of values
  };

  Layout layout;
  std::vector<DenseGroup> groups;
  std::vector<Step> steps;

  Rows parse(std::string_view block, OnBad on_bad) const;
};

}  // namespace clickfleet::parse
