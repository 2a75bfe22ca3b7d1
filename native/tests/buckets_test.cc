#include "buckets.h"

#include <cmath>
#include <limits>
#include <random>
#include <thread>

#include "check.h"
#include "groups.h"

namespace clickfleet {
namespace {

struct Sample {
  std::vector<float> scores, labels, weights;
  std::vector<uint64_t> ids;
  Rows rows(size_t from, size_t size, bool weighted = false) const {
    return {scores.data() + from, labels.data() + from, weighted ? weights.data() + from : nullptr, ids.data() + from,
            size};
  }
};

Sample sample(size_t n) {
  std::mt19937 random(3);
  std::uniform_real_distribution<float> uniform(0, 1);
  Sample s;
  for (size_t i = 0; i < n; ++i) {
    s.scores.push_back(std::floor(uniform(random) * 64) / 64);
    s.labels.push_back(uniform(random) < s.scores.back() ? 1.0F : 0.0F);
    s.weights.push_back(std::floor(uniform(random) * 3));
    s.ids.push_back(random() % 50);
  }
  return s;
}

bool near(double a, double b) { return std::fabs(a - b) <= 1e-6 * std::max(1.0, std::fabs(b)); }

bool equal(const Buckets& a, const Buckets& b) {
  std::vector<double> x(a.size()), y(b.size());
  a.write(x.data());
  b.write(y.data());
  for (size_t i = 0; i < x.size(); ++i)
    if (!near(x[i], y[i])) return false;
  return true;
}

TEST(auc_of_buckets_is_the_share_of_pairs_in_order) {
  const Sample s = sample(300);
  Buckets buckets(64);
  buckets.update(s.rows(0, 300));
  double pairs = 0, right = 0;
  for (size_t i = 0; i < 300; ++i)
    for (size_t j = 0; j < 300; ++j)
      if (s.labels[i] > s.labels[j]) {
        pairs += 1;
        right += s.scores[i] > s.scores[j] ? 1.0 : s.scores[i] == s.scores[j] ? 0.5 : 0.0;
      }
  CHECK(near(buckets.auc(), right / pairs));
}

TEST(rows_by_eights_and_one_by_one_give_the_same) {
  const Sample s = sample(301);
  for (const bool weighted : {false, true}) {
    Buckets whole(100), single(100);
    whole.update(s.rows(0, 301, weighted));
    for (size_t i = 0; i < 301; ++i) single.update(s.rows(i, 1, weighted));
    CHECK(equal(whole, single));
  }
}

TEST(scores_that_are_no_probability_count_only_as_invalid) {
  Sample s = sample(16);
  s.scores[3] = std::numeric_limits<float>::quiet_NaN();
  s.scores[4] = -0.5F;
  s.scores[11] = std::numeric_limits<float>::infinity();
  Buckets buckets(64);
  buckets.update(s.rows(0, 16));
  CHECK(buckets.totals.invalid == 3);
  CHECK(buckets.totals.rows == 13);
  double counted = 0;
  for (size_t i = 0; i < buckets.buckets(); ++i) counted += buckets.clicks(i) + buckets.others(i);
  CHECK(counted == 13);
  CHECK(std::isfinite(buckets.totals.loss));
}

TEST(a_window_holds_the_last_batches) {
  const Sample s = sample(400);
  Window window(64, 2);
  Buckets last(64);
  for (size_t batch = 0; batch < 4; ++batch) window.update(s.rows(batch * 100, 100));
  last.update(s.rows(200, 200));
  CHECK(equal(window.sum(), last));
}

TEST(slices_hold_the_rows_of_their_ids_and_the_rest) {
  const Sample s = sample(500);
  Slices slices(64, 10);
  slices.update(s.rows(0, 500));
  CHECK(slices.ids().size() == 10);
  Buckets all = slices.rest, whole(64);
  for (const uint64_t id : slices.ids()) all.merge(slices.find(id));
  whole.update(s.rows(0, 500));
  CHECK(equal(all, whole));
}

TEST(groups_merged_from_parts_have_the_same_gauc_and_keep_the_limit) {
  const Sample s = sample(2000);
  for (const size_t limit : {size_t{10000}, size_t{700}}) {
    Groups whole(limit), left(limit), right(limit);
    whole.update(s.rows(0, 2000));
    left.update(s.rows(0, 900));
    right.update(s.rows(900, 1100));
    left.merge(right);
    CHECK(left.rows().size() <= limit);
    CHECK(left.rows().size() == whole.rows().size());
    CHECK(near(left.gauc(), whole.gauc()));
  }
  Groups broken(10);
  broken.append({}, 1000);  // a level that no valid file contains
  broken.update(s.rows(0, 20));
}

}  // namespace
}  // namespace clickfleet
