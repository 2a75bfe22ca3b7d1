#include "delimited.h"

#include <algorithm>
#include <stdexcept>

#include "entries.h"
#include "scan.h"

namespace clickfleet::parse {
namespace {

// One pass over a block. `Flat`: every slot takes exactly one key per row, so keys go straight to their place.
template <bool Flat>
class Pass {
 public:
  Pass(const Delimited& plan, std::string_view block, OnBad on_bad)
      : plan_(plan),
        layout_(plan.layout),
        begin_(block.data()),
        end_(begin_ + block.size()),
        scanner_(begin_, end_, plan.separator),
        on_bad_(on_bad),
        entries_(layout_.slots.size()) {
    const auto lines = static_cast<size_t>(std::count(begin_, end_, '\n'));
    out_.dense.reserve(lines * layout_.dense.size());
    out_.keys.reserve(lines * layout_.slots.size());
    if (!Flat) out_.offsets.push(0);
    const auto side = [lines](bool wanted, auto& column) {
      if (wanted) column.reserve(lines);
    };
    side(layout_.label, out_.labels);
    side(layout_.show, out_.shows);
    side(layout_.click, out_.clicks);
    side(layout_.weight, out_.weights);
    side(layout_.time, out_.times);
    side(layout_.group, out_.groups);
    has_nul_ = std::memchr(begin_, 0, block.size()) != nullptr;
    has_quote_ = plan.quotes && std::memchr(begin_, '"', block.size()) != nullptr;
  }

  Rows run() {
    const char* line = begin_;
    while (line < end_) {
      const char* newline = has_quote_ || has_nul_ ? guarded(line) : plain(line);
      const bool good = bad_.why == kGood;
      if (newline == nullptr) {  // the line failed on the way: find its end
        do newline = scanner_.next();
        while (*newline != '\n');
      }
      if (good) {
        commit();
      } else {
        if (bad_.why == Why::field_count) bad_.detail = count_fields(line, newline);
        bad_.line = static_cast<int64_t>(out_.lines);
        bad_.offset = line - begin_;
        bad_.length = newline - line;
        if (newline == line) bad_.why = Why::empty_line, bad_.field = -1;
        if (!note(out_, on_bad_, bad_)) {
          ++out_.lines;
          break;
        }
      }
      ++out_.lines;
      line = newline + 1;
    }
    return std::move(out_);
  }

 private:
  static constexpr Why kGood = static_cast<Why>(-1);

  // Reads the fields of a line without quotes; its newline, or null after a failure before it.
  const char* plain(const char* p) {
    start();
    const size_t n = plan_.fields.size();
    for (size_t f = 0; f < n; ++f) {
      const char* const stop = scanner_.next();
      const bool last = f + 1 == n;
      if ((*stop == '\n') != last) {
        fail(-1, Why::field_count);
        return *stop == '\n' ? stop : nullptr;
      }
      const char* const value_end = last && stop > p && stop[-1] == '\r' ? stop - 1 : stop;
      if (!field(f, p, value_end)) return last ? stop : nullptr;
      p = stop + 1;
    }
    return p - 1;
  }

  // The careful way: the line is cut out first, checked for NUL, and its quotes are removed.
  const char* guarded(const char* p) {
    start();
    const char* const newline = static_cast<const char*>(std::memchr(p, '\n', static_cast<size_t>(end_ - p)));
    while (scanner_.next() != newline) {
    }
    const char* const stop = newline > p && newline[-1] == '\r' ? newline - 1 : newline;
    if (std::memchr(p, 0, static_cast<size_t>(stop - p)) != nullptr) {
      fail(-1, Why::nul_byte);
      return newline;
    }
    size_t f = 0;
    for (bool more = true; more; ++f) {
      const char *value = p, *value_end;
      if (plan_.quotes && p < stop && *p == '"') {
        unquoted_.clear();
        for (++p;; ++p) {
          if (p == stop) {
            fail(static_cast<int>(f), Why::quote);
            return newline;
          }
          if (*p == '"' && (p + 1 == stop || p[1] != '"')) break;
          if (*p == '"') ++p;
          unquoted_.push_back(*p);
        }
        ++p;
        if (p < stop && *p != plan_.separator) {
          fail(static_cast<int>(f), Why::quote);
          return newline;
        }
        value = unquoted_.data();
        value_end = value + unquoted_.size();
      } else {
        p = std::find(p, stop, plan_.separator);
        value_end = p;
      }
      more = p < stop;
      ++p;
      if (f < plan_.fields.size() && !field(f, value, value_end)) return newline;
    }
    if (f != plan_.fields.size()) fail(-1, Why::field_count);
    return newline;
  }

  void start() {
    bad_.why = kGood;
    const size_t row = out_.rows;
    dense_ = out_.dense.data() + row * layout_.dense.size();
    keys_ = out_.keys.data() + row * layout_.slots.size();
    if (!Flat) entries_.clear();
  }

  bool fail(int f, Why why) {
    bad_.field = f;
    bad_.why = why;
    bad_.detail = 0;
    return false;
  }

  bool field(size_t f, const char* p, const char* end) {
    const Field& what = plan_.fields[f];
    const auto index = static_cast<size_t>(what.index);
    switch (what.role) {
      case Role::slot: {
        const SlotColumn& slot = layout_.slots[index];
        if constexpr (Flat)
          return layout_.key(slot, p, static_cast<size_t>(end - p), keys_[index]) || fail_at(f, Why::not_a_key);
        return list(f, slot, index, p, end);
      }
      case Role::dense:
        return dense(f, index, p, end);
      case Role::skip:
        return true;
      case Role::label:
        if (end - p == 1 && (*p == '0' || *p == '1')) {
          out_.labels.data()[out_.rows] = static_cast<float>(*p - '0');
          return true;
        }
        return p == end ? fail_at(f, Why::no_label) : number(f, p, end, out_.labels);
      case Role::show:
        return number(f, p, end, out_.shows);
      case Role::click:
        return number(f, p, end, out_.clicks);
      case Role::weight:
        return number(f, p, end, out_.weights);
      case Role::time:
        return to_i64(p, end, out_.times.data()[out_.rows]) || fail_at(f, Why::not_an_integer);
      case Role::group:
        out_.groups.data()[out_.rows] = hash64(layout_.group_seed, p, static_cast<size_t>(end - p));
        return true;
    }
    return true;
  }

  bool fail_at(size_t f, Why why) { return fail(static_cast<int>(f), why); }

  bool dense(size_t f, size_t index, const char* p, const char* end) {
    const DenseColumn& column = layout_.dense[index];
    const auto n = static_cast<size_t>(end - p);
    if (n == 0) {
      dense_[index] = column.missing;
      return true;
    }
    if (n <= 8 && p - begin_ >= 8) {
      bool valid;
      const uint64_t x = few_digits(end, n, valid);
      if (valid) {
        dense_[index] = column.scale == Scale::log1p && x < layout_.small_logs.size()
                            ? layout_.small_logs[x]
                            : static_cast<float>(layout_.transform(column, static_cast<double>(x)));
        return true;
      }
    }
    Why why;
    return layout_.dense_value(column, p, end, dense_[index], why) || fail_at(f, why);
  }

  bool number(size_t f, const char* p, const char* end, Column<float>& column) {
    double x;
    if (!to_double(p, end, x)) return fail_at(f, Why::not_a_number);
    column.data()[out_.rows] = static_cast<float>(x);
    return std::isfinite(static_cast<float>(x)) || fail_at(f, Why::out_of_range);
  }

  bool list(size_t f, const SlotColumn& slot, size_t index, const char* p, const char* end) {
    if (slot.multi && p == end) return true;
    const char separator = slot.multi ? plan_.list_separator : '\0';
    for (bool more = true; more;) {
      const char* const stop = separator != '\0' ? std::find(p, end, separator) : end;
      uint64_t key;
      if (!layout_.key(slot, p, static_cast<size_t>(stop - p), key)) return fail_at(f, Why::not_a_key);
      entries_.add(index, key, 1.0f);
      more = stop < end;
      p = stop + 1;
    }
    return true;
  }

  int64_t count_fields(const char* line, const char* newline) const {
    if (!plan_.quotes) return 1 + std::count(line, newline, plan_.separator);
    int64_t n = 1;
    for (bool hidden = false; line < newline; ++line) {
      hidden ^= *line == '"';
      n += !hidden && *line == plan_.separator;
    }
    return n;
  }

  void commit() {
    for (const Bucket& bucket : layout_.buckets) {
      const uint64_t key = layout_.bucket_key(bucket, dense_[bucket.column]);
      if constexpr (Flat)
        keys_[bucket.slot] = key;
      else
        entries_.add(static_cast<size_t>(bucket.slot), key, 1.0f);
    }
    ++out_.rows;
    out_.dense.size += layout_.dense.size();
    if constexpr (Flat)
      out_.keys.size += layout_.slots.size();
    else
      entries_.commit(layout_, out_);
    const auto side = [this](bool wanted, auto& column) {
      if (wanted) column.size = out_.rows;
    };
    side(layout_.label, out_.labels);
    side(layout_.show, out_.shows);
    side(layout_.click, out_.clicks);
    side(layout_.weight, out_.weights);
    side(layout_.time, out_.times);
    side(layout_.group, out_.groups);
  }

  const Delimited& plan_;
  const Layout& layout_;
  const char* const begin_;
  const char* const end_;
  Scanner scanner_;
  const OnBad on_bad_;
  Entries entries_;
  Rows out_;
  Bad bad_{};
  float* dense_ = nullptr;
  uint64_t* keys_ = nullptr;
  std::string unquoted_;
  bool has_nul_, has_quote_;
};

}  // namespace

Rows Delimited::parse(std::string_view block, OnBad on_bad) const {
  if (block.empty()) return {};
  if (block.back() != '\n') throw std::invalid_argument("a block must end with a newline");
  const bool flat = std::none_of(layout.slots.begin(), layout.slots.end(), [](const SlotColumn& s) { return s.multi; });
  return flat ? Pass<true>(*this, block, on_bad).run() : Pass<false>(*this, block, on_bad).run();
}

}  // namespace clickfleet::parse
