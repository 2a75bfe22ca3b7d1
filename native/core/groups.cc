#include "groups.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "hash.h"

namespace clickfleet {

void Groups::update(const Rows& rows) {
  for (size_t i = 0; i < rows.size; ++i) {
    const float score = rows.scores[i], weight = rows.weights ? rows.weights[i] : 1.0f;
    if (score >= 0.0f && score <= 1.0f && weight > 0.0f && kept(rows.ids[i]))
      rows_.push_back({rows.ids[i], score, rows.labels[i] > 0.0f ? weight : -weight});
  }
  shrink();
}

void Groups::append(const std::vector<Row>& rows, unsigned level) {
  if (level > level_) set_level(std::min(level, kMaxLevel));
  for (const Row& row : rows)
    if (kept(row.group)) rows_.push_back(row);
  shrink();
}

double Groups::gauc() {
  std::sort(rows_.begin(), rows_.end(), [](const Row& a, const Row& b) {
    return std::tie(a.group, a.score, a.weight) < std::tie(b.group, b.score, b.weight);
  });
  double area = 0, weight = 0;
  for (size_t i = 0; i < rows_.size();) {
    double pairs = 0, pos = 0, neg = 0;
    const uint64_t group = rows_[i].group;
    while (i < rows_.size() && rows_[i].group == group) {
      const float score = rows_[i].score;
      double equal_pos = 0, equal_neg = 0;
      for (; i < rows_.size() && rows_[i].group == group && rows_[i].score == score; ++i)
        (rows_[i].weight > 0 ? equal_pos : equal_neg) += std::fabs(rows_[i].weight);
      pairs += equal_pos * (neg + equal_neg / 2);
      pos += equal_pos;
      neg += equal_neg;
    }
    if (pos > 0 && neg > 0) area += pairs / (pos * neg) * (pos + neg), weight += pos + neg;
  }
  return weight > 0 ? area / weight : 0.5;
}

bool Groups::kept(uint64_t group) const { return level_ == 0 || mix64(group) >> (64U - level_) == 0; }

void Groups::set_level(unsigned level) {
  level_ = level;
  std::erase_if(rows_, [this](const Row& row) { return !kept(row.group); });
}

void Groups::shrink() {
  while (rows_.size() > limit_ && level_ < kMaxLevel) set_level(level_ + 1);
}

}  // namespace clickfleet
