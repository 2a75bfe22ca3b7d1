// hash -> row number: open addressing with 8-byte entries, so that a probe is one cache line.
//
// An entry keeps the upper half of mix64(key) as its tag, and its home is proportional to the tag. So entries lie
// nearly in order of mix64(key), growing is one pass over both arrays without a look at the rows, and any range of
// hashes is a stretch of entries. Whether a tag is the right key, the row itself tells.
#pragma once
#include <algorithm>
#include <cstdint>

#include "memory.h"

namespace clickfleet {

inline uint32_t tag_of(uint64_t hash) { return static_cast<uint32_t>(hash >> 32); }

// Which arena and which row: 0 is nothing.
struct Ref {
  uint32_t bits = 0;
  static Ref of(bool full, uint32_t row) { return {(row + 1) << 1 | static_cast<uint32_t>(full)}; }
  explicit operator bool() const { return bits != 0; }
  bool full() const { return (bits & 1) != 0; }
  uint32_t row() const { return (bits >> 1) - 1; }
};

class Index {
 public:
  struct Entry {
    uint32_t tag;
    Ref ref;
  };

  explicit Index(Budget& budget) : budget_(budget) { allocate(16); }
  ~Index() { release(entries_, capacity_); }
  Index(const Index&) = delete;
  Index& operator=(const Index&) = delete;

  uint32_t size() const { return size_; }
  size_t bytes() const { return size_t{capacity_} * sizeof(Entry); }
  void prefetch_home(uint32_t tag) const { prefetch(&entries_[home(tag)]); }

  // The first entry with this tag whose row `is` the one; nullptr if there is none.
  template <class Is>
  Entry* find(uint32_t tag, const Is& is) const {
    for (uint32_t i = home(tag); entries_[i].ref; i = next(i))
      if (entries_[i].tag == tag && is(entries_[i].ref)) return &entries_[i];
    return nullptr;
  }

  // `spare` bytes may be allocated: without room to grow, runs get longer for a while.
  void insert(uint32_t tag, Ref ref, size_t spare) {
    if (size_ >= limit_) {
      const uint32_t larger = capacity_ + capacity_ / 4;
      if (size_t{larger} * sizeof(Entry) <= spare || size_ >= capacity_ - capacity_ / 16) resize(larger);
    }
    place(tag, ref);
    ++size_;
  }

  void erase(Entry* entry) {
    // Close the gap: every later entry of the run that may stand nearer to its home moves up.
    auto hole = static_cast<uint32_t>(entry - entries_);
    for (uint32_t i = next(hole); entries_[i].ref; i = next(i)) {
      if (distance(home(entries_[i].tag), i) < distance(hole, i)) continue;
      entries_[hole] = entries_[i];
      hole = i;
    }
    entries_[hole] = {};
    --size_;
  }

  // Gives memory back after many entries were erased.
  void trim() {
    if (size_ < limit_ / 2 && capacity_ > 64) resize(std::max<uint32_t>(16, size_ + size_ / 2));
  }

  // Every entry with first <= tag <= last, in no strict order.
  template <class Visit>
  void scan(uint32_t first, uint32_t last, const Visit& visit) const {
    const uint32_t end = home(last);
    uint32_t i = home(first);
    for (uint32_t seen = 0; seen < capacity_; ++seen, i = next(i)) {
      const Entry& entry = entries_[i];
      if (entry.ref && entry.tag >= first && entry.tag <= last) visit(entry);
      if (!entry.ref && distance(home(first), i) > distance(home(first), end)) return;
    }
  }

 private:
  uint32_t home(uint32_t tag) const { return static_cast<uint32_t>((uint64_t{tag} * capacity_) >> 32); }
  uint32_t next(uint32_t i) const { return i + 1 == capacity_ ? 0 : i + 1; }
  uint32_t distance(uint32_t from, uint32_t to) const { return to >= from ? to - from : to + capacity_ - from; }

  void place(uint32_t tag, Ref ref) {
    uint32_t i = home(tag);
    while (entries_[i].ref) i = next(i);
    entries_[i] = {tag, ref};
  }
  void allocate(uint32_t capacity) {
    budget_.take(size_t{capacity} * sizeof(Entry));
    entries_ = reinterpret_cast<Entry*>(allocate_pages(size_t{capacity} * sizeof(Entry)));
    capacity_ = capacity;
    limit_ = capacity / 4 * 3;
  }
  void release(Entry* entries, uint32_t capacity) {
    free_pages(reinterpret_cast<char*>(entries), size_t{capacity} * sizeof(Entry));
    budget_.give(size_t{capacity} * sizeof(Entry));
  }
  void resize(uint32_t capacity) {
    Entry* old = entries_;
    const uint32_t old_capacity = capacity_;
    allocate(capacity);
    for (uint32_t i = 0; i < old_capacity; ++i)
      if (old[i].ref) place(old[i].tag, old[i].ref);
    release(old, old_capacity);
  }

  Budget& budget_;
  Entry* entries_ = nullptr;
  uint32_t capacity_ = 0, limit_ = 0, size_ = 0;
};

}  // namespace clickfleet
