// The inner loop of skip-gram with negative sampling (Mikolov et al. 2013): one centre word against its neighbours,
// each with a few noise words. The score of a pair is u·v + β, where u are the factors of the input row, and v and β
// are the factors and the bias of the output row.
//
// Each pair starts from the rows as the previous pair left them. Rows are updated in place; if other threads do the
// same, a one-byte lock per row protects them. For rules other than gradient descent, the gradients are summed
// elsewhere and the rows stay unchanged.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>

#include "lanes.h"
#include "layout.h"

namespace clickfleet {

// Linear interpolation between 513 values over [-8, 8]; constant outside, so that no pair is ever skipped.
struct Sigmoid {
  Sigmoid();
  float operator()(float x) const {
    const float at = ((x > -8.0F ? x : -8.0F) < 8.0F ? (x > -8.0F ? x : -8.0F) + 8.0F : 16.0F) * 32.0F;
    const auto i = static_cast<int>(at);
    return values[i] + (at - static_cast<float>(i)) * (values[i + 1] - values[i]);
  }
  float values[514];
};

// One centre word and all its pairs.
struct Window {
  float* centre;           // its row: [1 + dim]; input rows do not use the first float
  float* centre_gradient;  // the gradient to add to; nullptr: update the row
  float* const* targets;   // rows of its neighbours, each followed by `group - 1` noise words; nullptr: no word
  float* const* target_gradients;
  uint32_t size, group;
  float* logits;  // [size], one per pair; 0 if there is no target
};

struct StepSettings {
  int dim;
  float lr;
  Bounds bounds, bias_bounds;
  bool bias;                  // whether output words use and train a bias
  bool shared;                // other threads update rows at the same time
  float *start, *here, *sum;  // [dim] scratch
  const Sigmoid* sigmoid;
};

// Locks a row while it is read and updated. A thread holds one such lock at a time, so there are no deadlocks.
struct RowLock {
  RowLock(float* weights, bool shared)
      : lock_(shared ? reinterpret_cast<uint8_t*>(weights) - (Row::kWeights - Row::kLock) : nullptr) {
    if (lock_ == nullptr) return;
    for (int tries = 0; std::atomic_ref(*lock_).exchange(1, std::memory_order_acquire) != 0; ++tries)
      if (tries % 32 == 31) std::this_thread::yield();  // the holder may have been descheduled
  }
  ~RowLock() {
    if (lock_ != nullptr) std::atomic_ref(*lock_).store(0, std::memory_order_release);
  }
  RowLock(const RowLock&) = delete;
  RowLock& operator=(const RowLock&) = delete;

 private:
  uint8_t* lock_;
};

CLICKFLEET_INLINE float within(float x, Bounds bounds) {
  const float above = x > bounds.lower ? x : bounds.lower;  // false for NaN
  return above < bounds.upper ? above : bounds.upper;
}

CLICKFLEET_INLINE void copy(const float* from, float* to, int n) {
  by_lanes(n, [&]<class L>(int i, L) { L::load(from + i).store(to + i); });
}

// Updates the row of one target and adds to the summed updates of the centre.
CLICKFLEET_INLINE void move_target(float* row, float g, float* sum, const StepSettings& m) {
  by_lanes(m.dim, [&]<class L>(int i, L) {
    const L v = L::load(row + 1 + i), step = L::all(g);
    (L::load(sum + i) + step * v).store(sum + i);
    (v + step * L::load(m.here + i)).within(m.bounds).store(row + 1 + i);
  });
  if (m.bias) row[0] = within(row[0] + g, m.bias_bounds);
}

CLICKFLEET_INLINE void sum_target(const float* row, float* gradient, float error, float* sum, const StepSettings& m) {
  by_lanes(m.dim, [&]<class L>(int i, L) {
    const L e = L::all(error);
    (L::load(sum + i) - e * L::load(row + 1 + i)).store(sum + i);
    (L::load(gradient + 1 + i) - e * L::load(m.here + i)).store(gradient + 1 + i);
  });
  if (m.bias) gradient[0] -= error;
}

template <bool Moves>
CLICKFLEET_INLINE void train_window(const Window& w, const StepSettings& m) {
  float *const here = m.here, *const sum = m.sum;
  const int n = m.dim;
  {
    const RowLock lock(w.centre, Moves && m.shared);
    copy(w.centre + 1, here, n);
  }
  if (Moves && m.shared) copy(here, m.start, n);
  for (uint32_t first = 0; first < w.size; first += w.group) {
    by_lanes(n, [&]<class L>(int i, L) { L::all(0).store(sum + i); });
    for (uint32_t t = first; t < first + w.group; ++t) {
      float* const row = w.targets[t];
      w.logits[t] = 0;
      if (row == nullptr) continue;
      const RowLock lock(row, Moves && m.shared);
      const float logit = dot(here, row + 1, n) + (m.bias ? row[0] : 0.0F);
      const float error = (t == first ? 1.0F : 0.0F) - (*m.sigmoid)(logit);
      w.logits[t] = logit;
      if constexpr (Moves)
        move_target(row, m.lr * error, sum, m);
      else
        sum_target(row, w.target_gradients[t], error, sum, m);
    }
    float* const to = Moves ? here : w.centre_gradient + 1;
    by_lanes(n, [&]<class L>(int i, L) { (L::load(to + i) + L::load(sum + i)).store(to + i); });
  }
  if constexpr (Moves) {
    const RowLock lock(w.centre, m.shared);
    float* const u = w.centre + 1;
    by_lanes(n, [&]<class L>(int i, L) {
      const L now = L::load(here + i);  // updates made by other threads in the meantime are kept
      (m.shared ? L::load(u + i) + (now - L::load(m.start + i)) : now).within(m.bounds).store(u + i);
    });
  }
}

}  // namespace clickfleet
