// Writes one row at a time into the columns. A row that fails leaves nothing behind.
#pragma once
#include <limits>

#include "entries.h"
#include "layout.h"

namespace clickfleet::parse {

// How a row gets its keys: exactly one for every slot, written directly to its place; one field per slot, which may be
// a list; or any number of tokens in any order.
enum class Shape { flat, lists, tokens };

template <Shape shape>
class RowWriter {
 public:
  Rows out;
  Bad bad{};

  RowWriter(const Layout& layout, const char* block, size_t lines)
      : layout_(layout), block_(block), lists_(layout), entries_(layout.slots.size()) {
    out.dense.reserve(lines * layout.dense.size());
    out.keys.reserve(lines * layout.slots.size());
    if (layout.label) out.labels.reserve(lines * layout.labels.size());
    each_side([lines](bool wanted, auto& column) {
      if (wanted) column.reserve(lines);
    });
  }

  void start() {
    bad.why = Why::none;
    dense_ = out.dense.data() + out.rows * layout_.dense.size();
    if constexpr (shape == Shape::flat) keys_ = out.keys.data() + out.rows * layout_.slots.size();
    if constexpr (shape == Shape::lists) keys_ = lists_.singles();
    seen_ = 0;
    labelled_ = 0;
    if constexpr (shape == Shape::lists) lists_.clear();
    if constexpr (shape == Shape::tokens) entries_.clear();
    if (layout_.label && layout_.labels.size() > 1)
      for (size_t t = 0; t < layout_.labels.size(); ++t) label_at(t) = std::numeric_limits<float>::quiet_NaN();
  }

  bool good() const { return bad.why == Why::none; }
  bool has(Role role) const { return (seen_ & 1U << static_cast<int>(role)) != 0; }
  bool has_label(size_t index) const { return (labelled_ >> index & 1) != 0; }

  bool fail(size_t field, Why why, const char* p, const char* end, int64_t detail = 0) {
    bad.field = static_cast<int>(field);
    bad.why = why;
    bad.value = static_cast<int64_t>(reinterpret_cast<intptr_t>(p) - reinterpret_cast<intptr_t>(block_));
    bad.value_length = end - p;
    bad.detail = detail;
    return false;
  }

  bool fail_line(Why why, int64_t detail = 0) {
    fail(0, why, block_, block_, detail);
    bad.field = -1;
    return false;
  }

  // An empty field is a missing label, which is allowed if the row has another one.
  bool label(size_t field, size_t index, const char* p, const char* end) {
    float& x = label_at(index);
    if (p == end) return layout_.labels.size() > 1 || fail(field, Why::no_label, p, end);
    labelled_ |= uint64_t{1} << index;
    const LabelKind kind = layout_.labels[index];
    if (end - p == 1 && (*p == '0' || *p == '1') && (layout_.negative == 0 || kind != LabelKind::click)) {
      x = static_cast<float>(*p - '0');
      return true;
    }
    double given;
    if (!to_double(p, end, given)) return fail(field, Why::not_a_number, p, end);
    x = static_cast<float>(given);
    if (!std::isfinite(x) || (kind == LabelKind::count && x < 0)) return fail(field, Why::out_of_range, p, end);
    if (kind != LabelKind::click) return true;
    if (x != 1.0f && x != static_cast<float>(layout_.negative)) return fail(field, Why::not_a_label, p, end);
    x = x == 1.0f ? 1.0f : 0.0f;
    return true;
  }

  // `room`: the eight bytes before `end` are readable.
  bool dense(size_t field, size_t index, const char* p, const char* end, bool room) {
    if (p == end) {
      dense_missing(index);
      return true;
    }
    if (room && quick_dense(index, p, end)) return true;
    Why why;
    return layout_.dense_value(layout_.dense[index], p, end, dense_[index], why) || fail(field, why, p, end);
  }

  // The common case, up to eight digits or an empty field, without a branch on their number.
  bool quick_dense(size_t index, const char* p, const char* end) {
    const DenseColumn& column = layout_.dense[index];
    const auto n = static_cast<size_t>(end - p);
    bool valid;
    const uint64_t x = few_digits(end, n, valid);
    if (n > 8 || !valid) return false;
    const float value = column.scale == Scale::log1p && x < layout_.small_logs.size()
                            ? layout_.small_logs[x]
                            : static_cast<float>(layout_.transform(column, static_cast<double>(x)));
    dense_[index] = n == 0 ? column.missing : value;
    return true;
  }

  // Computes a key under the hash64 rule. Eight bytes from `p` on must be readable.
  void quick_key(size_t index, const char* p, const char* end) {
    keys_[index] = hash64<true>(layout_.slots[index].seed, p, static_cast<size_t>(end - p));
  }

  void dense_missing(size_t index) { dense_[index] = layout_.dense[index].missing; }

  bool key(size_t field, size_t index, const char* p, const char* end, float value = 1.0f) {
    const SlotColumn& slot = layout_.slots[index];
    if constexpr (shape != Shape::tokens) {
      return layout_.key(slot, p, static_cast<size_t>(end - p), keys_[index]) || fail(field, Why::not_a_key, p, end);
    } else {
      uint64_t key;
      if (!slot.multi && entries_.count(index) > 0) return fail(field, Why::repeated, p, end);
      if (!layout_.key(slot, p, static_cast<size_t>(end - p), key)) return fail(field, Why::not_a_key, p, end);
      entries_.add(index, key, value);
      return true;
    }
  }

  // Adds the keys of the values between separators. An empty value is an event of a history, and nothing elsewhere; an
  // empty field has no value at all. Without a separator, the field is one value.
  bool list(size_t field, size_t index, const char* p, const char* end, char separator) {
    const SlotColumn& slot = layout_.slots[index];
    lists_.open(index);
    for (bool more = p < end; more; ++p) {
      const char* const stop = separator == '\0' ? end : std::find(p, end, separator);
      uint64_t key;
      if (stop > p || slot.history) {
        if (!layout_.key(slot, p, static_cast<size_t>(stop - p), key)) return fail(field, Why::not_a_key, p, stop);
        lists_.add(key);
      }
      more = stop < end;
      p = stop;
    }
    lists_.close(index);
    return true;
  }

  // The same under the hash64 rule. Eight bytes behind `end` must be readable; `limit` is the end of all that is.
  void quick_list(size_t index, const char* p, const char* end, const char* limit, char separator) {
    lists_.add_all(index, p, end, limit, separator);
  }

  // Reads a show, click, weight, time or group. An empty field counts as absent.
  bool side(size_t field, Role role, const char* p, const char* end) {
    if (p == end) return true;
    seen_ |= 1U << static_cast<int>(role);
    switch (role) {
      case Role::show:
        return amount(field, p, end, out.shows);
      case Role::click:
        return amount(field, p, end, out.clicks);
      case Role::weight:
        return amount(field, p, end, out.weights);
      case Role::time:
        return to_time(p, end, out.times.data()[out.rows]) || fail(field, Why::not_a_time, p, end);
      case Role::group:
        out.groups.data()[out.rows] = hash64(layout_.group_seed, p, static_cast<size_t>(end - p));
        return true;
      default:
        return true;
    }
  }

  // Completes the row with defaults for absent fields. Returns false, without a row, if a required field is absent.
  bool commit() {
    if (layout_.label && labelled_ == 0) return fail_line(Why::no_label);
    if (layout_.time && !has(Role::time)) return fail_line(Why::no_time);
    if (layout_.show && !has(Role::show)) out.shows.data()[out.rows] = 1.0f;
    if (layout_.weight && !has(Role::weight)) out.weights.data()[out.rows] = 1.0f;
    if (layout_.click && !has(Role::click))
      out.clicks.data()[out.rows] = layout_.label && label_at(0) > 0 ? label_at(0) : 0.0f;
    if (layout_.group && !has(Role::group)) out.groups.data()[out.rows] = hash64(layout_.group_seed, nullptr, 0);
    for (const Bucket& bucket : layout_.buckets) {
      const uint64_t key = layout_.bucket_key(bucket, dense_[bucket.column]);
      if constexpr (shape == Shape::tokens)
        entries_.add(static_cast<size_t>(bucket.slot), key, 1.0f);
      else
        keys_[bucket.slot] = key;
    }
    for (const History& history : layout_.histories) {
      Unequal unequal;
      if (!keep_events(history, unequal)) return fail_line(Why::unequal, unequal.detail());
    }
    ++out.rows;
    out.dense.size += layout_.dense.size();
    if (layout_.label) out.labels.size = out.rows * layout_.labels.size();
    if constexpr (shape == Shape::flat) out.keys.size += layout_.slots.size();
    if constexpr (shape == Shape::lists) lists_.commit(out);
    if constexpr (shape == Shape::tokens) entries_.commit(layout_, out);
    each_side([this](bool wanted, auto& column) {
      if (wanted) column.size = out.rows;
    });
    return true;
  }

  // Records the failed line [line, newline). Returns false if parsing should stop there.
  bool refuse(const char* line, const char* newline, OnBad on_bad) {
    bad.line = static_cast<int64_t>(out.lines);
    bad.offset = line - block_;
    bad.length = newline - line;
    ++out.bad_lines;
    if (on_bad != OnBad::some || out.bad.size() < 16) out.bad.push_back(bad);
    return on_bad != OnBad::stop;
  }

 private:
  template <class F>
  void each_side(F f) {
    f(layout_.show, out.shows);
    f(layout_.click, out.clicks);
    f(layout_.weight, out.weights);
    f(layout_.time, out.times);
    f(layout_.group, out.groups);
  }

  bool keep_events(const History& history, Unequal& unequal) {
    if constexpr (shape == Shape::lists) return lists_.keep_events(history, unequal);
    return entries_.keep_events(history, unequal);
  }

  bool number(size_t field, const char* p, const char* end, Column<float>& column) {
    double x;
    if (!to_double(p, end, x)) return fail(field, Why::not_a_number, p, end);
    column.data()[out.rows] = static_cast<float>(x);
    return std::isfinite(static_cast<float>(x)) || fail(field, Why::out_of_range, p, end);
  }

  // Reads a non-negative number: how many rows a row represents, or how much it counts.
  bool amount(size_t field, const char* p, const char* end, Column<float>& column) {
    return number(field, p, end, column) && (column.data()[out.rows] >= 0 || fail(field, Why::out_of_range, p, end));
  }

  float& label_at(size_t index) { return out.labels.data()[out.rows * layout_.labels.size() + index]; }

  const Layout& layout_;
  const char* const block_;
  Lists lists_;
  Entries entries_;
  float* dense_ = nullptr;
  uint64_t* keys_ = nullptr;
  unsigned seen_ = 0;
  uint64_t labelled_ = 0;  // which labels the row has
};

}  // namespace clickfleet::parse
