// Immutable rows, read in place from a published file mapped into memory or from a copy of it. Rows ascend by
// mix64(key), so the leading bits of the hash select a short range of rows; no other index is needed.
#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "small_rows.h"

namespace clickfleet {

// Rows of one record batch of a published file. All batches of a set except the last hold kBatchRows rows.
struct RecordBatch {
  const uint64_t* keys = nullptr;
  const float* weights = nullptr;  // nullptr: keys only (deleted keys), or records
  const float* factors = nullptr;  // [rows, width of the set]; nullptr: short rows, or records
  size_t rows = 0;
  const uint8_t* records = nullptr;  // [rows, record_bytes] in a small format
};

inline constexpr int kBatchBits = 20;
inline constexpr size_t kBatchRows = size_t{1} << kBatchBits;

// Rows of one width, in one format. The constructor makes one pass over the keys, which also verifies their order.
class FrozenSet {
 public:
  FrozenSet() = default;
  // Throws std::invalid_argument if the order is wrong. In a small format, the batches hold records.
  explicit FrozenSet(std::vector<RecordBatch> batches, size_t width = 0, RowFormat format = RowFormat::kFloat32);

  size_t size() const { return size_; }
  size_t width() const { return width_; }  // factors of a row
  uint64_t key(size_t row) const { return batches_[row >> kBatchBits].keys[row & (kBatchRows - 1)]; }
  const uint64_t* key_at(size_t row) const { return batches_[row >> kBatchBits].keys + (row & (kBatchRows - 1)); }
  const float* weight_at(size_t row) const { return batches_[row >> kBatchBits].weights + (row & (kBatchRows - 1)); }
  const float* factors_at(size_t row) const {
    return batches_[row >> kBatchBits].factors + (row & (kBatchRows - 1)) * width_;
  }
  const uint8_t* record_at(size_t row) const {
    return batches_[row >> kBatchBits].records + (row & (kBatchRows - 1)) * bytes_;
  }
  RowFormat format() const { return format_; }
  bool has_records() const { return format_ != RowFormat::kFloat32; }
  bool has_weights() const { return size_ != 0 && (has_records() || batches_[0].weights != nullptr); }
  bool has_factors() const { return size_ != 0 && (has_records() ? width_ != 0 : batches_[0].factors != nullptr); }
  size_t record_size() const { return bytes_; }
  size_t index_bytes() const { return starts_.size() * sizeof(uint32_t); }

  // Writes embed_w and the factors that the row has: 1 + width floats at most.
  void read(size_t row, float* out) const;
  // Brings a row into the cache.
  void prefetch_row(size_t row) const;

  const uint32_t* start_of(uint64_t hash) const { return starts_.data() + (hash >> shift_); }
  // Returns the row of a key, or kNone.
  size_t find(uint64_t hash, uint64_t key) const {
    const uint32_t* start = start_of(hash);
    for (size_t row = start[0]; row < start[1]; ++row)
      if (this->key(row) == key) return row;
    return kNone;
  }
  size_t lower_bound(uint64_t hash) const;   // the first row whose hash is at least `hash`
  bool meets(const FrozenSet& other) const;  // whether the two sets share a key
  static constexpr size_t kNone = std::numeric_limits<size_t>::max();

 private:
  std::vector<RecordBatch> batches_;
  std::vector<uint32_t> starts_ = {0, 0};
  size_t size_ = 0, width_ = 0;
  int shift_ = 63;
  RowFormat format_ = RowFormat::kFloat32;
  size_t bytes_ = 0;  // of a record
};

// One published entry, or several merged entries: the rows it sets and the keys it deletes.
struct FrozenLayer {
  std::vector<FrozenSet> full;  // one set for every width
  FrozenSet brief, deleted;

  // The format of its rows; float32 if it has none.
  RowFormat format() const { return full_rows() != 0 ? full[0].format() : brief.format(); }
  void check() const;  // throws std::invalid_argument if a key occurs twice
  size_t full_rows() const;
  size_t widest() const;
  // Calls visit(set) for all sets: full rows, short rows, deleted keys.
  template <class Visit>
  void each_set(const Visit& visit) const {
    for (const FrozenSet& set : full) visit(set);
    visit(brief);
    visit(deleted);
  }
};

using Layers = std::vector<std::shared_ptr<const FrozenLayer>>;  // newest first

// The rows of a model at one sequence number.
class FrozenRows {
 public:
  FrozenRows(Layers layers, size_t factors) : layers_(std::move(layers)), factors_(factors) {}
  size_t factors() const { return factors_; }
  const Layers& layers() const { return layers_; }

  // out[i, :] = embed_w and embedx of keys[i], then zeros beyond its width. Unknown and deleted keys have only zeros.
  void read(const uint64_t* keys, size_t n, float* out) const;
  // out[i] = 1 if a layer sets keys[i] and no newer layer deletes it.
  void known(const uint64_t* keys, size_t n, uint8_t* out) const;

 private:
  template <class Found>
  void each_found(const uint64_t* keys, size_t n, const Found& found) const;
  Layers layers_;
  size_t factors_;
};

// The result of merging layers; each kind ascends by hash.
struct MergedRows {
  struct Full {  // rows of one width
    size_t width = 0;
    std::vector<uint64_t> keys;
    std::vector<float> weights, factors;
    std::vector<uint8_t> records;  // instead of floats
  };
  std::vector<Full> full;  // by ascending width
  std::vector<uint64_t> brief_keys, deleted;
  std::vector<float> brief_weights;
  std::vector<uint8_t> brief_records;
};

// Merges layers: keeps the newest state of every key whose hash is in [low, high]. Deleted keys are kept only if
// `keep_deleted` is set, which is needed while older layers remain below. With `records`, all rows must have the same
// small format, and their records are copied.
MergedRows merge(const Layers& layers, uint64_t low, uint64_t high, bool keep_deleted, bool records = false);

}  // namespace clickfleet
