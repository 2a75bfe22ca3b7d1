// Rows -> pooled slots and back. The same code serves training, batch scoring and the server.
#pragma once
#include <cstddef>
#include <cstdint>

namespace clickfleet {

// The keys of a batch: those of row b and slot s are [offsets[b·S + s], offsets[b·S + s + 1]); key i is row `where[i]`
// of the pulled ones.
struct Ragged {
  size_t batch = 0, slots = 0;
  const int64_t* offsets = nullptr;
  const uint32_t* where = nullptr;
  const float* values = nullptr;  // multiply a row before pooling; nullptr: 1
  const uint8_t* mean = nullptr;  // [slots]: divide the sum by the number of keys; nullptr: no slot does
};

// first[b, s] and factors[b, s, :] = Σ value · rows[where, 0] and rows[where, 1:]; no key: zeros.
void pool(const Ragged& keys, const float* rows, int factors, float* first, float* factors_out);

// The gradient of `pool`: grads[u, :] += Σ value · d(first, factors). `grads` starts from what the caller put there.
void unpool(const Ragged& keys, const float* d_first, const float* d_factors, int factors, float* grads);

// Statistics of a push: shows[u] += Σ show[b], clicks[u] += Σ click[b], slot[u] = the slot of one occurrence.
void count(const Ragged& keys, const float* show, const float* click, float* shows, float* clicks, uint16_t* slot);

}  // namespace clickfleet
