// The settings of a table.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "init.h"
#include "kernels.h"

namespace clickfleet {

struct Part {  // one part of a row: embed_w or embedx
  Rule rule = Adagrad{};
  Scale scale = Scale::show;
  Bounds bounds;
  Init init;

  // Initial weights of columns [first, first + n).
  void weights(uint64_t seed, uint64_t key, uint32_t first, int n, float* w) const {
    init.fill(seed, key, first, n, w);
    for (int i = 0; i < n; ++i) w[i] = std::clamp(w[i], bounds.lower, bounds.upper);
  }
};

// When a row gets its factors (embedx).
struct Admission {
  enum By : uint8_t { birth, score, count, probability };
  By by = birth;
  double threshold = 0;  // score: the row's score; count: its shows; probability: the chance per show
};

// How rows are scored, aged, evicted and published.
struct Policy {
  double nonclick_coeff = 0.1, click_coeff = 1.0;
  double base_threshold = 0, delta_threshold = 0;
  double delta_keep_days = std::numeric_limits<double>::infinity();
  double decay_rate = 1;
  double delete_threshold = 0;
  double delete_after_unseen_days = std::numeric_limits<double>::infinity();

  double score(double show, double click) const { return (show - click) * nonclick_coeff + click * click_coeff; }
};

// What rows of some slots have of their own.
struct RowClass {
  int factors = 0;
  Part embed, embedx;
  Admission admission;
};

struct Config : RowClass {          // the base is class 0: rows of all slots that no other class names, or of no slot
  std::vector<RowClass> others;     // classes 1, 2, …
  std::vector<uint8_t> slot_class;  // by slot; slots beyond the end have class 0
  uint64_t seed = 0;
  Policy policy;
  std::optional<uint64_t> padding;  // pulls of this key return zeros, and it is never trained
  size_t memory_limit = 0;          // 0: no limit
  size_t snapshot_reserve = 0;      // bytes reserved for the undo log of a snapshot
  std::string disk;                 // directory for rows beyond the memory limit; empty: they are evicted
  size_t disk_limit = 0;            // bytes of its files; 0: no limit
  bool disk_ring = true;            // read through io_uring where it is allowed
};

}  // namespace clickfleet
