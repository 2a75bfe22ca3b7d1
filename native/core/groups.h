// GAUC: the AUC within each group (a user, a session), averaged by the group's weight. It is exact while the rows fit.
// Beyond `limit` rows it keeps only groups with a small mixed key: an unbiased sample that is the same on every worker,
// so states can be merged.
#pragma once
#include <cstdint>
#include <vector>

#include "buckets.h"

namespace clickfleet {

class Groups {
 public:
  struct Row {
    uint64_t group;
    float score;
    float weight;  // negative for rows without a click
  };

  explicit Groups(size_t limit) : limit_(limit) {}

  void update(const Rows& rows);
  void merge(const Groups& other) { append(other.rows_, other.level_); }

  void append(const std::vector<Row>& rows, unsigned level);
  double gauc();  // over groups with both classes; 0.5 if there is no such group

  const std::vector<Row>& rows() const { return rows_; }
  unsigned level() const { return level_; }
  void reset() { rows_.clear(), level_ = 0; }

 private:
  // Keeps one in 4 billion groups. If the rows still exceed the limit, a single group is too large.
  static constexpr unsigned kMaxLevel = 32;

  bool kept(uint64_t group) const;
  void set_level(unsigned level);
  void shrink();

  size_t limit_;
  unsigned level_ = 0;
  std::vector<Row> rows_;
};

}  // namespace clickfleet
