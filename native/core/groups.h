// GAUC: the AUC inside each group (a user, a session), averaged by the group's weight. Exact while the rows fit; past
// `limit` it keeps the groups whose mixed key is small, a fair sample that every worker draws alike, so states merge.
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
    float weight;  // negative without a click
  };

  explicit Groups(size_t limit) : limit_(limit) {}

  void update(const Rows& rows);
  void merge(const Groups& other) { append(other.rows_, other.level_); }

  void append(const std::vector<Row>& rows, unsigned level);
  double gauc();  // over groups with both classes; 0.5 while there is none

  const std::vector<Row>& rows() const { return rows_; }
  unsigned level() const { return level_; }
  void reset() { rows_.clear(), level_ = 0; }

 private:
  static constexpr unsigned kMaxLevel = 32;  // one of 4 billion groups: below that a single group outgrows the limit

  bool kept(uint64_t group) const;
  void set_level(unsigned level);
  void shrink();

  size_t limit_;
  unsigned level_ = 0;
  std::vector<Row> rows_;
};

}  // namespace clickfleet
