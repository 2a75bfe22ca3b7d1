// The distinct keys in order of first occurrence, and the position of every key among them.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace clickfleet {

// Sets `where[i]` to the position of keys[i] in `distinct`. Both arrays hold `n` entries. Returns the number of
// distinct keys.
template <class Index>
size_t unique(const uint64_t* keys, size_t n, uint64_t* distinct, Index* where) {
  // Multiplying by an odd constant makes every bit of a key count. The table holds positions only, so it stays in the
  // cache.
  constexpr uint64_t kSpread = 0x9e3779b97f4a7c15ULL;
  constexpr uint32_t kEmpty = ~0U;
  static thread_local std::vector<uint32_t> table;
  const size_t size = std::bit_ceil(n < 16 ? size_t{32} : n * 2);
  if (table.size() < size) table.resize(size);
  std::fill_n(table.begin(), size, kEmpty);
  const int shift = 64 - std::countr_zero(size);
  const size_t mask = size - 1;
  uint32_t count = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint64_t key = keys[i];
    size_t at = (key ^ key >> 32) * kSpread >> shift;
    while (table[at] != kEmpty && distinct[table[at]] != key) at = (at + 1) & mask;
    if (table[at] == kEmpty) {
      distinct[count] = key;
      table[at] = count++;
    }
    where[i] = table[at];
  }
  return count;
}

}  // namespace clickfleet
