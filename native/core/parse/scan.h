// Walks over the separators and newlines of a block, 64 bytes at a time.
#pragma once
#include <bit>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace clickfleet::parse {

class Scanner {
 public:
  Scanner(const char* begin, const char* end, char separator) : base_(begin), end_(end), separator_(separator) {
    load();
  }

  // The next separator or newline at or after the last one; `end` when there is none.
  const char* next() {
    while (mask_ == 0) {
      if (end_ - base_ <= 64) return end_;
      base_ += 64;
      load();
    }
    const int i = std::countr_zero(mask_);
    mask_ &= mask_ - 1;
    return base_ + i;
  }

 private:
  void load() {
    if (end_ - base_ >= 64) {
      mask_ = match(base_);
    } else {
      char last[64] = {};
      if (end_ > base_) std::memcpy(last, base_, static_cast<size_t>(end_ - base_));
      mask_ = match(last);
      const auto n = static_cast<unsigned>(end_ - base_);
      mask_ &= (1ULL << n) - 1;  // a separator of zero must not match the padding
    }
  }

  uint64_t match(const char* p) const {
#if defined(__AVX2__)
    const __m256i separator = _mm256_set1_epi8(separator_), newline = _mm256_set1_epi8('\n');
    const auto half = [&](const char* q) {
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q));
      return static_cast<uint32_t>(
          _mm256_movemask_epi8(_mm256_or_si256(_mm256_cmpeq_epi8(x, separator), _mm256_cmpeq_epi8(x, newline))));
    };
    return half(p) | static_cast<uint64_t>(half(p + 32)) << 32;
#else
    uint64_t mask = 0;
    for (int i = 0; i < 64; ++i) mask |= static_cast<uint64_t>(p[i] == separator_ || p[i] == '\n') << i;
    return mask;
#endif
  }

  const char* base_;
  const char* end_;
  char separator_;
  uint64_t mask_ = 0;
};

}  // namespace clickfleet::parse
