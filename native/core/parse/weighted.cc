#include "weighted.h"

#include "lines.h"
#include "row.h"

namespace clickfleet::parse {
namespace {

class WeightedPass {
 public:
  WeightedPass(const Weighted& plan, std::string_view block)
      : plan_(plan), begin_(block.data()), row_(plan.layout, begin_, count_lines(block)) {}

  Rows run(std::string_view block, OnBad on_bad) {
    const bool spaces = plan_.grammar == Weighted::Grammar::spaces;
    return each_line(block, on_bad, row_, [this, spaces](const char* p, const char* end) {
      return spaces ? spaces_line(p, end) : entries_line(p, end);
    });
  }

 private:
  struct Text {
    const char *p, *end;
    bool empty() const { return p == end; }
  };

  // Returns the next text between blanks; empty at the end.
  static Text next(const char*& p, const char* end) {
    while (p < end && blank(*p)) ++p;
    const char* const start = p;
    while (p < end && !blank(*p)) ++p;
    return {start, p};
  }

  // A line is labelled exactly if the layout is; `text` is empty if the line is not.
  bool label(Text text) {
    if (text.empty() == plan_.layout.label)
      return row_.fail(0, text.empty() ? Why::no_label : Why::has_label, text.p, text.end);
    return text.empty() || row_.label(0, 0, text.p, text.end);
  }

  bool entries_line(const char* p, const char* const end) {
    const char* start = p;
    const Text first = next(p, end);
    const bool labelled = find_char(first.p, first.end, ':') == first.end;
    if (!label(labelled ? first : Text{first.p, first.p})) return false;
    if (!labelled) p = start;
    size_t n = 0, entries = 0;
    for (Text text = next(p, end); !text.empty() && *text.p != '#'; text = next(p, end)) {
      const char* const colon = find_char(text.p, text.end, ':');
      if (colon == text.end || colon == text.p || colon + 1 == text.end)
        return row_.fail(n, Why::not_a_token, text.p, text.end);
      if (colon - text.p == 3 && std::memcmp(text.p, "qid", 3) == 0) {
        if (!side(n++, "qid", {colon + 1, text.end})) return false;
        continue;
      }
      if (plan_.grammar == Weighted::Grammar::positions && entries >= plan_.layout.slots.size())
        return row_.fail_line(Why::field_count, count_entries(text.p, end) + static_cast<int64_t>(entries));
      const size_t slot = plan_.grammar == Weighted::Grammar::positions ? entries : 0;
      if (!feature(n++, slot, {text.p, colon}, {colon + 1, text.end}, 1.0)) return false;
      ++entries;
    }
    if (plan_.grammar == Weighted::Grammar::positions && entries != plan_.layout.slots.size())
      return row_.fail_line(Why::field_count, static_cast<int64_t>(entries));
    return true;
  }

  static int64_t count_entries(const char* p, const char* end) {
    int64_t n = 0;
    for (Text text = next(p, end); !text.empty() && *text.p != '#'; text = next(p, end)) ++n;
    return n;
  }

  bool side(size_t n, std::string_view name, Text value) {
    const auto found = plan_.names.find(name);
    return found == plan_.names.end() || found->second.role == Role::slot ||
           row_.side(n, found->second.role, value.p, value.end);
  }

  // Adds a feature of a slot. `value` may be empty; it is multiplied by `scale`.
  bool feature(size_t n, size_t slot, Text key, Text value, double scale) {
    double x = 1;
    if (!value.empty() && !to_double(value.p, value.end, x)) return row_.fail(n, Why::not_a_number, value.p, value.end);
    const auto weight = static_cast<float>(x * scale);
    if (!std::isfinite(weight)) return row_.fail(n, Why::out_of_range, value.p, value.end);
    if (weight != 1.0f && !plan_.layout.values) return row_.fail(n, Why::valued, key.p, value.end);
    return row_.key(n, slot, key.p, key.end, weight);
  }

  bool spaces_line(const char* p, const char* const end) {
    const char* const bar = find_char(p, end, '|');
    if (bar == end) return row_.fail(0, Why::not_a_token, p, end);
    if (!head(p, bar)) return false;
    size_t n = 1;
    for (p = bar; p < end;) {
      const char* const stop = find_char(p + 1, end, '|');
      if (!space(n, p + 1, stop)) return false;
      p = stop;
    }
    return true;
  }

  // The text before the first bar: [label [importance [base]]] [tag]. A tag touches the bar or starts with an
  // apostrophe.
  bool head(const char* p, const char* const bar) {
    Text words[4];
    size_t count = 0;
    const char* const line = p;
    for (Text word = next(p, bar); !word.empty(); word = next(p, bar)) {
      if (word.end == bar || *word.p == '\'') break;
      if (count == 3) return row_.fail(0, Why::not_a_token, line, bar);
      words[count++] = word;
    }
    if (!label(count > 0 ? words[0] : Text{line, line})) return false;
    return count < 2 || side(0, "|", words[1]);  // no namespace has this name
  }

  // The namespace [p, end) after its bar.
  bool space(size_t& n, const char* p, const char* const end) {
    const char* const start = p;
    while (p < end && !blank(*p)) ++p;
    const char* const colon = find_char(start, p, ':');
    double scale = 1;
    if (colon != p && !to_double(colon + 1, p, scale)) return row_.fail(n, Why::not_a_number, colon + 1, p);
    const auto found = plan_.names.find(std::string_view(start, static_cast<size_t>(colon - start)));
    if (found == plan_.names.end() || found->second.role != Role::slot) return true;
    const auto slot = static_cast<size_t>(found->second.index);
    for (Text text = next(p, end); !text.empty(); text = next(p, end)) {
      const char* const end_of_name = find_char(text.p, text.end, ':');
      const char* const value = end_of_name < text.end ? end_of_name + 1 : text.end;
      if (end_of_name < text.end && (end_of_name == text.p || value == text.end))
        return row_.fail(n, Why::not_a_token, text.p, text.end);
      if (!feature(n++, slot, {text.p, end_of_name}, {value, text.end}, scale)) return false;
    }
    return true;
  }

  const Weighted& plan_;
  const char* const begin_;
  RowWriter<Shape::tokens> row_;
};

}  // namespace

Rows Weighted::parse(std::string_view block, OnBad on_bad) const {
  return block.empty() ? Rows{} : WeightedPass(*this, block).run(block, on_bad);
}

}  // namespace clickfleet::parse
