// Streaming metrics: sums over rows, and counts per score bucket. All of them merge by addition.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace clickfleet {

struct Rows {  // a batch: `weights` and `ids` may be null
  const float* scores;
  const float* labels;
  const float* weights;
  const uint64_t* ids;
  size_t size;
};

struct Totals {
  double rows = 0, invalid = 0;  // invalid: scores outside [0, 1] or NaN; such rows count nowhere else
  double weight = 0, clicks = 0, predicted = 0, absolute = 0, squared = 0, correct = 0, loss = 0;
  static constexpr int kCount = 9;
  double* begin() { return &rows; }
  const double* begin() const { return &rows; }
};
static_assert(sizeof(Totals) == Totals::kCount * sizeof(double));

struct CalibrationGroups {  // sums over the groups of buckets that hold enough impressions
  double error = 0, shown = 0, expected = 0, clicked = 0;
};

// A row with score p belongs to bucket floor(p * thresholds), so there are thresholds + 1 buckets. A label above 0
// counts as a click.
class Buckets {
 public:
  explicit Buckets(int thresholds) : thresholds_(thresholds), counts_(2 * (static_cast<size_t>(thresholds) + 1)) {}

  void update(const Rows& rows);
  void add(float score, float label, float weight);

  void merge(const Buckets& other) {
    for (size_t i = 0; i < counts_.size(); ++i) counts_[i] += other.counts_[i];
    for (int i = 0; i < Totals::kCount; ++i) totals.begin()[i] += other.totals.begin()[i];
  }

  void reset() { *this = Buckets(thresholds_); }

  double auc() const;  // trapezoids from the highest score down; 0.5 if a class has no rows

  // Sums the relative errors of the predicted CTR, weighted by impressions, over groups of adjacent buckets. A group
  // spans at most 0.01 of the score range. It counts once it holds enough impressions for a relative standard error
  // below 5%.
  CalibrationGroups calibration_groups() const;

  int thresholds() const { return thresholds_; }
  size_t buckets() const { return counts_.size() / 2; }
  double clicks(size_t bucket) const { return counts_[bucket]; }
  double others(size_t bucket) const { return counts_[buckets() + bucket]; }

  // The state as an array of numbers: totals, clicks per bucket, non-clicks per bucket.
  size_t size() const { return Totals::kCount + counts_.size(); }
  void write(double* out) const {
    out = std::copy_n(totals.begin(), Totals::kCount, out);
    std::copy(counts_.begin(), counts_.end(), out);
  }
  void read(const double* in) {
    std::copy_n(in, Totals::kCount, totals.begin());
    std::copy_n(in + Totals::kCount, counts_.size(), counts_.begin());
  }

  Totals totals;

 private:
  int thresholds_;
  std::vector<double> counts_;  // clicks of every bucket, then non-clicks of every bucket
};

// The buckets of each of the last `size` batches. They are summed on request, so that weights leave no rounding errors
// behind.
class Window {
 public:
  Window(int thresholds, int size) : ring_(static_cast<size_t>(size), Buckets(thresholds)) {}

  void update(const Rows& rows) {
    ring_[next_].reset();
    ring_[next_].update(rows);
    next_ = (next_ + 1) % ring_.size();
  }

  Buckets sum() const {
    Buckets all(ring_[0].thresholds());
    for (const auto& buckets : ring_) all.merge(buckets);
    return all;
  }

  std::vector<Buckets>& ring() { return ring_; }
  size_t next() const { return next_; }
  void set_next(size_t next) { next_ = next % ring_.size(); }

 private:
  std::vector<Buckets> ring_;
  size_t next_ = 0;
};

// One set of buckets per id, for at most `limit` ids. The rows of all later ids are summed in `rest`.
class Slices {
 public:
  Slices(int thresholds, size_t limit) : rest(thresholds), limit_(limit) {}

  void update(const Rows& rows);

  Buckets& find(uint64_t id) {
    if (const auto it = index_.find(id); it != index_.end()) return slices_[it->second];
    if (slices_.size() >= limit_) return rest;
    index_.emplace(id, slices_.size());
    ids_.push_back(id);
    return slices_.emplace_back(rest.thresholds());
  }

  void merge(const Slices& other) {
    for (size_t i = 0; i < other.ids_.size(); ++i) find(other.ids_[i]).merge(other.slices_[i]);
    rest.merge(other.rest);
  }

  const std::vector<uint64_t>& ids() const { return ids_; }
  size_t limit() const { return limit_; }
  Buckets rest;

 private:
  size_t limit_;
  std::unordered_map<uint64_t, size_t> index_;
  std::vector<uint64_t> ids_;
  std::vector<Buckets> slices_;
};

}  // namespace clickfleet
