// A hash table of rows of one width.
//
// Slots are grouped into buckets of 31. Each bucket has one cache line of 16-bit tags. The 32nd number of the line
// counts the rows whose probing passed over this bucket because it was full. A lookup therefore reads one line of tags
// and one row, up to a full table, and erasing leaves no tombstones.
//
// The home bucket of a row is proportional to its hash. So slots are nearly in order of mix64(key), growing is one pass
// over both arrays, and a range of hashes is a range of buckets.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

#include "hash.h"
#include "layout.h"
#include "memory.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace clickfleet {

class Shelf {
 public:
  static constexpr uint32_t kNone = UINT32_MAX, kBucket = 31;

  static uint16_t tag(uint64_t hash) {  // never 0, which marks a free slot
    const auto t = static_cast<uint16_t>(hash >> 16);
    return t == 0 ? 1 : t;
  }

  // The fields that a lookup needs, without the indirection through the shelf.
  struct View {
    const uint16_t* tags;
    const char* hot;
    size_t hot_bytes;
    uint32_t buckets;

    const uint16_t* tags_of(uint64_t hash) const { return tags + (((hash >> 32) * buckets) >> 32) * 32; }
    // Returns the first row with a matching tag, which is almost always the right one, or nullptr.
    const char* guess(uint64_t hash) const {
      if (buckets == 0) return nullptr;
      const uint16_t wanted = tag(hash);
      auto bucket = static_cast<uint32_t>(((hash >> 32) * buckets) >> 32);
      for (uint32_t seen = 0; seen < buckets; ++seen, bucket = bucket + 1 == buckets ? 0 : bucket + 1) {
        const uint16_t* line = tags + size_t{bucket} * 32;
        if (const uint32_t mask = match(line, wanted); mask != 0)
          return hot + (size_t{bucket} * kBucket + static_cast<uint32_t>(std::countr_zero(mask))) * hot_bytes;
        if (line[kBucket] == 0) return nullptr;
      }
      return nullptr;
    }
  };

  Shelf(Budget& budget, int hot_bytes, int cold_bytes)
      : budget_(budget), hot_bytes_(static_cast<size_t>(hot_bytes)), cold_bytes_(static_cast<size_t>(cold_bytes)) {}
  ~Shelf() { release(); }
  Shelf(const Shelf&) = delete;
  Shelf& operator=(const Shelf&) = delete;

  View view() const { return {tags_, hot_, hot_bytes_, buckets_}; }
  uint32_t home(uint64_t hash) const { return static_cast<uint32_t>(((hash >> 32) * buckets_) >> 32); }  // a bucket
  uint32_t size() const { return size_; }
  uint64_t version() const { return version_; }  // changes whenever rows may have moved or been erased
  uint32_t slots() const { return buckets_ * kBucket; }
  uint32_t buckets() const { return buckets_; }
  size_t row_bytes() const { return hot_bytes_ + cold_bytes_; }
  bool used(uint32_t slot) const { return tags_[slot / kBucket * 32 + slot % kBucket] != 0; }
  Row row(uint32_t slot) const { return {hot_ + slot * hot_bytes_, cold_ + slot * cold_bytes_}; }
  uint64_t key(uint32_t slot) const { return load<uint64_t>(hot_ + slot * hot_bytes_); }
  bool holds(uint32_t slot, uint64_t k) const { return slot < slots() && used(slot) && key(slot) == k; }

  void prefetch_tags(uint64_t hash) const { prefetch(tags_ + size_t{home(hash)} * 32); }
  void prefetch_hot(uint32_t slot) const { prefetch_bytes(hot_ + slot * hot_bytes_, hot_bytes_); }
  void prefetch_cold(uint32_t slot) const { prefetch_bytes(cold_ + slot * cold_bytes_, cold_bytes_); }

  // Returns a slot with a matching tag, which is almost always the right one.
  uint32_t guess(uint64_t hash) const {
    return search(hash, [](uint32_t) { return true; });
  }
  uint32_t find(uint64_t hash, uint64_t k) const {
    return search(hash, [&](uint32_t slot) { return key(slot) == k; });
  }

  bool crowded() const { return size_ >= limit_; }
  bool full() const { return size_ == slots(); }
  size_t bytes_if(uint32_t buckets) const { return buckets * (64 + kBucket * row_bytes()); }
  // The next larger number of buckets. Small shelves double unless memory is scarce. Larger ones grow by a quarter, and
  // the largest by a twelfth because memory matters more there.
  uint32_t larger(bool scarce) const {
    const bool doubles = buckets_ < 512 && !scarce;
    return buckets_ + std::max(1U, doubles ? buckets_ : buckets_ < 8192 ? buckets_ / 4 : buckets_ / 12);
  }
  // The number of buckets for the current rows with some headroom. It is smaller than now after many rows were erased.
  uint32_t trimmed() const { return std::min(buckets_, size_ / (kBucket * 92 / 100) + 1); }

  // Takes a slot for a new row and sets its key; the other bytes are undefined. The shelf must have a free slot.
  uint32_t insert(uint64_t hash, uint64_t k) {
    uint32_t bucket = home(hash);
    for (;; bucket = next(bucket)) {
      uint16_t* tags = tags_ + size_t{bucket} * 32;
      if (const uint32_t empty = match(tags, 0); empty != 0) {
        const auto i = static_cast<uint32_t>(std::countr_zero(empty));
        tags[i] = tag(hash);
        ++size_;
        const uint32_t slot = bucket * kBucket + i;
        store(hot_ + slot * hot_bytes_, k);
        return slot;
      }
      ++tags[kBucket];
    }
  }

  void erase(uint32_t slot) {
    const uint64_t hash = mix64(key(slot));
    const uint32_t bucket = slot / kBucket;
    tags_[size_t{bucket} * 32 + slot % kBucket] = 0;
    for (uint32_t b = home(hash); b != bucket; b = next(b)) --tags_[size_t{b} * 32 + kBucket];
    --size_;
    ++version_;
  }

  void resize(uint32_t buckets) {
    ++version_;
    Shelf old(budget_, static_cast<int>(hot_bytes_), static_cast<int>(cold_bytes_));
    swap(old);
    allocate(buckets);
    for (uint32_t from = 0; from < old.slots(); ++from) {
      if (!old.used(from)) continue;
      const Row was = old.row(from);
      const Row is = row(insert(mix64(was.key()), was.key()));
      std::memcpy(is.hot, was.hot, hot_bytes_);
      std::memcpy(is.cold, was.cold, cold_bytes_);
    }
  }

  // Visits every used slot whose row may have a hash with first <= hash >> 32 <= last, and some slots beyond.
  template <class Visit>
  void scan(uint32_t first, uint32_t last, const Visit& visit) const {
    if (buckets_ == 0) return;
    const uint32_t end = home(uint64_t{last} << 32);
    uint32_t bucket = home(uint64_t{first} << 32);
    bool beyond = false;
    for (uint32_t seen = 0; seen < buckets_; ++seen, bucket = next(bucket)) {
      const uint16_t* tags = tags_ + size_t{bucket} * 32;
      for (uint32_t i = 0; i < kBucket; ++i)
        if (tags[i] != 0) visit(bucket * kBucket + i);
      beyond = beyond || bucket == end;
      if (beyond && tags[kBucket] == 0) return;
    }
  }

 private:
  static uint32_t match(const uint16_t* tags, uint16_t t) {  // one bit for each of the 31 slots
#if defined(__AVX2__)
    const __m256i wanted = _mm256_set1_epi16(static_cast<short>(t));
    const __m256i low = _mm256_cmpeq_epi16(wanted, _mm256_load_si256(reinterpret_cast<const __m256i*>(tags)));
    const __m256i high = _mm256_cmpeq_epi16(wanted, _mm256_load_si256(reinterpret_cast<const __m256i*>(tags) + 1));
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8);
    return static_cast<uint32_t>(_mm256_movemask_epi8(bytes)) & 0x7fffffffU;
#else
    uint32_t mask = 0;
    for (uint32_t i = 0; i < kBucket; ++i) mask |= static_cast<uint32_t>(tags[i] == t) << i;
    return mask;
#endif
  }
  static void prefetch_bytes(const char* from, size_t bytes) {
    for (const char* line = from; line < from + bytes; line += 64) prefetch(line);
    prefetch(from + bytes - 1);
  }

  uint32_t next(uint32_t bucket) const { return bucket + 1 == buckets_ ? 0 : bucket + 1; }

  template <class Is>
  uint32_t search(uint64_t hash, const Is& is) const {
    if (buckets_ == 0) return kNone;
    for (uint32_t bucket = home(hash), seen = 0; seen < buckets_; bucket = next(bucket), ++seen) {
      const uint16_t* tags = tags_ + size_t{bucket} * 32;
      for (uint32_t mask = match(tags, tag(hash)); mask != 0; mask &= mask - 1) {
        const uint32_t slot = bucket * kBucket + static_cast<uint32_t>(std::countr_zero(mask));
        if (is(slot)) return slot;
      }
      if (tags[kBucket] == 0) return kNone;
    }
    return kNone;
  }

  void allocate(uint32_t buckets) {
    buckets_ = buckets;
    limit_ = slots() / 100 * 94 + slots() % 100 * 94 / 100;
    budget_.take(bytes_if(buckets_));
    // One allocation for all arrays: the tags are too small for huge pages of their own and share those of the rows.
    char* const start = allocate_pages(bytes_if(buckets_));
    tags_ = reinterpret_cast<uint16_t*>(start);
    hot_ = start + size_t{buckets_} * 64;
    cold_ = hot_ + slots() * hot_bytes_;
  }
  void release() {
    if (buckets_ == 0) return;
    free_pages(reinterpret_cast<char*>(tags_), bytes_if(buckets_));
    budget_.give(bytes_if(buckets_));
    buckets_ = size_ = limit_ = 0;
  }
  void swap(Shelf& other) noexcept {
    std::swap(tags_, other.tags_);
    std::swap(hot_, other.hot_);
    std::swap(cold_, other.cold_);
    std::swap(buckets_, other.buckets_);
    std::swap(size_, other.size_);
    std::swap(limit_, other.limit_);
  }

  Budget& budget_;
  const size_t hot_bytes_, cold_bytes_;
  uint16_t* tags_ = nullptr;
  char *hot_ = nullptr, *cold_ = nullptr;
  uint32_t buckets_ = 0, size_ = 0, limit_ = 0;
  uint64_t version_ = 0;
};

}  // namespace clickfleet
