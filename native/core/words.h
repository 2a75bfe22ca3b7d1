// A vocabulary for training: the word of each key, the chance to keep it, and noise words to draw.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "hash.h"

namespace clickfleet {

// SplitMix64: a counter passed through mix64. Any seed is good.
struct Random {
  uint64_t state;
  uint64_t operator()() { return mix64(state += 0x9e3779b97f4a7c15ULL); }
  // Returns a number below n, from the upper half of a draw.
  static uint32_t below(uint64_t bits, uint32_t n) { return static_cast<uint32_t>(((bits >> 32) * n) >> 32); }
};

class Words {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  // Per word: the keys of its input and output rows, the chance to keep an occurrence, and its weight as a noise word.
  Words(const uint64_t* in, const uint64_t* out, const double* keep, const double* noise, size_t n);

  uint32_t size() const { return static_cast<uint32_t>(in_.size()); }
  uint64_t in(uint32_t id) const { return in_[id]; }
  uint64_t out(uint32_t id) const { return out_[id]; }
  uint32_t find(uint64_t in_key) const {
    const size_t mask = index_.size() - 1;
    for (size_t i = mix64(in_key) & mask;; i = (i + 1) & mask)
      if (index_[i] == kNone || in_[index_[i]] == in_key) return index_[i];
  }
  bool keeps(uint32_t id, uint64_t bits) const { return (bits >> 32) < keep_[id]; }
  // Draws a noise word by the alias method (Walker 1977): one table entry and one comparison.
  uint32_t draw(uint64_t bits) const {
    const uint32_t at = Random::below(bits, size());
    return static_cast<uint32_t>(bits) <= noise_[at].share ? at : noise_[at].other;
  }

 private:
  struct Noise {
    uint32_t share, other;
  };
  std::vector<uint64_t> in_, out_, keep_;
  std::vector<Noise> noise_;
  std::vector<uint32_t> index_;
};

}  // namespace clickfleet
