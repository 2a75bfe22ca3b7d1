// A stripe is one of 64 parts of a table, each with its own lock. It holds sixteen neighbouring virtual shards.
#pragma once
#include <cstdint>
#include <shared_mutex>

#include "arena.h"
#include "hash.h"
#include "index.h"
#include "layout.h"

namespace clickfleet {

inline constexpr int kStripes = 64;
inline int stripe_of(uint64_t hash) { return static_cast<int>(hash % kVirtualShards) / (kVirtualShards / kStripes); }

struct Pools {  // of short and of full rows
  Pools(Budget& budget, const Layout& layout, size_t chunk_bytes);
  ChunkPool short_pool, full_pool;
  int short_shift, full_shift;  // rows of a chunk, as a power of two
};

struct alignas(64) Stripe {
  Stripe(Budget& budget, Pools& pools, const Layout& layout)
      : index(budget),
        arenas{Arena(budget, pools.short_pool, layout.bytes(false), pools.short_shift),
               Arena(budget, pools.full_pool, layout.bytes(true), pools.full_shift)},
        changed(Counted<uint64_t>(&budget)),
        deleted(Counted<uint64_t>(&budget)),
        deleted_if_committed(Counted<uint64_t>(&budget)),
        undo(Counted<char>(&budget)) {}

  mutable std::shared_mutex lock;
  Index index;
  Arena arenas[2];  // short, full

  // For publishing: keys of rows with kChanged; keys readers must forget; keys they must forget once pending changes
  // are committed.
  CountedVector<uint64_t> changed, deleted, deleted_if_committed;

  // For the cut that is being read: rows as they were at the cut, each behind a byte that tells full from short, and
  // the tag below which rows have been read already.
  CountedVector<char> undo;
  uint64_t read_below = 0;

  Row row(Ref ref) const { return {arenas[ref.full()].at(ref.row())}; }
  bool is(Ref ref, uint64_t key) const { return row(ref).key() == key; }
  Index::Entry* find(uint64_t hash, uint64_t key) const {
    return index.find(tag_of(hash), [&](Ref ref) { return is(ref, key); });
  }
  uint32_t rows() const { return arenas[0].size() + arenas[1].size(); }

  // Takes the row out of its arena; the last row moves into its place and its entry follows.
  void close_gap(Ref ref) {
    Arena& arena = arenas[ref.full()];
    const uint32_t last = arena.size() - 1;
    if (ref.row() != last) {
      const Row moved{arena.at(last)};
      const uint64_t key = moved.key();
      find(mix64(key), key)->ref = ref;
      std::memcpy(arena.at(ref.row()), moved.at, static_cast<size_t>(arena.row_bytes()));
    }
    arena.drop_last();
  }
};

}  // namespace clickfleet
