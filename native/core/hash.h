// Two functions of the bits, frozen for ever because every checkpoint depends on them.
#pragma once
#include <cstdint>

namespace clickfleet {

// A bijection of 64 bits (the SplitMix64 finaliser): spreads keys over virtual shards, stripes and buckets.
inline constexpr uint64_t mix64(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ULL;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebULL;
  x ^= x >> 31;
  return x;
}

// The key that mix64 made this hash from.
inline constexpr uint64_t unmix64(uint64_t x) {
  x ^= (x >> 31) ^ (x >> 62);
  x *= 0x319642b2d24d8ec3ULL;
  x ^= (x >> 27) ^ (x >> 54);
  x *= 0x96de1b173f119089ULL;
  x ^= (x >> 30) ^ (x >> 60);
  return x;
}

inline constexpr int kVirtualShards = 1024;

inline constexpr int virtual_shard(uint64_t key) { return static_cast<int>(mix64(key) % kVirtualShards); }

}  // namespace clickfleet
