// A stripe is one of the 32 parts of a table, each with its own lock. It holds 32 adjacent virtual shards.
#pragma once
#include <array>
#include <cstdint>
#include <shared_mutex>
#include <utility>

#include "cold.h"
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
  Ref(RowKind kind, uint32_t slot) : bits_(slot == Shelf::kNone ? kNone : uint64_t{slot} << 8 | kind) {}
  explicit operator bool() const { return bits_ != kNone; }
  RowKind kind() const { return static_cast<RowKind>(bits_); }
  uint32_t slot() const { return static_cast<uint32_t>(bits_ >> 8); }

 private:
  static constexpr uint64_t kNone = UINT64_MAX;
  uint64_t bits_ = kNone;
};

using Shelves = std::array<Shelf, kMostKinds>;

template <size_t... kinds>
Shelves make_shelves(Budget& budget, const Layout& layout, std::index_sequence<kinds...>) {
  return {Shelf(budget, layout.hot_bytes(kinds), layout.cold_bytes(kinds))...};
}

struct alignas(64) Stripe {
  Stripe(int index, Budget& rows, Budget& lasting, Budget& all, const Layout& layout)
      : kinds(layout.kinds()),
        shelves(make_shelves(rows, layout, std::make_index_sequence<kMostKinds>())),
        changed(CountingAllocator<uint64_t>(&lasting)),
        deleted(CountingAllocator<uint64_t>(&lasting)),
        deleted_if_committed(CountingAllocator<uint64_t>(&lasting)),
        undo(all, layout),
        number(index) {}

  mutable std::shared_mutex lock;
  const RowKind kinds;  // of rows
  Shelves shelves;      // by kind; those beyond stay empty

  // For publishing: keys of rows with kChanged; keys that consumers must delete; keys that they must delete once the
  // pending changes are committed.
  CountedVector<uint64_t> changed, deleted, deleted_if_committed;

  // For the cut being read: images of rows at the cut, and the upper half of the hash below which rows have been read.
  ImageLog undo;
  uint64_t read_below = 0;

  // With a disk tier: the rows that are on disk, and the number of spills, by which the age of a row is measured.
  std::unique_ptr<Cold> cold;
  uint8_t spills = 0;
  const int number;  // of this stripe

  Row row(Ref ref) const { return shelves[ref.kind()].row(ref.slot()); }
  bool holds(Ref ref, uint64_t key) const { return ref && shelves[ref.kind()].holds(ref.slot(), key); }
  size_t shelf_bytes() const {
    size_t bytes = 0;
    for (RowKind kind = 0; kind < kinds; ++kind) bytes += shelves[kind].bytes_if(shelves[kind].buckets());
    return bytes;
  }
  uint32_t rows() const {  // in memory
    uint32_t rows = 0;
    for (RowKind kind = 0; kind < kinds; ++kind) rows += shelves[kind].size();
    return rows;
  }
  bool has_cold_rows() const { return cold != nullptr && !cold->segments.empty(); }
  uint64_t rows_on_disk() const {
    uint64_t rows = 0;
    for (RowKind kind = 0; kind < kinds && cold != nullptr; ++kind) rows += cold->rows[kind];
    return rows;
  }

  Ref guess(uint64_t hash) const {
    return search([hash](const Shelf& shelf) { return shelf.guess(hash); });
  }
  Ref find(uint64_t hash, uint64_t key) const {
    return search([hash, key](const Shelf& shelf) { return shelf.find(hash, key); });
  }
  // The same for a key of a class that is known almost surely; the rows of other classes are not looked at.
  Ref guess(uint64_t hash, int row_class) const {
    if (row_class == kAnyClass) return guess(hash);
    const RowKind full = kind_of(row_class, true), brief = kind_of(row_class, false);
    if (const uint32_t slot = shelves[full].guess(hash); slot != Shelf::kNone) return {full, slot};
    return {brief, shelves[brief].guess(hash)};
  }
  void prefetch_tags(uint64_t hash, int row_class) const {
    if (row_class == kAnyClass) return prefetch_tags(hash);
    for (const bool full : {true, false})
      if (const Shelf& shelf = shelves[kind_of(row_class, full)]; shelf.size() != 0) shelf.prefetch_tags(hash);
  }
  void prefetch_tags(uint64_t hash) const {
    if (shelves[1].size() != 0) shelves[1].prefetch_tags(hash);
    if (shelves[0].size() != 0) shelves[0].prefetch_tags(hash);
    for (RowKind kind = 2; kind < kinds; ++kind)
      if (shelves[kind].size() != 0) shelves[kind].prefetch_tags(hash);
  }

 private:
  // The first slot that look(shelf) finds, full rows first.
  template <class Look>
  Ref search(const Look& look) const {
    if (const uint32_t slot = look(shelves[1]); slot != Shelf::kNone) return {1, slot};
    const uint32_t brief = look(shelves[0]);
    if (kinds == 2 || brief != Shelf::kNone) return {0, brief};
    for (RowKind kind = 2; kind < kinds; ++kind)
      if (const uint32_t slot = look(shelves[kind]); slot != Shelf::kNone) return {kind, slot};
    return {};
  }
};

}  // namespace clickfleet
