#include "pool.h"

namespace clickfleet {
namespace {

// Calls visit(b, s, cell, i, weight) for every key i of every cell. The weight is the key's value, divided by the
// number of keys if the slot takes the mean.
template <class Visit>
void each_key(const Ragged& keys, const Visit& visit) {
  size_t cell = 0;
  for (size_t b = 0; b < keys.batch; ++b)
    for (size_t s = 0; s < keys.slots; ++s, ++cell) {
      const int64_t begin = keys.offsets[cell], end = keys.offsets[cell + 1];
      const float share =
          keys.mean != nullptr && keys.mean[s] != 0 && end > begin ? 1.0F / static_cast<float>(end - begin) : 1.0F;
      for (int64_t i = begin; i < end; ++i)
        visit(b, s, cell, i, keys.values == nullptr ? share : share * keys.values[i]);
    }
}

}  // namespace

void pool(const Ragged& keys, const float* rows, int factors, float* first, float* factors_out) {
  const auto d = static_cast<size_t>(factors);
  for (size_t i = 0; i < keys.batch * keys.slots; ++i) first[i] = 0;
  for (size_t i = 0; i < keys.batch * keys.slots * d; ++i) factors_out[i] = 0;
  each_key(keys, [&](size_t, size_t, size_t cell, int64_t i, float weight) {
    const float* row = rows + keys.where[i] * (d + 1);
    float* out = factors_out + cell * d;
    first[cell] += weight * row[0];
    for (size_t k = 0; k < d; ++k) out[k] += weight * row[1 + k];
  });
}

void unpool(const Ragged& keys, const float* d_first, const float* d_factors, int factors, float* grads) {
  const auto d = static_cast<size_t>(factors);
  each_key(keys, [&](size_t, size_t, size_t cell, int64_t i, float weight) {
    float* grad = grads + keys.where[i] * (d + 1);
    const float* in = d_factors + cell * d;
    if (d_first != nullptr) grad[0] += weight * d_first[cell];
    for (size_t k = 0; k < d; ++k) grad[1 + k] += weight * in[k];
  });
}

void count(const Ragged& keys, const float* show, const float* click, float* shows, float* clicks, uint16_t* slot) {
  each_key(keys, [&](size_t b, size_t s, size_t, int64_t i, float) {
    const uint32_t u = keys.where[i];
    shows[u] += show == nullptr ? 1.0F : show[b];
    clicks[u] += click == nullptr ? 0.0F : click[b];
    slot[u] = static_cast<uint16_t>(s);
  });
}

}  // namespace clickfleet
