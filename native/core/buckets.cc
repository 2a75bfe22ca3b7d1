#include "buckets.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace clickfleet {
namespace {

constexpr double kEpsilon = 0x1p-23;  // no loss is infinite: probabilities stay this far away from 0
constexpr size_t kLanes = 8;
constexpr std::array<float, kLanes> kOnes = {1, 1, 1, 1, 1, 1, 1, 1};
struct Lanes {
  explicit Lanes(double value = 0.0) { sum.fill(value); }
  double total() const { return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7])); }
  std::array<double, kLanes> sum;
};

}  // namespace

// Eight rows at a time, in lanes of sums that do not wait for each other; no branch on the label, which nobody can
// predict. The order of the additions is fixed, so every CPU gives the same sums.
void Buckets::update(const Rows& rows) {
  Lanes rows_, weight, clicks, predicted, absolute, squared, correct;
  const size_t whole = rows.size - rows.size % kLanes;
  // the usual weights take the fast way of the loss too
  const bool plain =
      !rows.weights || std::all_of(rows.weights, rows.weights + rows.size, [](float w) { return w == 1.0f; });
  double loss = 0;
  for (size_t i = 0; i < whole;) {
    Lanes product(1.0);  // of 16 rows each: a product above 1e-111, so one logarithm is enough
    for (const size_t end = std::min(i + 16 * kLanes, whole); i < end; i += kLanes) {
      std::array<int32_t, kLanes> bucket;
      std::array<double, kLanes> w, happened;
      const float *scores = rows.scores + i, *labels = rows.labels + i,
                  *weights = rows.weights ? rows.weights + i : kOnes.data();
      for (size_t j = 0; j < kLanes; ++j) {
        const float score = scores[j], positive = score > 0.0f ? score : 0.0f;  // NaN becomes 0
        const double valid = (score >= 0.0f) & (score <= 1.0f), p = positive < 1.0f ? positive : 1.0f;
        const int click = labels[j] > 0.0f;
        const double y = click, error = std::fabs(y - p), chance = 1.0 - error > kEpsilon ? 1.0 - error : kEpsilon;
        w[j] = valid * weights[j];
        bucket[j] = static_cast<int32_t>(p * thresholds_) + (1 - click) * (thresholds_ + 1);
        happened[j] = valid * chance + (1.0 - valid);
        rows_.sum[j] += valid;
        weight.sum[j] += w[j];
        clicks.sum[j] += w[j] * y;
        predicted.sum[j] += w[j] * p;
        absolute.sum[j] += w[j] * error;
        squared.sum[j] += w[j] * error * error;
        correct.sum[j] += w[j] * ((p >= 0.5) == click);
      }
      for (size_t j = 0; j < kLanes; ++j) counts_[static_cast<size_t>(bucket[j])] += w[j];
      if (!plain)
        for (size_t j = 0; j < kLanes; ++j) loss -= w[j] * std::log(static_cast<float>(happened[j]));
      else
        for (size_t j = 0; j < kLanes; ++j) product.sum[j] *= happened[j];
    }
    if (plain)
      for (const double chance : product.sum) loss -= std::log(chance);
  }
  totals.rows += rows_.total();
  totals.invalid += static_cast<double>(whole) - rows_.total();
  totals.weight += weight.total();
  totals.clicks += clicks.total();
  totals.predicted += predicted.total();
  totals.absolute += absolute.total();
  totals.squared += squared.total();
  totals.correct += correct.total();
  totals.loss += loss;
  for (size_t i = whole; i < rows.size; ++i) add(rows.scores[i], rows.labels[i], rows.weights ? rows.weights[i] : 1.0f);
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

double Buckets::bucket_error() const {
  constexpr double kSpan = 0.01, kMaxError = 0.05;
  double start = -1, shown = 0, expected = 0, clicked = 0, error = 0, counted = 0;
  for (size_t i = 0; i < buckets(); ++i) {
    const double ctr = static_cast<double>(i) / static_cast<double>(buckets());
    if (std::fabs(ctr - start) > kSpan) start = ctr, shown = expected = clicked = 0;
    shown += clicks(i) + others(i);
    expected += ctr * (clicks(i) + others(i));
    clicked += clicks(i);
    if (shown <= 0 || expected <= 0) continue;
    const double mean = expected / shown;
    if (std::sqrt((1 - mean) / (mean * shown)) >= kMaxError) continue;
    error += std::fabs(clicked / shown / mean - 1) * shown;
    counted += shown;
    start = -1;
  }
  return counted > 0 ? error / counted : 0.0;
}

void Slices::update(const Rows& rows) {
  for (size_t i = 0; i < rows.size; ++i) {
    find(rows.ids[i]).add(rows.scores[i], rows.labels[i], rows.weights ? rows.weights[i] : 1.0f);
  }
}

}  // namespace clickfleet
