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

// A column of which a row may have several entries: row r has `counts[r]` entries from `starts[r]` on, or, if `starts`
// is nullptr, entry r. An entry refers to a key through `uses`, or is the number of a key itself.
struct ListColumn {
  const uint64_t* keys;
  size_t size;
  const int32_t* uses;
  size_t entries;
  const int64_t *starts, *counts;
  const float* values;  // of the entries; nullptr: 1
};

// Writes the offsets of the keys of all rows and columns, offsets[0] included. Returns false if a column has a row that
// points outside of its entries.
inline bool list_offsets(const std::vector<ListColumn>& columns, size_t rows, int64_t* offsets) {
  int64_t at = 0;
  *offsets++ = 0;
  for (size_t r = 0; r < rows; ++r)
    for (const ListColumn& column : columns) {
      const auto entries = static_cast<int64_t>(column.entries);
      const int64_t start = column.starts == nullptr ? static_cast<int64_t>(r) : column.starts[r];
      const int64_t count = column.starts == nullptr ? 1 : column.counts[r];
      if (start < 0 || count < 0 || start > entries || count > entries - start) return false;
      *offsets++ = at += count;
    }
  return true;
}

// Writes the keys, and the values unless that is nullptr, of the rows for which `list_offsets` returned true. Returns
// false if a use points outside of its keys.
inline bool weave_lists(const std::vector<ListColumn>& columns, size_t rows, uint64_t* keys, float* values) {
  for (size_t r = 0; r < rows; ++r)
    for (const ListColumn& column : columns) {
      const size_t start = column.starts == nullptr ? r : static_cast<size_t>(column.starts[r]);
      const size_t count = column.starts == nullptr ? 1 : static_cast<size_t>(column.counts[r]);
      for (size_t e = start; e < start + count; ++e) {
        const size_t at = column.uses == nullptr ? e : static_cast<size_t>(static_cast<uint32_t>(column.uses[e]));
        if (at >= column.size) return false;
        *keys++ = column.keys[at];
        if (values != nullptr) *values++ = column.values == nullptr ? 1.0f : column.values[e];
      }
    }
  return true;
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
