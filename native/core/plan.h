// The keys of a call sorted by stripe. Within a stripe they keep the caller's order.
#pragma once
#include <vector>

#include "stripe.h"

namespace clickfleet {

struct Plan {
  std::vector<uint64_t> hash;   // sorted by stripe
  std::vector<uint32_t> where;  // position in the caller's array
  uint32_t begin[kStripes], end[kStripes];

  void make(const uint64_t* keys, size_t n) {
    unsorted_.resize(n);
    hash.resize(n);
    where.resize(n);
    uint32_t count[kStripes] = {};
    for (size_t i = 0; i < n; ++i) {
      unsorted_[i] = mix64(keys[i]);
      ++count[stripe_of(unsorted_[i])];
    }
    uint32_t at = 0;
    for (int s = 0; s < kStripes; ++s) {
      begin[s] = end[s] = at;
      at += count[s];
    }
    for (size_t i = 0; i < n; ++i) {
      const uint64_t h = unsorted_[i];
      const uint32_t to = end[stripe_of(h)]++;
      hash[to] = h;
      where[to] = static_cast<uint32_t>(i);
    }
  }

  // Calls visit(s) for every stripe that has keys, once lock(s, wait) returns true. Busy stripes come last, so that
  // threads do not queue behind each other.
  template <class Lock, class Visit>
  void each_stripe(const Lock& lock, const Visit& visit) const {
    int left[kStripes], n = 0;
    for (int s = 0; s < kStripes; ++s)
      if (begin[s] != end[s]) left[n++] = s;
    while (n > 0) {
      int busy = 0;
      for (int i = 0; i < n; ++i) {
        const bool wait = busy == n - 1;  // all other stripes are busy too
        if (lock(left[i], wait))
          visit(left[i]);
        else
          left[busy++] = left[i];
      }
      n = busy;
    }
  }

 private:
  std::vector<uint64_t> unsorted_;
};

}  // namespace clickfleet
