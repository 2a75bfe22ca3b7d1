#include "buckets.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace clickfleet {
namespace {

constexpr double kEpsilon = 0x1p-23;  // probabilities stay this far from 0, so that no loss is infinite
constexpr size_t kLanes = 8, kBlock = 16 * kLanes;

// Independent partial sums, added in a fixed order: the same result on every CPU.
struct Lanes {
  explicit Lanes(double value = 0.0) { sum.fill(value); }
  double total() const { return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7])); }
  std::array<double, kLanes> sum;
};

// A block of preprocessed rows. An invalid row has weight 0 and chance 1.
struct Block {
  std::array<double, kBlock> weight, p, y, chance, valid;
  std::array<int32_t, kBlock> bucket;
};

// The label is unpredictable, so there is no branch on it, and the compiler can vectorize the loop.
void preprocess(const float* scores, const float* labels, const float* weights, int thresholds, Block& block) {
  const double scale = thresholds;
  for (size_t i = 0; i < kBlock; ++i) {
    const double score = scores[i], above = score >= 0.0 ? 1.0 : 0.0,
                 below = score <= 1.0 ? 1.0 : 0.0;  // NaN fails both
    const double valid = above * below, p = valid > 0.0 ? score : 0.0, y = labels[i] > 0.0F ? 1.0 : 0.0;
    const double chance = y > 0.0 ? p : 1.0 - p, bounded = chance > kEpsilon ? chance : kEpsilon;
    block.valid[i] = valid;
    block.weight[i] = valid > 0.0 ? static_cast<double>(weights[i]) : 0.0;
    block.p[i] = p;
    block.y[i] = y;
    block.chance[i] = valid > 0.0 ? bounded : 1.0;
    block.bucket[i] = static_cast<int32_t>(p * scale) + (y > 0.0 ? 0 : thresholds + 1);
  }
}

}  // namespace

void Buckets::update(const Rows& rows) {
  static constexpr auto ones = [] {
    std::array<float, kBlock> one{};
    one.fill(1.0F);
    return one;
  }();
  // If all weights are 1, the loss takes the fast path too.
  const bool plain =
      !rows.weights || std::all_of(rows.weights, rows.weights + rows.size, [](float w) { return w == 1.0F; });
  Lanes valid, weight, clicks, predicted, absolute, squared, correct;
  Block block;
  double loss = 0;
  const size_t whole = rows.size - rows.size % kBlock;
  for (size_t start = 0; start < whole; start += kBlock) {
    preprocess(rows.scores + start, rows.labels + start, rows.weights ? rows.weights + start : ones.data(), thresholds_,
               block);
    Lanes product(1.0);  // of 16 rows each: above 1e-111, so one logarithm is enough
    for (size_t i = 0; i < kBlock; i += kLanes)
      for (size_t j = 0; j < kLanes; ++j) {
        const double w = block.weight[i + j], p = block.p[i + j], y = block.y[i + j], error = std::fabs(y - p);
        valid.sum[j] += block.valid[i + j];
        weight.sum[j] += w;
        clicks.sum[j] += w * y;
        predicted.sum[j] += w * p;
        absolute.sum[j] += w * error;
        squared.sum[j] += w * error * error;
        correct.sum[j] += (p >= 0.5 ? y : 1.0 - y) * w;
        product.sum[j] *= block.chance[i + j];
      }
    for (size_t i = 0; i < kBlock; ++i) counts_[static_cast<size_t>(block.bucket[i])] += block.weight[i];
    if (plain)
      for (const double chance : product.sum) loss -= std::log(chance);
    else
      for (size_t i = 0; i < kBlock; ++i) loss -= block.weight[i] * std::log(static_cast<float>(block.chance[i]));
  }
  totals.rows += valid.total();
  totals.invalid += static_cast<double>(whole) - valid.total();
  totals.weight += weight.total();
  totals.clicks += clicks.total();
  totals.predicted += predicted.total();
  totals.absolute += absolute.total();
  totals.squared += squared.total();
  totals.correct += correct.total();
  totals.loss += loss;
  for (size_t i = whole; i < rows.size; ++i) add(rows.scores[i], rows.labels[i], rows.weights ? rows.weights[i] : 1.0F);
}

void Buckets::add(float score, float label, float weight) {
  if (!(score >= 0.0f && score <= 1.0f)) {
    totals.invalid += 1;
    return;
  }
  const double y = label > 0.0f ? 1.0 : 0.0, p = score, w = weight, error = std::fabs(y - p);
  counts_[static_cast<size_t>(p * thresholds_) + (y > 0 ? 0 : buckets())] += w;
  totals.rows += 1;
  totals.weight += w;
  totals.clicks += w * y;
  totals.predicted += w * p;
  totals.absolute += w * error;
  totals.squared += w * error * error;
  totals.correct += (p >= 0.5 ? 1.0 : 0.0) == y ? w : 0.0;
  totals.loss -= w * std::log(static_cast<float>(std::max(1.0 - error, kEpsilon)));
}

double Buckets::auc() const {
  double area = 0, pos = 0, neg = 0;
  for (size_t i = buckets(); i-- > 0;) {
    area += others(i) * (pos + pos + clicks(i)) / 2;
    pos += clicks(i);
    neg += others(i);
  }
  return pos > 0 && neg > 0 ? area / (pos * neg) : 0.5;
}

CalibrationGroups Buckets::calibration_groups() const {
  constexpr double kSpan = 0.01, kMaxError = 0.05;
  double start = -1, shown = 0, expected = 0, clicked = 0;
  CalibrationGroups groups;
  for (size_t i = 0; i < buckets(); ++i) {
    const double ctr = static_cast<double>(i) / static_cast<double>(buckets());
    if (std::fabs(ctr - start) > kSpan) start = ctr, shown = expected = clicked = 0;
    shown += clicks(i) + others(i);
    expected += ctr * (clicks(i) + others(i));
    clicked += clicks(i);
    if (shown <= 0 || expected <= 0) continue;
    const double mean = expected / shown;
    if (std::sqrt((1 - mean) / (mean * shown)) >= kMaxError) continue;
    groups.error += std::fabs(clicked / shown / mean - 1) * shown;
    groups.shown += shown;
    groups.expected += expected;
    groups.clicked += clicked;
    start = -1;
  }
  return groups;
}

void Slices::update(const Rows& rows) {
  for (size_t i = 0; i < rows.size; ++i) {
    find(rows.ids[i]).add(rows.scores[i], rows.labels[i], rows.weights ? rows.weights[i] : 1.0f);
  }
}

}  // namespace clickfleet
