// Pools rows into slots, and the gradient of pooling. Training, batch scoring and the server share this code.
#pragma once
#include <cstddef>
#include <cstdint>

namespace clickfleet {

// The keys of a batch. Row b has the keys [offsets[b·S + s], offsets[b·S + s + 1]) in slot s; key i refers to row
// `where[i]` of the pulled rows.
struct Ragged {
  size_t batch = 0, slots = 0;
  const int64_t* offsets = nullptr;
  const uint32_t* where = nullptr;
  const float* values = nullptr;  // factor of each key's row before pooling; nullptr: 1
  const uint8_t* mean = nullptr;  // [slots]: whether to divide the sum by the number of keys; nullptr: for no slot
};

// first[b, s] and factors[b, s, :] = Σ value · rows[where, 0] and rows[where, 1:]; zeros if there is no key.
void pool(const Ragged& keys, const float* rows, int factors, float* first, float* factors_out);

// The gradient of `pool`: grads[u, :] += Σ value · d(first, factors). Adds to the contents of `grads`.
void unpool(const Ragged& keys, const float* d_first, const float* d_factors, int factors, float* grads);

// The statistics of a push: shows[u] += Σ show[b], clicks[u] += Σ click[b], slot[u] = the slot of one occurrence.
void count(const Ragged& keys, const float* show, const float* click, float* shows, float* clicks, uint16_t* slot);

}  // namespace clickfleet
