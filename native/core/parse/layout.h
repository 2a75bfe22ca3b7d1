// What the parsers of all text formats share: the layout of a row, the rows of a block, and the conversion of a field
// to a number or a key.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "../hash.h"
#include "number.h"

namespace clickfleet::parse {

enum class KeyRule { hash64, py2, raw };
enum class Scale { none, minmax, log1p, standard };

struct DenseColumn {
  std::string name;
  Scale scale;
  double a, b;  // subtrahend and divisor; unused by none and log1p
  float missing;
};

struct SlotColumn {
  std::string name;
  bool multi;
  uint64_t seed;
  Py2Hash prefix;
  uint64_t missing;      // the key of the empty value
  bool history = false;  // a column of a history: an empty value is an event, too
};

// The columns of a history, [first, first + count) of the slots. They have one value per event. A row keeps its last
// (or first) `max` events.
struct History {
  size_t first, count, max;
  bool last;
};

enum class LabelKind { click, number, count };  // 0 or 1 · any number · a number of 0 or more

// A slot whose value is the bucket of a (transformed) dense value: one of `buckets` equal buckets over [low, high], or
// an interval between the boundaries.
struct Bucket {
  int slot, column;
  double low, high;
  int64_t buckets;
  std::vector<double> boundaries;
  uint64_t offset;
};

// Why a line was rejected. The messages are in Python, together with the advice.
enum class Why : int {
  none,
  field_count,  // detail: number of fields
  not_a_number,
  not_a_key,
  not_an_integer,
  out_of_range,
  repeated,     // a second value where only one is allowed
  value_count,  // detail: number of values
  no_label,
  has_label,
  no_time,
  not_a_token,
  empty_line,
  bad_count,  // a block that does not start with a count of 1 or more
  short_line,
  trailing,  // text after the last field
  nul_byte,
  quote,
  not_a_label,  // a number other than the two labels
  not_a_time,
  valued,   // a value other than 1 where the layout has no values
  unequal,  // columns of a history have different lengths; detail: see `Unequal`
};

// A column of a history whose length differs from that of the first column.
struct Unequal {
  size_t slot, expected, found;

  // All three in one number, each below 2^21.
  int64_t detail() const {
    constexpr size_t kMost = (size_t{1} << 21) - 1;
    const auto part = [](size_t n) { return static_cast<int64_t>(n < kMost ? n : kMost); };
    return part(slot) << 42 | part(expected) << 21 | part(found);
  }
};

struct Bad {
  int64_t line, offset, length;  // in the block, zero-based
  int64_t value, value_length;   // position of the offending text in the block
  int field;                     // column of a delimited line, or number of the token or block; -1: the whole line
  Why why;
  int64_t detail;
};

enum class Role { skip, label, dense, slot, show, click, weight, time, group };

struct Field {
  Role role;
  int index;  // of the dense column (or group of columns) or slot
};

// A growing, uninitialized array whose memory is handed to NumPy without a copy.
template <class T>
class Column {
 public:
  T* data() { return data_.get(); }
  size_t size = 0;
  void reserve(size_t n) {
    if (n <= capacity_) return;
    n = n < capacity_ * 2 ? capacity_ * 2 : n;
    T* const grown = static_cast<T*>(std::realloc(data_.get(), n * sizeof(T)));
    if (grown == nullptr) throw std::bad_alloc();
    (void)data_.release();
    data_.reset(grown);
    capacity_ = n;
  }
  void push(T x) {
    reserve(size + 1);
    data_.get()[size++] = x;
  }
  T* release() { return data_.release(); }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  size_t capacity_ = 0;
};

struct Rows {
  size_t rows = 0, lines = 0, bad_lines = 0;
  bool one_each = true;  // every slot of every row has exactly one key; offsets stays empty
  Column<float> labels;  // [rows, number of labels]; NaN: missing, only if there are several
  Column<float> shows, clicks, weights, dense, values;
  Column<uint64_t> keys, groups;
  Column<int64_t> offsets, times;
  std::vector<Bad> bad;
};

struct Layout {
  KeyRule rule = KeyRule::hash64;
  int64_t modulus = 1;
  bool label = true;  // whether rows have labels
  std::vector<LabelKind> labels = {LabelKind::click};
  bool show = false, click = false, weight = false, time = false, group = false, values = false;
  int negative = 0;  // the label of a row without a click: 0 or -1
  uint64_t group_seed = 0;
  std::vector<DenseColumn> dense;
  std::vector<SlotColumn> slots;
  std::vector<Bucket> buckets;
  std::vector<History> histories;
  std::vector<float> small_logs;  // log1p of 0, 1, 2, …: most counts are small, and logarithms are expensive

  Layout() {
    for (int i = 0; i < 16384; ++i) small_logs.push_back(static_cast<float>(std::log1p(static_cast<double>(i))));
  }

  void add_slot(const std::string& name, bool multi, const std::string& prefix) {
    SlotColumn slot{name, multi, slot_seed(name.data(), name.size()), {}, 0};
    slot.prefix.add(prefix.data(), prefix.size());
    slots.push_back(slot);
    if (rule != KeyRule::raw) key(slots.back(), nullptr, 0, slots.back().missing);
  }

  // Makes the last `count` slots the columns of a history.
  void add_history(size_t count, size_t max, bool last) {
    histories.push_back({slots.size() - count, count, max, last});
    for (size_t s = slots.size() - count; s < slots.size(); ++s) slots[s].history = true;
  }

  // Computes the key of a value. Returns false if the raw rule finds anything but an unsigned integer.
  bool key(const SlotColumn& slot, const char* p, size_t n, uint64_t& out) const {
    if (rule == KeyRule::hash64) {
      out = hash64(slot.seed, p, n);
      return true;
    }
    if (rule == KeyRule::py2) {
      Py2Hash h = slot.prefix;
      h.add(p, n);
      out = h.modulo(modulus);
      return true;
    }
    out = 0;
    return n == 0 || to_u64(p, p + n, out);
  }

  double transform(const DenseColumn& column, double x) const {
    switch (column.scale) {
      case Scale::log1p:
        if (x >= 0 && x < static_cast<double>(small_logs.size())) {
          const auto whole = static_cast<size_t>(x);
          if (static_cast<double>(whole) == x) return small_logs[whole];
        }
        return x >= 0 ? std::log1p(x) : -std::log1p(-x);
      case Scale::none:
        return x;
      default:
        return (x - column.a) / column.b;
    }
  }

  // Converts one non-empty dense field.
  bool dense_value(const DenseColumn& column, const char* p, const char* end, float& out, Why& why) const {
    double x;
    if (!to_double(p, end, x)) {
      why = Why::not_a_number;
      return false;
    }
    out = static_cast<float>(transform(column, x));
    why = Why::out_of_range;
    return std::isfinite(out);
  }

  uint64_t bucket_key(const Bucket& b, float dense_value) const {
    const double x = dense_value;
    int64_t i = 0;
    if (!b.boundaries.empty()) {
      while (i < static_cast<int64_t>(b.boundaries.size()) && x >= b.boundaries[static_cast<size_t>(i)]) ++i;
    } else {
      const double clamped = !(x >= b.low) ? b.low : x > b.high ? b.high : x;  // NaN: the lowest bucket
      i = static_cast<int64_t>((clamped - b.low) / (b.high - b.low) * static_cast<double>(b.buckets));
    }
    if (rule != KeyRule::hash64) return b.offset + static_cast<uint64_t>(i);
    char text[24];
    const auto [end, error] = std::to_chars(text, text + sizeof text, i);
    return hash64(slots[static_cast<size_t>(b.slot)].seed, text, static_cast<size_t>(end - text));
  }
};

// `stop`: stop at the first bad line; `some`: record a few and count the rest; `all`: record every one (quarantine).
enum class OnBad { stop, some, all };

}  // namespace clickfleet::parse
