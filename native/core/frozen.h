// Rows that never change, read where they lie: a published file mapped into memory, or a copy of it. Rows ascend by
// mix64(key), so the leading bits of the hash name a short range of them; no other index is needed.
#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

namespace clickfleet {

// A contiguous part of a row set; all parts but the last hold kSegmentRows rows.
struct Segment {
  const uint64_t* keys = nullptr;
  const float* weights = nullptr;  // null: keys alone (deleted ones)
  const float* factors = nullptr;  // [rows, factors], null: short rows
  size_t rows = 0;
};

inline constexpr int kSegmentBits = 20;
inline constexpr size_t kSegmentRows = size_t{1} << kSegmentBits;

// Rows of one kind. Building it is one pass over the keys, which also proves their order.
class FrozenSet {
 public:
  FrozenSet() = default;
  explicit FrozenSet(std::vector<Segment> segments);  // throws std::invalid_argument where the order is wrong

  size_t size() const { return size_; }
  uint64_t key(size_t row) const { return segments_[row >> kSegmentBits].keys[row & (kSegmentRows - 1)]; }
  const uint64_t* key_at(size_t row) const { return segments_[row >> kSegmentBits].keys + (row & (kSegmentRows - 1)); }
  const float* weight_at(size_t row) const {
    return segments_[row >> kSegmentBits].weights + (row & (kSegmentRows - 1));
  }
  const float* factors_at(size_t row, size_t factors) const {
    return segments_[row >> kSegmentBits].factors + (row & (kSegmentRows - 1)) * factors;
  }
  bool has_weights() const { return size_ != 0 && segments_[0].weights != nullptr; }
  bool has_factors() const { return size_ != 0 && segments_[0].factors != nullptr; }

  const uint32_t* start_of(uint64_t hash) const { return starts_.data() + (hash >> shift_); }
  // The row of a key, or kNone.
  size_t find(uint64_t hash, uint64_t key) const {
    const uint32_t* start = start_of(hash);
    for (size_t row = start[0]; row < start[1]; ++row)
      if (this->key(row) == key) return row;
    return kNone;
  }
  size_t lower_bound(uint64_t hash) const;   // the first row whose hash is not below
  bool meets(const FrozenSet& other) const;  // whether a key stands in both
  static constexpr size_t kNone = std::numeric_limits<size_t>::max();

 private:
  std::vector<Segment> segments_;
  std::vector<uint32_t> starts_ = {0, 0};
  size_t size_ = 0;
  int shift_ = 63;
};

// One published entry, or several merged: rows it sets and keys it deletes.
struct FrozenLayer {
  FrozenSet full, brief, deleted;
  void check() const;  // throws std::invalid_argument where a key stands twice
};

using Layers = std::vector<std::shared_ptr<const FrozenLayer>>;  // newest first

// The rows of a model at one sequence.
class FrozenRows {
 public:
  FrozenRows(Layers layers, size_t factors) : layers_(std::move(layers)), factors_(factors) {}
  size_t factors() const { return factors_; }
  const Layers& layers() const { return layers_; }

  // out[i, :] = embed_w, embedx of keys[i]; a short row has zeros for embedx, an unknown or deleted one is all zeros.
  void read(const uint64_t* keys, size_t n, float* out) const;
  // out[i] = 1 where some layer sets keys[i] and none above deletes it.
  void known(const uint64_t* keys, size_t n, uint8_t* out) const;

 private:
  template <class Found>
  void each_found(const uint64_t* keys, size_t n, const Found& found) const;
  Layers layers_;
  size_t factors_;
};

// What a merge of layers yields, each kind ascending by hash.
struct Merged {
  std::vector<uint64_t> full_keys, brief_keys, deleted;
  std::vector<float> full_weights, full_factors, brief_weights;
};

// The newest word on every key whose hash is in [low, high]; deleted keys are kept only where older layers remain
// below.
Merged merge(const Layers& layers, size_t factors, uint64_t low, uint64_t high, bool keep_deleted);

}  // namespace clickfleet
