#include "frozen_rows.h"

#include <algorithm>
#include <array>
#include <bit>
#include <stdexcept>

#include "floats.h"
#include "hash.h"

namespace clickfleet {
namespace {

constexpr size_t kBlock = 32;
constexpr size_t kRowsPerBucket = 4;  // half a cache line of keys

inline void prefetch(const void* p) {
#if defined(__GNUC__)
  __builtin_prefetch(p);
#else
  (void)p;
#endif
}

}  // namespace

FrozenSet::FrozenSet(std::vector<Segment> segments) : segments_(std::move(segments)) {
  std::erase_if(segments_, [](const Segment& s) { return s.rows == 0; });
  for (size_t i = 0; i < segments_.size(); ++i) {
    if (segments_[i].rows > kSegmentRows || (i + 1 < segments_.size() && segments_[i].rows != kSegmentRows))
      throw std::invalid_argument("every record batch except the last must hold 2^20 rows");
    size_ += segments_[i].rows;
  }
  if (size_ >= std::numeric_limits<uint32_t>::max()) throw std::invalid_argument("more than 2^32 rows of one kind");
  const int bits = std::max(1, static_cast<int>(std::bit_width(size_ / kRowsPerBucket)));
  shift_ = 64 - bits;
  starts_.assign((size_t{1} << bits) + 1, 0);
  uint64_t before = 0;
  size_t row = 0, bucket = 0;
  for (const Segment& segment : segments_)
    for (size_t i = 0; i < segment.rows; ++i, ++row) {
      const uint64_t hash = mix64(segment.keys[i]);
      if (row > 0 && hash <= before) throw std::invalid_argument("rows are not sorted by the hash of their keys");
      before = hash;
      for (; bucket <= hash >> shift_; ++bucket) starts_[bucket] = static_cast<uint32_t>(row);
    }
  for (; bucket < starts_.size(); ++bucket) starts_[bucket] = static_cast<uint32_t>(row);
}

size_t FrozenSet::lower_bound(uint64_t hash) const {
  const uint32_t* start = start_of(hash);
  size_t row = start[0];
  while (row < start[1] && mix64(key(row)) < hash) ++row;
  return row;
}

bool FrozenSet::meets(const FrozenSet& other) const {
  if (size_ > other.size_) return other.meets(*this);
  for (size_t row = 0; row < size_; ++row)  // both ascend, so the rows compared are close to each other
    if (other.find(mix64(key(row)), key(row)) != kNone) return true;
  return false;
}

void FrozenLayer::check() const {
  if (full.meets(brief)) throw std::invalid_argument("a key has both a short row and a full row");
  if (full.meets(deleted) || brief.meets(deleted)) throw std::invalid_argument("a key is both set and deleted");
}

// Calls found(i, set, row) for every key that a layer sets. Keys not found in one set are looked up in the next.
template <class Found>
void FrozenRows::each_found(const uint64_t* keys, size_t n, const Found& found) const {
  std::array<uint64_t, kBlock> hashes;
  std::array<uint32_t, kBlock> pending;
  std::array<size_t, kBlock> rows;
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const uint64_t* some = keys + begin;
    size_t left = std::min(kBlock, n - begin);
    for (size_t i = 0; i < left; ++i) {
      hashes[i] = mix64(some[i]);
      pending[i] = static_cast<uint32_t>(i);
    }
    for (const auto& layer : layers_) {
      for (const FrozenSet* set : {&layer->full, &layer->brief, &layer->deleted}) {
        if (set->size() == 0) continue;
        for (size_t p = 0; p < left; ++p) prefetch(set->start_of(hashes[pending[p]]));
        for (size_t p = 0; p < left; ++p) {
          const size_t row = *set->start_of(hashes[pending[p]]);
          if (row < set->size()) prefetch(set->key_at(row));
        }
        const bool weights = set->has_weights(), factors = set->has_factors();
        for (size_t p = 0; p < left; ++p) {
          const size_t row = rows[p] = set->find(hashes[pending[p]], some[pending[p]]);
          if (row == FrozenSet::kNone) continue;
          if (weights) prefetch(set->weight_at(row));
          if (!factors) continue;
          const auto* first = reinterpret_cast<const char*>(set->factors_at(row, factors_));
          for (size_t line = 0; line < factors_ * sizeof(float); line += 64) prefetch(first + line);
          prefetch(first + factors_ * sizeof(float) - 1);
        }
        size_t kept = 0;
        for (size_t p = 0; p < left; ++p) {
          if (rows[p] == FrozenSet::kNone)
            pending[kept++] = pending[p];
          else if (weights)
            found(begin + pending[p], *set, rows[p]);
        }
        left = kept;
      }
      if (left == 0) break;
    }
  }
}

void FrozenRows::read(const uint64_t* keys, size_t n, float* out) const {
  const size_t width = 1 + factors_;
  std::fill_n(out, n * width, 0.0F);
  each_found(keys, n, [&](size_t i, const FrozenSet& set, size_t row) {
    float* to = out + i * width;
    to[0] = *set.weight_at(row);
    if (set.has_factors()) copy_floats(set.factors_at(row, factors_), to + 1, factors_);
  });
}

void FrozenRows::known(const uint64_t* keys, size_t n, uint8_t* out) const {
  std::fill_n(out, n, uint8_t{0});
  each_found(keys, n, [&](size_t i, const FrozenSet&, size_t) { out[i] = 1; });
}

MergedRows merge(const Layers& layers, size_t factors, uint64_t low, uint64_t high, bool keep_deleted) {
  struct Cursor {
    const FrozenSet* set;
    size_t row;
    uint64_t hash;
  };
  MergedRows out;
  std::vector<Cursor> cursors;  // newest first; within a layer, a key is in one set only
  const auto settle = [high](Cursor& c) {
    if (c.row < c.set->size()) c.hash = mix64(c.set->key(c.row));
    return c.row < c.set->size() && c.hash <= high;
  };
  for (const auto& layer : layers)
    for (const FrozenSet* set : {&layer->full, &layer->brief, &layer->deleted}) {
      if (set->size() == 0) continue;
      Cursor cursor{set, set->lower_bound(low), 0};
      if (settle(cursor)) cursors.push_back(cursor);
    }
  while (!cursors.empty()) {
    uint64_t least = cursors[0].hash;
    size_t newest = 0;
    for (size_t i = 1; i < cursors.size(); ++i)
      if (cursors[i].hash < least) {
        least = cursors[i].hash;
        newest = i;
      }
    const FrozenSet& set = *cursors[newest].set;
    const size_t row = cursors[newest].row;
    const uint64_t key = set.key(row);
    if (set.has_factors()) {
      out.full_keys.push_back(key);
      out.full_weights.push_back(*set.weight_at(row));
      const float* x = set.factors_at(row, factors);
      out.full_factors.insert(out.full_factors.end(), x, x + factors);
    } else if (set.has_weights()) {
      out.brief_keys.push_back(key);
      out.brief_weights.push_back(*set.weight_at(row));
    } else if (keep_deleted) {
      out.deleted.push_back(key);
    }
    for (Cursor& c : cursors)
      if (c.hash == least) ++c.row;
    std::erase_if(cursors, [&](Cursor& c) { return c.hash == least && !settle(c); });
  }
  return out;
}

}  // namespace clickfleet
