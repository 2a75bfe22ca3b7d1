// Immutable rows, read in place from a published file mapped into memory or from a copy of it. Rows ascend by
// mix64(key), so the leading bits of the hash select a short range of rows; no other index is needed.
#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

namespace clickfleet {

// A contiguous part of a row set. All parts except the last hold kSegmentRows rows.
struct Segment {
  const uint64_t* keys = nullptr;
  const float* weights = nullptr;  // nullptr: keys only (deleted keys)
  const float* factors = nullptr;  // [rows, factors]; nullptr: short rows
  size_t rows = 0;
};

inline constexpr int kSegmentBits = 20;
inline constexpr size_t kSegmentRows = size_t{1} << kSegmentBits;

// Rows of one kind. The constructor makes one pass over the keys, which also verifies their order.
class FrozenSet {
 public:
  FrozenSet() = default;
  explicit FrozenSet(std::vector<Segment> segments);  // throws std::invalid_argument if the order is wrong

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
  std::vector<Segment> segments_;
  std::vector<uint32_t> starts_ = {0, 0};
  size_t size_ = 0;
  int shift_ = 63;
};

// One published entry, or several merged entries: the rows it sets and the keys it deletes.
struct FrozenLayer {
  FrozenSet full, brief, deleted;
  void check() const;  // throws std::invalid_argument if a key occurs twice
};

using Layers = std::vector<std::shared_ptr<const FrozenLayer>>;  // newest first

// The rows of a model at one sequence number.
class FrozenRows {
 public:
  FrozenRows(Layers layers, size_t factors) : layers_(std::move(layers)), factors_(factors) {}
  size_t factors() const { return factors_; }
  const Layers& layers() const { return layers_; }

  // out[i, :] = embed_w and embedx of keys[i]. A short row has zeros for embedx; unknown and deleted keys have only
  // zeros.
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
  std::vector<uint64_t> full_keys, brief_keys, deleted;
  std::vector<float> full_weights, full_factors, brief_weights;
};

// Merges layers: keeps the newest state of every key whose hash is in [low, high]. Deleted keys are kept only if
// `keep_deleted` is set, which is needed while older layers remain below.
MergedRows merge(const Layers& layers, size_t factors, uint64_t low, uint64_t high, bool keep_deleted);

}  // namespace clickfleet
