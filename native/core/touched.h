// The rows that a worker has trained since its last shipment: their values before, and their counts. Not thread-safe.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "hash.h"
#include "memory.h"

namespace clickfleet {

class Touched {
 public:
  explicit Touched(size_t width) : width_(width) {}

  size_t size() const { return keys_.size(); }
  size_t width() const { return width_; }
  const uint64_t* keys() const { return keys_.data(); }

  // Counts a push. `rows` are the values before it; a key that is here already keeps its first ones.
  void add(const uint64_t* keys, size_t n, const float* rows, const float* show, const float* click,
           const uint16_t* slots) {
    reserve(keys_.size() + n);
    each(keys, n, [&](size_t i, uint32_t& place) {
      if (place == kNone) {
        place = static_cast<uint32_t>(keys_.size());
        keys_.push_back(keys[i]);
        before_.insert(before_.end(), rows + i * width_, rows + (i + 1) * width_);
        counts_.push_back({show[i], click[i], slots[i]});
        return;
      }
      Counts& counts = counts_[place];
      counts.show += show[i];
      counts.click += click[i];
      counts.slot = slots[i];
    });
  }

  // Takes new values of rows, which others have changed. out[i] is 1 for the keys that are here: the new values become
  // those before training, and rows[i] their difference from the former ones.
  void rebase(const uint64_t* keys, size_t n, float* rows, uint8_t* out) {
    each(keys, n, [&](size_t i, uint32_t& place) {
      out[i] = place == kNone ? 0 : 1;
      if (place == kNone) return;
      float *before = before_.data() + place * width_, *row = rows + i * width_;
      for (size_t c = 0; c < width_; ++c) {
        const float now = row[c];
        row[c] = now - before[c];
        before[c] = now;
      }
    });
  }

  // Subtracts the values before training from `rows`, those of now; copies the counts; then forgets everything.
  void take(float* rows, float* show, float* click, uint16_t* slots) {
    for (size_t i = 0; i < before_.size(); ++i) rows[i] -= before_[i];
    for (size_t i = 0; i < counts_.size(); ++i) {
      show[i] = counts_[i].show;
      click[i] = counts_[i].click;
      slots[i] = counts_[i].slot;
    }
    keys_.clear();
    before_.clear();
    counts_.clear();
    std::fill(places_.begin(), places_.end(), kNone);
  }

 private:
  struct Counts {
    float show, click;
    uint16_t slot;
  };
  static constexpr uint32_t kNone = UINT32_MAX;
  static constexpr size_t kAhead = 16;

  size_t home(uint64_t key) const { return static_cast<size_t>(place64(key) >> shift_); }
  uint32_t& find(uint64_t key) {
    size_t at = home(key);
    while (places_[at] != kNone && keys_[places_[at]] != key) at = (at + 1) & (places_.size() - 1);
    return places_[at];
  }
  // Calls visit(i, place) for every key; `place` is kNone if it is not here.
  template <class Visit>
  void each(const uint64_t* keys, size_t n, const Visit& visit) {
    for (size_t i = 0; i < n; ++i) {
      if (i + kAhead < n) prefetch(&places_[home(keys[i + kAhead])]);
      visit(i, find(keys[i]));
    }
  }
  void reserve(size_t keys) {
    if (2 * keys <= places_.size()) return;
    const size_t size = std::bit_ceil(2 * keys);
    shift_ = 64 - std::countr_zero(size);
    places_.assign(size, kNone);
    for (size_t i = 0; i < keys_.size(); ++i) find(keys_[i]) = static_cast<uint32_t>(i);
  }

  const size_t width_;
  int shift_ = 64 - 10;
  std::vector<uint32_t> places_ = std::vector<uint32_t>(1 << 10, kNone);
  std::vector<uint64_t> keys_;
  std::vector<float> before_;
  std::vector<Counts> counts_;
};

}  // namespace clickfleet
