// Hash functions. They must never change, because every checkpoint depends on them.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(_MSC_VER)
#include <intrin.h>
#endif

namespace clickfleet {

// A bijection of 64 bits (the SplitMix64 finalizer). It spreads keys over virtual shards, stripes and buckets.
inline constexpr uint64_t mix64(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ULL;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebULL;
  x ^= x >> 31;
  return x;
}

// The upper bits place a key in a hash table. Saved rows arrive ascending by mix64: by its upper bits they would fill a
// table from one end, and each would search through all those before it. The keys of one shard share the lower bits of
// mix64.
inline constexpr uint64_t place64(uint64_t key) { return mix64(key) * 0x9e3779b97f4a7c15ULL; }

inline constexpr int kVirtualShards = 1024;

inline constexpr int virtual_shard(uint64_t key) { return static_cast<int>(mix64(key) % kVirtualShards); }

namespace hashing {

inline uint64_t load64(const char* p) {
  uint64_t x;
  std::memcpy(&x, p, 8);
  if constexpr (std::endian::native == std::endian::big) {
    uint64_t y = 0;
    for (int i = 0; i < 8; ++i) y |= (x >> (56 - 8 * i) & 0xff) << (8 * i);
    return y;
  }
  return x;
}

// Folds the 128-bit product to 64 bits. The factors are mixed into the result, so a factor of zero does not discard the
// other one.
inline uint64_t fold(uint64_t a, uint64_t b) {
#if defined(_MSC_VER)
  uint64_t high;
  const uint64_t low = _umul128(a, b, &high);
#else
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  const auto low = static_cast<uint64_t>(product), high = static_cast<uint64_t>(product >> 64);
#endif
  return (low ^ a) ^ (high ^ b);
}

inline constexpr uint64_t kFirst = 0x9e3779b97f4a7c15ULL;   // golden ratio
inline constexpr uint64_t kSecond = 0xb7e151628aed2a6bULL;  // e
inline constexpr uint64_t kThird = 0x3243f6a8885a308dULL;   // pi

}  // namespace hashing

namespace hashing {

// Loads up to 8 bytes as a little-endian number. `Room` asserts that 8 bytes are readable, which saves the branch.
template <bool Room>
inline uint64_t load_short(const char* p, size_t n) {
  if constexpr (Room) {
    return n == 0 ? 0 : load64(p) & ~0ULL >> (64 - 8 * n);
  } else {
    uint64_t x = 0;
    for (size_t i = 0; i < n; ++i) x |= static_cast<uint64_t>(static_cast<unsigned char>(p[i])) << (8 * i);
    return x;
  }
}

inline uint64_t finish(uint64_t a, uint64_t b, uint64_t seed, size_t length) {
  return fold(fold(a ^ kFirst, b ^ seed) ^ kSecond, (length ^ kThird) + seed);
}

}  // namespace hashing

// Hashes any bytes to 64 bits. Up to 8 bytes are one word, up to 16 are two overlapping words. Longer inputs take one
// more multiplication per 16 bytes.
template <bool Room = false>
inline uint64_t hash_bytes(uint64_t seed, const char* p, size_t n) {
  using namespace hashing;
  if (n <= 8) {
    const uint64_t a = load_short<Room>(p, n);
    return finish(a, a, seed, n);
  }
  if (n <= 16) return finish(load64(p), load64(p + n - 8), seed, n);
  const char* const last = p + n - 16;  // may overlap bytes already hashed
  uint64_t mixed = seed;
  for (; p < last; p += 16) mixed = fold(load64(p) ^ kFirst, load64(p + 8) ^ mixed);
  return finish(load64(last), load64(last + 8), mixed, n);
}

// The key of a value in a slot is hash64(slot_seed(name), value). The seed depends on the slot's name alone, so adding
// a slot changes no other key.
inline uint64_t slot_seed(const char* name, size_t n) { return hash_bytes(hashing::kThird, name, n); }
template <bool Room = false>
inline uint64_t hash64(uint64_t seed, const char* value, size_t n) {
  return hash_bytes<Room>(seed, value, n);
}

// The string hash of 64-bit CPython 2, which the original system used for its ids. It accepts its input in pieces
// because the prefix of a slot is always the same.
struct Py2Hash {
  uint64_t x = 0, length = 0;
  void add(const char* p, size_t n) {
    if (length == 0 && n > 0) x = static_cast<uint64_t>(static_cast<unsigned char>(*p)) << 7;
    for (size_t i = 0; i < n; ++i) x = (1000003 * x) ^ static_cast<unsigned char>(p[i]);
    length += n;
  }
  int64_t value() const {
    const auto signed_value = static_cast<int64_t>(x ^ length);
    return length == 0 ? 0 : signed_value == -1 ? -2 : signed_value;
  }
  uint64_t modulo(int64_t m) const {  // floored like Python's %: never negative
    const int64_t r = value() % m;
    return static_cast<uint64_t>(r < 0 ? r + m : r);
  }
};

}  // namespace clickfleet
