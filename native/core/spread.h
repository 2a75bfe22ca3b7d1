// Distributes keys and rows over the shards of a cluster, and gathers them again.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hash.h"

namespace clickfleet {

// Sorts keys by the shard that owns their virtual shard, and keeps their order within a shard. `sorted[i]` is
// keys[order[i]]; shard s has [starts[s], starts[s + 1]).
inline void split(const uint64_t* keys, size_t n, const uint16_t* owner, size_t shards, uint64_t* sorted,
                  uint32_t* order, int64_t* starts) {
  for (size_t s = 0; s <= shards; ++s) starts[s] = 0;
  for (size_t i = 0; i < n; ++i) ++starts[owner[mix64(keys[i]) % kVirtualShards] + 1];
  for (size_t s = 0; s < shards; ++s) starts[s + 1] += starts[s];
  for (size_t i = 0; i < n; ++i) {
    const auto to = static_cast<size_t>(starts[owner[mix64(keys[i]) % kVirtualShards]]++);
    sorted[to] = keys[i];
    order[to] = static_cast<uint32_t>(i);
  }
  for (size_t s = shards; s > 0; --s) starts[s] = starts[s - 1];
  starts[0] = 0;
}

// out[i] = rows[where[i]]
inline void take_rows(const uint32_t* where, size_t n, const float* rows, size_t width, float* out) {
  for (size_t i = 0; i < n; ++i) std::memcpy(out + i * width, rows + where[i] * width, width * sizeof(float));
}

// Packs the rows of a push for one shard in the layout of a message: keys, then the gradients, shows, clicks and slots
// of order[i].
inline void pack_rows(const uint32_t* order, size_t n, const uint64_t* keys, const float* grads, size_t width,
                      const float* show, const float* click, const uint16_t* slots, uint8_t* out) {
  std::memcpy(out, keys, n * sizeof(uint64_t));
  out += n * sizeof(uint64_t);
  take_rows(order, n, grads, width, reinterpret_cast<float*>(out));
  out += n * width * sizeof(float);
  take_rows(order, n, show, 1, reinterpret_cast<float*>(out));
  out += n * sizeof(float);
  take_rows(order, n, click, 1, reinterpret_cast<float*>(out));
  out += n * sizeof(float);
  for (size_t i = 0; i < n; ++i) std::memcpy(out + i * sizeof(uint16_t), slots + order[i], sizeof(uint16_t));
}

// out[where[i]] = rows[i]
inline void put_rows(const uint32_t* where, size_t n, const float* rows, size_t width, float* out) {
  for (size_t i = 0; i < n; ++i) std::memcpy(out + where[i] * width, rows + i * width, width * sizeof(float));
}

// out[where[i]] += rows[i], in the order of i
inline void add_rows(const uint32_t* where, size_t n, const float* rows, size_t width, float* out) {
  for (size_t i = 0; i < n; ++i) {
    float* to = out + where[i] * width;
    for (size_t c = 0; c < width; ++c) to[c] += rows[i * width + c];
  }
}

}  // namespace clickfleet
