// A set of keys: added and looked up in batches, never removed. Not thread-safe.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "hash.h"
#include "memory.h"

namespace clickfleet {

class KeySet {
 public:
  void add(const uint64_t* keys, size_t n) {
    each_with_prefetch(keys, n, [&](uint64_t key) {
      if (2 * (size_ + 1) > slots_.size()) grow();
      put(key);
    });
  }

  // Adds keys. out[i] is 1 if keys[i] was new.
  void insert(const uint64_t* keys, size_t n, uint8_t* out) {
    each_with_prefetch(keys, n, [&](uint64_t key) {
      if (2 * (size_ + 1) > slots_.size()) grow();
      *out++ = put(key) ? 1 : 0;
    });
  }

  void has(const uint64_t* keys, size_t n, uint8_t* out) const {
    each_with_prefetch(keys, n, [&](uint64_t key) { *out++ = key == 0 ? zero_ : slots_[find(key)] == key; });
  }

  size_t size() const { return size_ + (zero_ ? 1 : 0); }

  void copy(uint64_t* out) const {
    if (zero_) *out++ = 0;
    for (const uint64_t key : slots_)
      if (key != 0) *out++ = key;
  }

  // The most neighbouring places that are taken: how far a look-up may have to search.
  size_t longest_run() const {
    size_t longest = 0, run = 0;
    for (const uint64_t key : slots_) longest = std::max(longest, run = key != 0 ? run + 1 : 0);
    return longest;
  }

 private:
  static constexpr size_t kAhead = 16;

  template <class Visit>
  void each_with_prefetch(const uint64_t* keys, size_t n, const Visit& visit) const {
    for (size_t i = 0; i < n; ++i) {
      if (i + kAhead < n) prefetch(&slots_[home(keys[i + kAhead])]);
      visit(keys[i]);
    }
  }

  size_t home(uint64_t key) const { return static_cast<size_t>(place64(key) >> shift_); }
  size_t find(uint64_t key) const {
    size_t at = home(key);
    while (slots_[at] != 0 && slots_[at] != key) at = (at + 1) & (slots_.size() - 1);
    return at;
  }
  bool put(uint64_t key) {  // returns whether it is new
    if (key == 0) return !std::exchange(zero_, true);
    uint64_t& slot = slots_[find(key)];
    const bool is_new = slot == 0;
    size_ += is_new ? 1 : 0;
    slot = key;
    return is_new;
  }
  void grow() {
    std::vector<uint64_t> old(2 * slots_.size());
    old.swap(slots_);
    --shift_;
    for (const uint64_t key : old)
      if (key != 0) slots_[find(key)] = key;
  }

  int shift_ = 64 - 10;
  std::vector<uint64_t> slots_ = std::vector<uint64_t>(1 << 10);  // 0: free
  size_t size_ = 0;
  bool zero_ = false;
};

}  // namespace clickfleet
