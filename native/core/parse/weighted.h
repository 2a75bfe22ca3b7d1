// Lines of features that may have a value: libsvm (and libfm) and Vowpal Wabbit's text.
#pragma once
#include <string>
#include <string_view>
#include <unordered_map>

#include "layout.h"
#include "slotted.h"

namespace clickfleet::parse {

struct Weighted {
  enum class Grammar {
    bag,        // libsvm: a label, then index:value; all indices are keys of slot 0
    positions,  // the same, but entry i is the key of slot i, and every line has one entry per slot
    spaces,     // vw: a label, then |namespace feature[:value] …; a namespace is a slot
  };

  Layout layout;
  Grammar grammar = Grammar::bag;
  std::unordered_map<std::string, Field, Slotted::Hash, std::equal_to<>> names;  // of namespaces, and qid

  Rows parse(std::string_view block, OnBad on_bad) const;
};

}  // namespace clickfleet::parse
