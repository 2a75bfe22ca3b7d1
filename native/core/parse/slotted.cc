#include "slotted.h"

#include <algorithm>

#include "lines.h"
#include "row.h"
#include "scan.h"

namespace clickfleet::parse {
namespace {

// Counts the values of each dense group in a line.
class Groups {
 public:
  explicit Groups(const std::vector<DenseGroup>& groups) : groups_(groups), seen_(groups.size()) {}
  void clear() { std::fill(seen_.begin(), seen_.end(), 0); }

  template <class Row>
  bool add(Row& row, size_t field, size_t g, const char* p, const char* end, bool room) {
    const size_t i = seen_[g]++;
    if (i >= groups_[g].size()) return row.fail(field, Why::value_count, p, end, static_cast<int64_t>(i + 1));
    return row.dense(field, static_cast<size_t>(groups_[g][i]), p, end, room);
  }

  // A group must be complete or absent.
  template <class Row>
  bool finish(Row& row, const char* line, const char* end) const {
    for (size_t g = 0; g < groups_.size(); ++g) {
      if (seen_[g] == 0) {
        for (const int column : groups_[g]) row.dense_missing(static_cast<size_t>(column));
      } else if (seen_[g] != groups_[g].size()) {
        (void)row.fail(g, Why::value_count, line, line, static_cast<int64_t>(seen_[g]));
        row.bad.field = -2 - static_cast<int>(g);  // the group itself, not a token
        row.bad.value_length = end - line;
        return false;
      }
    }
    return true;
  }

 private:
  const std::vector<DenseGroup>& groups_;
  std::vector<size_t> seen_;
};

class SlottedPass {
 public:
  SlottedPass(const Slotted& plan, std::string_view block)
      : plan_(plan),
        begin_(block.data()),
        row_(plan.layout, begin_, count_lines(block)),
        groups_(plan.groups),
        tabs_(plan.token == Slotted::Token::name_value && std::memchr(begin_, '\t', block.size()) != nullptr),
        index_(block, ' ', ':', tabs_ ? '\t' : ':') {}

  Rows run(std::string_view block, OnBad on_bad) {
    return each_line(block, on_bad, row_, [this](const char* p, const char* end) {
      const size_t number = row_.out.lines;
      return line(p, end, index_.ends() + (number == 0 ? 0 : index_.lines()[number - 1]));
    });
  }

 private:
  // `mark` advances over the separators and colons of the line; the last mark is its newline.
  bool line(const char* const first, const char* const end, const uint32_t* mark) {
    const char* p = first;
    groups_.clear();
    size_t n = 0;
    if (plan_.token == Slotted::Token::value_name) {
      const char* const tab = find_char(p, end, '\t');
      if (tab != end) p = tab + 1;
    } else {
      while (p < end && blank(*p)) ++p;
    }
    if (plan_.token == Slotted::Token::name_key_value && !leading_label(p, end)) return false;
    while (begin_ + *mark < p) ++mark;
    while (p < end) {
      const char *colon = nullptr, *second = nullptr, *stop;
      for (;; ++mark) {
        stop = begin_ + *mark;
        if (stop >= end || *stop == ' ' || *stop == '\t') break;  // tabs are marks only if they separate tokens
        if (colon == nullptr)
          colon = stop;
        else if (second == nullptr)
          second = stop;
      }
      stop = stop < end ? stop : end;
      if (!token(n++, p, colon, second, stop)) return false;
      ++mark;
      p = stop + 1;
    }
    return groups_.finish(row_, first, end);
  }

  bool leading_label(const char*& p, const char* end) {
    const char* const stop = find_char(p, end, ' ');
    const bool found = find_char(p, stop, ':') == stop;
    if (found != plan_.layout.label) return row_.fail(0, found ? Why::has_label : Why::no_label, p, stop);
    if (!found) return true;
    const char* const text = p;
    p = stop < end ? stop + 1 : end;
    return row_.label(0, 0, text, stop);
  }

  // Parses the token [p, stop), given its first two colons (nullptr if absent).
  bool token(size_t n, const char* p, const char* colon, const char* second, const char* stop) {
    if (colon == nullptr) return row_.fail(n, Why::not_a_token, p, stop);
    const char *name = p, *name_end = colon, *value = colon + 1, *value_end = second != nullptr ? second : stop;
    float weight = 1.0f;
    if (plan_.token == Slotted::Token::value_name) {
      std::swap(name, value);
      name_end = stop;
      value_end = colon;
    } else if (plan_.token == Slotted::Token::name_key_value) {
      double x;
      if (second == nullptr) return row_.fail(n, Why::not_a_token, p, stop);
      if (!to_double(second + 1, stop, x)) return row_.fail(n, Why::not_a_number, second + 1, stop);
      weight = static_cast<float>(x);
      if (!std::isfinite(weight)) return row_.fail(n, Why::out_of_range, second + 1, stop);
    }
    const std::vector<Field>* const uses = find(n, {name, static_cast<size_t>(name_end - name)});
    if (uses == nullptr) return true;
    for (const Field& what : *uses)
      if (!set(n, what, value, value_end, weight)) return false;
    return true;
  }

  // Lines are usually alike, so try the name at the same position of the previous line first.
  const std::vector<Field>* find(size_t n, std::string_view name) {
    if (n < guesses_.size() && guesses_[n].name == name) return guesses_[n].uses;
    const std::vector<Field>* const found = plan_.find(name);
    if (n < 4096) {
      if (guesses_.size() <= n) guesses_.resize(n + 1);
      guesses_[n] = {name, found};
    }
    return found;
  }

  bool set(size_t n, const Field& what, const char* p, const char* end, float weight) {
    const auto index = static_cast<size_t>(what.index);
    switch (what.role) {
      case Role::slot:
        return (p == end && !plan_.layout.slots[index].history) || row_.key(n, index, p, end, weight);
      case Role::dense:
        return groups_.add(row_, n, index, p, end, end - begin_ >= 8);
      case Role::label:
        if (!plan_.layout.label) return row_.fail(n, Why::has_label, p, end);
        return row_.has_label(index) ? row_.fail(n, Why::repeated, p, end) : row_.label(n, index, p, end);
      case Role::skip:
        return true;
      default:
        return row_.has(what.role) ? row_.fail(n, Why::repeated, p, end) : row_.side(n, what.role, p, end);
    }
  }

  struct Guess {
    std::string_view name;
    const std::vector<Field>* uses = nullptr;
  };

  const Slotted& plan_;
  const char* const begin_;
  RowWriter<Shape::tokens> row_;
  Groups groups_;
  const bool tabs_;  // tabs separate tokens, too
  const Index index_;
  std::vector<Guess> guesses_;
};

class MultiSlotPass {
 public:
  MultiSlotPass(const MultiSlot& plan, std::string_view block)
      : plan_(plan), begin_(block.data()), row_(plan.layout, begin_, count_lines(block)), groups_(plan.groups) {}

  Rows run(std::string_view block, OnBad on_bad) {
    return each_line(block, on_bad, row_, [this](const char* p, const char* end) { return line(p, end); });
  }

 private:
  struct Text {
    const char *p, *end;
  };

  // Returns the next text between blanks; empty at the end of the line.
  static Text next(const char*& p, const char* end) {
    while (p < end && blank(*p)) ++p;
    const char* const start = p;
    while (p < end && !blank(*p)) ++p;
    return {start, p};
  }

  bool line(const char* p, const char* const end) {
    groups_.clear();
    for (size_t s = 0; s < plan_.steps.size(); ++s) {
      const MultiSlot::Step& step = plan_.steps[s];
      const Text count = next(p, end);
      if (count.p == count.end) return row_.fail(s, Why::short_line, end, end);
      uint64_t n = 0;
      if (!to_u64(count.p, count.end, n) || (n == 0 && !may_be_empty(step)))
        return row_.fail(s, Why::bad_count, count.p, count.end);
      if (n == 0) continue;
      if (step.width != 0 && n != static_cast<uint64_t>(step.width))
        return row_.fail(s, Why::value_count, count.p, count.end, n > INT64_MAX ? INT64_MAX : static_cast<int64_t>(n));
      for (uint64_t i = 0; i < n; ++i) {
        const Text value = next(p, end);
        if (value.p == value.end) return row_.fail(s, Why::short_line, end, end);
        for (const Field& what : step.uses)
          if (!set(s, what, value)) return false;
      }
    }
    const Text more = next(p, end);
    return more.p == more.end || row_.fail(plan_.steps.size(), Why::trailing, more.p, end);
  }

  // Only a history, and a label beside others, may have no value.
  bool may_be_empty(const MultiSlot::Step& step) const {
    return !step.uses.empty() && std::all_of(step.uses.begin(), step.uses.end(), [this](const Field& what) {
      if (what.role == Role::label) return plan_.layout.labels.size() > 1;
      return what.role == Role::slot && plan_.layout.slots[static_cast<size_t>(what.index)].history;
    });
  }

  bool set(size_t s, const Field& what, Text value) {
    const auto index = static_cast<size_t>(what.index);
    switch (what.role) {
      case Role::slot:
        return row_.key(s, index, value.p, value.end);
      case Role::dense:
        return groups_.add(row_, s, index, value.p, value.end, value.end - begin_ >= 8);
      case Role::label:
        return row_.label(s, index, value.p, value.end);
      case Role::skip:
        return true;
      default:
        return row_.side(s, what.role, value.p, value.end);
    }
  }

  const MultiSlot& plan_;
  const char* const begin_;
  RowWriter<Shape::tokens> row_;
  Groups groups_;
};

}  // namespace

const std::vector<Field>* Slotted::find(std::string_view text) const {
  const auto found = fields_.find(text);
  return found == fields_.end() ? nullptr : &found->second;
}

Rows Slotted::parse(std::string_view block, OnBad on_bad) const {
  return block.empty() ? Rows{} : SlottedPass(*this, block).run(block, on_bad);
}

Rows MultiSlot::parse(std::string_view block, OnBad on_bad) const {
  return block.empty() ? Rows{} : MultiSlotPass(*this, block).run(block, on_bad);
}

}  // namespace clickfleet::parse
