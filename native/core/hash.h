// Functions of the bits, frozen for ever because every checkpoint depends on them.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(_MSC_VER)
#include <intrin.h>
#endif

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

inline uint64_t load32(const char* p) {
  const auto byte = [p](int i) { return static_cast<uint64_t>(static_cast<unsigned char>(p[i])); };
  return byte(0) | byte(1) << 8 | byte(2) << 16 | byte(3) << 24;
}

// The 128-bit product folded to 64; the factors stay in the result, so a factor of zero forgets nothing.
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

// Any bytes to 64 bits. Up to 16 bytes are two (overlapping) words and two multiplications; longer ones take one more
// per 16 bytes.
inline uint64_t hash_bytes(uint64_t seed, const char* p, size_t n) {
  using namespace hashing;
  uint64_t a = 0, b = 0;
  const size_t length = n;
  if (n > 16) {
    const char* const last = p + n - 16;  // reaches back into bytes already seen
    for (; n > 16; p += 16, n -= 16) seed = fold(load64(p) ^ kFirst, load64(p + 8) ^ seed);
    a = load64(last);
    b = load64(last + 8);
  } else if (n >= 8) {
    a = load64(p);
    b = load64(p + n - 8);
  } else if (n >= 4) {
    a = load32(p) << 32 | load32(p + n - 4);
    b = a;
  } else if (n > 0) {
    const auto byte = [p](size_t i) { return static_cast<uint64_t>(static_cast<unsigned char>(p[i])); };
    a = byte(0) << 16 | byte(n >> 1) << 8 | byte(n - 1);
    b = a;
  }
  return fold(fold(a ^ kFirst, b ^ seed) ^ kSecond, (length ^ kThird) + seed);
}

// The key of a value in a slot is hash64(slot_seed(name), value): the slot's name alone, so that adding a slot changes
// no other key.
inline uint64_t slot_seed(const char* name, size_t n) { return hash_bytes(hashing::kThird, name, n); }
inline uint64_t hash64(uint64_t seed, const char* value, size_t n) { return hash_bytes(seed, value, n); }

// The string hash of 64-bit CPython 2: the ids of the original system. Fed in pieces, since a slot's prefix is always
// the same.
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
  uint64_t modulo(int64_t m) const {  // floored, as Python's %: never negative
    const int64_t r = value() % m;
    return static_cast<uint64_t>(r < 0 ? r + m : r);
  }
};

}  // namespace clickfleet
