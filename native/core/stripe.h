// A stripe is one of the 32 parts of a table, each with its own lock. It holds 32 adjacent virtual shards.
#pragma once
#include <cstdint>
#include <shared_mutex>

#include "image_log.h"
#include "shelf.h"

namespace clickfleet {

inline constexpr int kStripes = 32;
inline int stripe_of(uint64_t hash) { return static_cast<int>(hash % kVirtualShards) / (kVirtualShards / kStripes); }
inline uint32_t upper(uint64_t hash) { return static_cast<uint32_t>(hash >> 32); }  // the sort key of rows

// A shelf and a slot packed into one word. Two fields, stored separately and read together, would stall the pipeline.
class Ref {
 public:
  Ref() = default;
  Ref(bool full, uint32_t slot)
      : bits_(slot == Shelf::kNone ? Shelf::kNone : slot << 1 | static_cast<uint32_t>(full)) {}
  explicit operator bool() const { return bits_ != Shelf::kNone; }
  bool full() const { return (bits_ & 1) != 0; }
  uint32_t slot() const { return bits_ >> 1; }

 private:
  uint32_t bits_ = Shelf::kNone;
};

struct alignas(64) Stripe {
  Stripe(Budget& lasting, Budget& all, const Layout& layout)
      : shelves{Shelf(lasting, layout.hot_bytes(false), layout.cold_bytes(false)),
                Shelf(lasting, layout.hot_bytes(true), layout.cold_bytes(true))},
        changed(CountingAllocator<uint64_t>(&lasting)),
        deleted(CountingAllocator<uint64_t>(&lasting)),
        deleted_if_committed(CountingAllocator<uint64_t>(&lasting)),
        undo(all, layout) {}

  mutable std::shared_mutex lock;
  Shelf shelves[2];  // short rows, full rows

  // For publishing: keys of rows with kChanged; keys that consumers must delete; keys that they must delete once the
  // pending changes are committed.
  CountedVector<uint64_t> changed, deleted, deleted_if_committed;

  // For the cut being read: images of rows at the cut, and the upper half of the hash below which rows have been read.
  ImageLog undo;
  uint64_t read_below = 0;

  Row row(Ref ref) const { return shelves[ref.full()].row(ref.slot()); }
  bool holds(Ref ref, uint64_t key) const { return ref && shelves[ref.full()].holds(ref.slot(), key); }
  uint32_t rows() const { return shelves[0].size() + shelves[1].size(); }

  Ref guess(uint64_t hash) const {
    const uint32_t slot = shelves[1].guess(hash);
    return slot != Shelf::kNone ? Ref(true, slot) : Ref(false, shelves[0].guess(hash));
  }
  Ref find(uint64_t hash, uint64_t key) const {
    const uint32_t slot = shelves[1].find(hash, key);
    return slot != Shelf::kNone ? Ref(true, slot) : Ref(false, shelves[0].find(hash, key));
  }
  void prefetch_tags(uint64_t hash) const {
    if (shelves[1].size() != 0) shelves[1].prefetch_tags(hash);
    if (shelves[0].size() != 0) shelves[0].prefetch_tags(hash);
  }
};

}  // namespace clickfleet
