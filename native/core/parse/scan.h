// Finds every separator and newline of a block, 64 bytes at a time, before any field is parsed. The loops over fields
// then need no search, and avoid its mispredicted branches.
#pragma once
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace clickfleet::parse {

// Returns which of the 64 bytes from `p` on are `c`, one bit each.
inline uint64_t match(const char* p, char c) {
#if defined(__AVX2__)
  const __m256i wanted = _mm256_set1_epi8(c);
  const auto half = [&](const char* q) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q));
    return static_cast<uint64_t>(static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(x, wanted))));
  };
  return half(p) | half(p + 32) << 32;
#else
  uint64_t mask = 0;
  for (int i = 0; i < 64; ++i) mask |= static_cast<uint64_t>(p[i] == c) << i;
  return mask;
#endif
}

// Memory that each thread keeps for its next block: fresh pages from the system cost more than the search.
struct IndexSpace {
  std::unique_ptr<uint32_t[]> ends;
  size_t size = 0;
  std::vector<uint32_t> lines;
};

class Index {
 public:
  Index(std::string_view block, char separator) : Index(block, separator, separator) {}

  // Also finds every `other` and every `third`.
  Index(std::string_view block, char separator, char other) : Index(block, separator, other, other) {}

  Index(std::string_view block, char separator, char other, char third) {
    if (block.size() >= UINT32_MAX) throw std::invalid_argument("a block must be smaller than 4 GiB");
    lines_.clear();
    if (space_.size < block.size() + 16) {  // a field may end at every byte; unused pages cost nothing
      space_.size = block.size() + 16;
      space_.ends = std::make_unique_for_overwrite<uint32_t[]>(space_.size);
    }
    ends_ = space_.ends.get();
    const char* const begin = block.data();
    size_t at = 0;
    for (; at + 64 <= block.size(); at += 64) add(begin + at, at, separator, other, third, ~0ULL);
    if (at < block.size()) {
      char last[64] = {};
      std::memcpy(last, begin + at, block.size() - at);
      const uint64_t keep = ~0ULL >> (64 - (block.size() - at));  // a zero separator must not match the padding
      add(last, at, separator, other, third, keep);
    }
  }

  const uint32_t* ends() const { return ends_; }                 // where each field ends
  const std::vector<uint32_t>& lines() const { return lines_; }  // the number of fields up to each newline

 private:
  void add(const char* p, size_t at, char separator, char other, char third, uint64_t keep) {
    const uint64_t newlines = match(p, '\n') & keep;
    uint64_t both = match(p, separator);
    if (other != separator) both |= match(p, other);
    if (third != other) both |= match(p, third);
    both = (both & keep) | newlines;
    for (uint64_t left = newlines; left != 0; left &= left - 1)
      lines_.push_back(count_ + static_cast<uint32_t>(std::popcount(both & (left ^ (left - 1)))));
    uint32_t* out = ends_ + count_;
    const auto n = static_cast<unsigned>(std::popcount(both));
    count_ += n;
    const auto eight = [&] {
      for (int i = 0; i < 8; ++i) {
        out[i] = static_cast<uint32_t>(at) + static_cast<uint32_t>(std::countr_zero(both));
        both &= both - 1;
      }
      out += 8;
    };
    eight();  // writing too many is harmless: the next ones overwrite them
    for (unsigned done = 8; done < n; done += 8) eight();
  }

  static inline thread_local IndexSpace space_;
  std::vector<uint32_t>& lines_ = space_.lines;
  uint32_t* ends_;
  uint32_t count_ = 0;
};

}  // namespace clickfleet::parse
