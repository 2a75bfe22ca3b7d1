// Converts whole columns of values (Arrow, NumPy) to keys and dense values, with the same functions that read text.
#pragma once
#include <charconv>
#include <cmath>

#include "layout.h"

namespace clickfleet::parse {

// Writes the keys of the texts [ends[i], ends[i + 1]) of `bytes` to out[i * stride]. Returns the index of the first
// value that is not a valid key, or n.
template <class Offset>
size_t text_keys(const Layout& layout, size_t slot, const Offset* ends, size_t n, const char* bytes, uint64_t* out,
                 size_t stride) {
  const SlotColumn& column = layout.slots[slot];
  for (size_t i = 0; i < n; ++i)
    if (!layout.key(column, bytes + ends[i], static_cast<size_t>(ends[i + 1] - ends[i]), out[i * stride])) return i;
  return n;
}

// Converts integers to keys: as decimal text, or unchanged under the raw rule, which rejects negative ones.
template <class Integer>
size_t integer_keys(const Layout& layout, size_t slot, const Integer* values, size_t n, uint64_t* out, size_t stride) {
  const SlotColumn& column = layout.slots[slot];
  for (size_t i = 0; i < n; ++i) {
    if (layout.rule == KeyRule::raw) {
      if (values[i] < Integer{0}) return i;
      out[i * stride] = static_cast<uint64_t>(values[i]);
      continue;
    }
    char text[24];
    const auto [end, error] = std::to_chars(text, text + sizeof text, values[i]);
    layout.key(column, text, static_cast<size_t>(end - text), out[i * stride]);
  }
  return n;
}

// Converts texts to times. Returns the index of the first text that is not a time, or n.
template <class Offset>
size_t text_times(const Offset* ends, size_t n, const char* bytes, int64_t* out) {
  for (size_t i = 0; i < n; ++i)
    if (!to_time(bytes + ends[i], bytes + ends[i + 1], out[i])) return i;
  return n;
}

// Interleaves columns into rows, a few rows at a time so that they stay in the cache.
struct KeyColumn {
  const uint64_t* keys;
  size_t size;
  const int32_t* uses;  // index into `keys` for every row; nullptr: one key per row
};

// Returns false if a use points outside its keys; `out` is [rows, columns].
inline bool weave(const std::vector<KeyColumn>& columns, size_t rows, uint64_t* out) {
  constexpr size_t kSome = 128;
  bool inside = true;
  for (size_t first = 0; first < rows; first += kSome) {
    const size_t last = first + kSome < rows ? first + kSome : rows;
    for (size_t c = 0; c < columns.size(); ++c) {
      const KeyColumn& column = columns[c];
      uint64_t* to = out + first * columns.size() + c;
      for (size_t i = first; i < last; ++i, to += columns.size()) {
        const size_t at = column.uses == nullptr ? i : static_cast<size_t>(static_cast<uint32_t>(column.uses[i]));
        inside = inside && at < column.size;
        *to = column.keys[inside ? at : 0];
      }
    }
  }
  return inside;
}

// NaN means missing. Returns the index of the first value that is out of range, or n.
inline size_t dense_values(const Layout& layout, size_t index, const double* values, size_t n, float* out,
                           size_t stride) {
  const DenseColumn& column = layout.dense[index];
  for (size_t i = 0; i < n; ++i) {
    const float x = std::isnan(values[i]) ? column.missing : static_cast<float>(layout.transform(column, values[i]));
    if (!std::isfinite(x)) return i;
    out[i * stride] = x;
  }
  return n;
}

}  // namespace clickfleet::parse
