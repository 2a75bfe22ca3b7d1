#include "delimited.h"

#include <algorithm>
#include <stdexcept>

#include "row.h"
#include "scan.h"

namespace clickfleet::parse {
namespace {

// Words that R, pandas, databases and Hive write for a missing number. None of them starts like a number.
bool means_missing(const char* p, const char* end) {
  if (p == end || (static_cast<unsigned char>(*p) <= '9' && *p != '?')) return false;
  const std::string_view text(p, static_cast<size_t>(end - p));
  for (const std::string_view word : {"NA", "N/A", "NaN", "nan", "NULL", "null", "None", "\\N", "?"})
    if (text == word) return true;
  return false;
}

template <Shape shape>
class Pass {
 public:
  Pass(const Delimited& plan, std::string_view block)
      : plan_(plan),
        begin_(block.data()),
        end_(begin_ + block.size()),
        index_(block, plan.separator),
        row_(plan.layout, begin_, index_.lines().size()),
        careful_(std::memchr(begin_, 0, block.size()) != nullptr ||
                 (plan.quotes && std::memchr(begin_, '"', block.size()) != nullptr)) {}

  Rows run(OnBad on_bad) {
    const char* line = begin_;
    uint32_t field = 0;
    for (const uint32_t next : index_.lines()) {
      const uint32_t* const ends = index_.ends() + field;
      const char* const newline = begin_ + index_.ends()[next - 1];
      row_.start();
      if (careful_)
        parse_careful(line, newline);
      else if (next - field != plan_.fields.size())
        row_.fail_line(Why::field_count);
      else if (plan_.layout.rule == KeyRule::hash64 && line - begin_ >= 8 && end_ - newline >= 8)
        parse_fast(line, ends);
      else
        parse_plain(line, ends);
      if (!careful_ && row_.good()) parse_further_uses(line, ends);
      if (row_.good()) row_.commit();
      bool go_on = true;
      if (!row_.good()) {
        if (newline == line) row_.fail_line(Why::empty_line);
        if (row_.bad.why == Why::field_count) row_.bad.detail = count_fields(line, newline);
        go_on = row_.refuse(line, newline, on_bad);
      }
      ++row_.out.lines;
      if (!go_on) break;
      line = newline + 1;
      field = next;
    }
    return std::move(row_.out);
  }

 private:
  // Field f of the line ends at ends[f]. A carriage return before the newline belongs to the line ending.
  void parse_plain(const char* p, const uint32_t* ends) {
    const size_t n = plan_.fields.size();
    for (size_t f = 0; f < n; ++f) {
      const char* const stop = begin_ + ends[f];
      if (!field(f, p, f + 1 == n && stop > p && stop[-1] == '\r' ? stop - 1 : stop)) return;
      p = stop + 1;
    }
  }

  void parse_further_uses(const char* line, const uint32_t* ends) {
    for (const auto& [f, what] : plan_.further_uses) {
      const char* const p = f == 0 ? line : begin_ + ends[f - 1] + 1;
      const char* const stop = begin_ + ends[f];
      const bool last = f + 1 == plan_.fields.size();
      if (!use(f, what, p, last && stop > p && stop[-1] == '\r' ? stop - 1 : stop)) return;
    }
  }

  // The fast path: eight bytes before and after the line are readable, and keys are hashed.
  void parse_fast(const char* p, const uint32_t* ends) {
    const size_t n = plan_.fields.size();
    for (size_t f = 0; f < n; ++f) {
      const Field& what = plan_.fields[f];
      const auto index = static_cast<size_t>(what.index);
      const char* const stop = begin_ + ends[f];
      const char* const end = f + 1 == n && stop > p && stop[-1] == '\r' ? stop - 1 : stop;
      if (what.role == Role::slot) {
        const char* const text = *p == ' ' ? skip_blanks(p, end) : p;
        if (shape == Shape::flat || !plan_.layout.slots[index].multi)
          row_.quick_key(index, text, end);
        else
          row_.quick_list(index, text, end, end_, plan_.list_separator);
      } else if (what.role != Role::dense || !row_.quick_dense(index, p, end)) {
        if (!field(f, p, end)) return;
      }
      p = stop + 1;
    }
  }

  // The slow path: checks the line for NUL bytes and removes its quotes.
  void parse_careful(const char* p, const char* const newline) {
    const char* const stop = newline > p && newline[-1] == '\r' ? newline - 1 : newline;
    if (std::memchr(p, 0, static_cast<size_t>(stop - p)) != nullptr) {
      row_.fail_line(Why::nul_byte);
      return;
    }
    size_t f = 0;
    for (bool more = true; more; ++f) {
      const char* const start = p;
      const char *value = p, *value_end;
      if (plan_.quotes && p < stop && *p == '"') {
        p = unquote(p + 1, stop);
        if (p == nullptr) {
          row_.fail(f, Why::quote, start, stop);
          return;
        }
        value = unquoted_.data();
        value_end = value + unquoted_.size();
      } else {
        p = std::find(p, stop, plan_.separator);
        value_end = p;
      }
      more = p < stop;
      if (f < plan_.fields.size() && !every_use(f, value, value_end)) {
        row_.fail(f, row_.bad.why, start, p, row_.bad.detail);
        return;
      }
      ++p;
    }
    if (f != plan_.fields.size()) row_.fail_line(Why::field_count);
  }

  // Copies the text up to the closing quote to unquoted_. Returns the position after the quote, or nullptr if the quote
  // is not closed properly.
  const char* unquote(const char* p, const char* stop) {
    unquoted_.clear();
    for (; p < stop; ++p) {
      if (*p == '"') {
        if (p + 1 == stop || p[1] == plan_.separator) return p + 1;
        if (*++p != '"') return nullptr;
      }
      unquoted_.push_back(*p);
    }
    return nullptr;
  }

  bool every_use(size_t f, const char* p, const char* end) {
    for (const auto& [column, what] : plan_.further_uses)
      if (column == f && !use(f, what, p, end)) return false;
    return field(f, p, end);
  }

  bool field(size_t f, const char* p, const char* end) { return use(f, plan_.fields[f], p, end); }

  // Returns `end` for a field of spaces if that is a missing value, else `p`.
  const char* skip_blanks(const char* p, const char* end) const {
    return plan_.blank_is_missing && std::all_of(p, end, [](char c) { return c == ' '; }) ? end : p;
  }

  bool use(size_t f, const Field& what, const char* p, const char* end) {
    if (p < end && *p == ' ') p = skip_blanks(p, end);
    switch (what.role) {
      case Role::slot:
        if (shape == Shape::lists && plan_.layout.slots[static_cast<size_t>(what.index)].multi)
          return row_.list(f, static_cast<size_t>(what.index), p, end, plan_.list_separator);
        return row_.key(f, static_cast<size_t>(what.index), p, end);
      case Role::dense:
        if (plan_.missing_words && means_missing(p, end)) {
          row_.dense_missing(static_cast<size_t>(what.index));
          return true;
        }
        return row_.dense(f, static_cast<size_t>(what.index), p, end, !careful_ && end - begin_ >= 8);
      case Role::skip:
        return true;
      case Role::label:
        if (plan_.missing_words && plan_.layout.labels.size() > 1 && means_missing(p, end)) p = end;
        return row_.label(f, static_cast<size_t>(what.index), p, end);
      default:
        return row_.side(f, what.role, p, end);
    }
  }

  int64_t count_fields(const char* line, const char* newline) const {
    int64_t n = 1;
    for (bool hidden = false; line < newline; ++line) {
      hidden ^= plan_.quotes && *line == '"';
      n += !hidden && *line == plan_.separator;
    }
    return n;
  }

  const Delimited& plan_;
  const char* const begin_;
  const char* const end_;
  const Index index_;
  RowWriter<shape> row_;
  std::string unquoted_;
  const bool careful_;
};

}  // namespace

Rows Delimited::parse(std::string_view block, OnBad on_bad) const {
  if (block.empty()) return {};
  if (block.back() != '\n') throw std::invalid_argument("a block must end with a newline");
  const bool flat = !layout.values && std::none_of(layout.slots.begin(), layout.slots.end(),
                                                   [](const SlotColumn& slot) { return slot.multi; });
  return flat ? Pass<Shape::flat>(*this, block).run(on_bad) : Pass<Shape::lists>(*this, block).run(on_bad);
}

}  // namespace clickfleet::parse
