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

FrozenSet::FrozenSet(std::vector<RecordBatch> batches, size_t width, RowFormat format)
    : batches_(std::move(batches)), width_(width), format_(format), bytes_(record_bytes(format, width)) {
  std::erase_if(batches_, [](const RecordBatch& s) { return s.rows == 0; });
  for (size_t i = 0; i < batches_.size(); ++i) {
    if (batches_[i].rows > kBatchRows || (i + 1 < batches_.size() && batches_[i].rows != kBatchRows))
      throw std::invalid_argument("every record batch except the last must hold 2^20 rows");
    size_ += batches_[i].rows;
  }
  if (size_ >= std::numeric_limits<uint32_t>::max()) throw std::invalid_argument("more than 2^32 rows of one kind");
  const int bits = std::max(1, static_cast<int>(std::bit_width(size_ / kRowsPerBucket)));
  shift_ = 64 - bits;
  starts_.assign((size_t{1} << bits) + 1, 0);
  uint64_t before = 0;
  size_t row = 0, bucket = 0;
  for (const RecordBatch& batch : batches_)
    for (size_t i = 0; i < batch.rows; ++i, ++row) {
      const uint64_t hash = mix64(batch.keys[i]);
      if (row > 0 && hash <= before) throw std::invalid_argument("rows are not sorted by the hash of their keys");
      before = hash;
      for (; bucket <= hash >> shift_; ++bucket) starts_[bucket] = static_cast<uint32_t>(row);
    }
  for (; bucket < starts_.size(); ++bucket) starts_[bucket] = static_cast<uint32_t>(row);
}

void FrozenSet::read(size_t row, float* out) const {
  if (has_records()) {
    unpack(format_, record_at(row), width_, out);
    return;
  }
  out[0] = *weight_at(row);
  if (has_factors()) copy_floats(factors_at(row), out + 1, width_);
}

void FrozenSet::prefetch_row(size_t row) const {
  const auto lines = [](const void* from, size_t bytes) {
    const auto* first = static_cast<const char*>(from);
    for (size_t line = 0; line < bytes; line += 64) prefetch(first + line);
    prefetch(first + bytes - 1);
  };
  if (has_records()) {
    lines(record_at(row), bytes_);
  } else if (has_weights()) {
    prefetch(weight_at(row));
    if (has_factors()) lines(factors_at(row), width_ * sizeof(float));
  }
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
  for (size_t i = 0; i < full.size(); ++i) {
    if (full[i].meets(brief)) throw std::invalid_argument("a key has both a short row and a full row");
    for (size_t other = 0; other < i; ++other)
      if (full[i].meets(full[other])) throw std::invalid_argument("a key has rows of two widths");
    if (full[i].meets(deleted)) throw std::invalid_argument("a key is both set and deleted");
  }
  if (brief.meets(deleted)) throw std::invalid_argument("a key is both set and deleted");
}

size_t FrozenLayer::full_rows() const {
  size_t rows = 0;
  for (const FrozenSet& set : full) rows += set.size();
  return rows;
}

size_t FrozenLayer::widest() const {
  size_t width = 0;
  for (const FrozenSet& set : full) width = std::max(width, set.width());
  return width;
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
      layer->each_set([&](const FrozenSet& set) {
        if (set.size() == 0 || left == 0) return;
        for (size_t p = 0; p < left; ++p) prefetch(set.start_of(hashes[pending[p]]));
        for (size_t p = 0; p < left; ++p) {
          const size_t row = *set.start_of(hashes[pending[p]]);
          if (row < set.size()) prefetch(set.key_at(row));
        }
        const bool weights = set.has_weights();
        for (size_t p = 0; p < left; ++p) {
          const size_t row = rows[p] = set.find(hashes[pending[p]], some[pending[p]]);
          if (row != FrozenSet::kNone) set.prefetch_row(row);
        }
        size_t kept = 0;
        for (size_t p = 0; p < left; ++p) {
          if (rows[p] == FrozenSet::kNone)
            pending[kept++] = pending[p];
          else if (weights)
            found(begin + pending[p], set, rows[p]);
        }
        left = kept;
      });
      if (left == 0) break;
    }
  }
}

void FrozenRows::read(const uint64_t* keys, size_t n, float* out) const {
  const size_t width = 1 + factors_;
  std::fill_n(out, n * width, 0.0F);
  each_found(keys, n, [&](size_t i, const FrozenSet& set, size_t row) { set.read(row, out + i * width); });
}

void FrozenRows::known(const uint64_t* keys, size_t n, uint8_t* out) const {
  std::fill_n(out, n, uint8_t{0});
  each_found(keys, n, [&](size_t i, const FrozenSet&, size_t) { out[i] = 1; });
}

MergedRows merge(const Layers& layers, uint64_t low, uint64_t high, bool keep_deleted, bool records) {
  struct Cursor {
    const FrozenSet* set;
    size_t row;
    uint64_t hash;
  };
  MergedRows out;
  std::vector<float> one;
  std::vector<Cursor> cursors;  // newest first; within a layer, a key is in one set only
  const auto settle = [high](Cursor& c) {
    if (c.row < c.set->size()) c.hash = mix64(c.set->key(c.row));
    return c.row < c.set->size() && c.hash <= high;
  };
  for (const auto& layer : layers)
    layer->each_set([&](const FrozenSet& set) {
      if (set.size() == 0) return;
      Cursor cursor{&set, set.lower_bound(low), 0};
      if (settle(cursor)) cursors.push_back(cursor);
      const auto same = [&](const MergedRows::Full& rows) { return rows.width == set.width(); };
      if (set.has_factors() && std::none_of(out.full.begin(), out.full.end(), same))
        out.full.push_back({set.width(), {}, {}, {}, {}});
    });
  std::sort(out.full.begin(), out.full.end(), [](const auto& a, const auto& b) { return a.width < b.width; });
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
      size_t at = 0;
      while (out.full[at].width != set.width()) ++at;
      MergedRows::Full& to = out.full[at];
      to.keys.push_back(key);
      if (records) {
        to.records.insert(to.records.end(), set.record_at(row), set.record_at(row) + set.record_size());
      } else {
        one.resize(1 + set.width());
        set.read(row, one.data());
        to.weights.push_back(one[0]);
        to.factors.insert(to.factors.end(), one.begin() + 1, one.end());
      }
    } else if (set.has_weights()) {
      out.brief_keys.push_back(key);
      if (records) {
        out.brief_records.insert(out.brief_records.end(), set.record_at(row), set.record_at(row) + set.record_size());
      } else {
        one.resize(1);
        set.read(row, one.data());
        out.brief_weights.push_back(one[0]);
      }
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
