// N floats at a time. Every CPU level does the same operations in the same order, whatever its vector width.
#pragma once
#include <cstring>

#include "rules.h"

namespace clickfleet {

#if defined(__GNUC__)
template <int N>
struct Lanes {
  using Floats __attribute__((vector_size(4 * N))) = float;
  Floats x;

  CLICKFLEET_INLINE static Lanes load(const float* from) {
    Lanes out;
    std::memcpy(&out.x, from, 4 * N);
    return out;
  }
  CLICKFLEET_INLINE static Lanes all(float value) { return {Floats{} + value}; }
  CLICKFLEET_INLINE void store(float* to) const { std::memcpy(to, &x, 4 * N); }
  CLICKFLEET_INLINE Lanes within(Bounds bounds) const {
    const Floats lower = Floats{} + bounds.lower, upper = Floats{} + bounds.upper;
    const Floats above = x > lower ? x : lower;  // false for NaN
    return {above < upper ? above : upper};
  }
  CLICKFLEET_INLINE friend Lanes operator+(Lanes a, Lanes b) { return {a.x + b.x}; }
  CLICKFLEET_INLINE friend Lanes operator-(Lanes a, Lanes b) { return {a.x - b.x}; }
  CLICKFLEET_INLINE friend Lanes operator*(Lanes a, Lanes b) { return {a.x * b.x}; }
};
#else
template <int N>
struct Lanes {
  float x[N];

  static Lanes load(const float* from) {
    Lanes out;
    std::memcpy(out.x, from, 4 * N);
    return out;
  }
  static Lanes all(float value) {
    return each([&](int) { return value; });
  }
  void store(float* to) const { std::memcpy(to, x, 4 * N); }
  Lanes within(Bounds bounds) const {
    return each([&](int i) {
      const float above = x[i] > bounds.lower ? x[i] : bounds.lower;
      return above < bounds.upper ? above : bounds.upper;
    });
  }
  friend Lanes operator+(Lanes a, Lanes b) {
    return each([&](int i) { return a.x[i] + b.x[i]; });
  }
  friend Lanes operator-(Lanes a, Lanes b) {
    return each([&](int i) { return a.x[i] - b.x[i]; });
  }
  friend Lanes operator*(Lanes a, Lanes b) {
    return each([&](int i) { return a.x[i] * b.x[i]; });
  }

 private:
  template <class Value>
  static Lanes each(const Value& value) {
    Lanes out;
    for (int i = 0; i < N; ++i) out.x[i] = value(i);
    return out;
  }
};
#endif

// Calls visit(at, Lanes<N>) for [0, n) in pieces of 8, then 4, then 1. The second argument only carries N.
template <class Visit>
CLICKFLEET_INLINE void by_lanes(int n, const Visit& visit) {
  int i = 0;
  for (; i + 8 <= n; i += 8) visit(i, Lanes<8>{});
  for (; i + 4 <= n; i += 4) visit(i, Lanes<4>{});
  for (; i < n; ++i) visit(i, Lanes<1>{});
}

// Dot product in sixteen partial sums, added in one fixed tree; then the rest in pieces of four and of one.
CLICKFLEET_INLINE float dot(const float* a, const float* b, int n) {
  auto even = Lanes<8>::all(0), odd = even;
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    even = even + Lanes<8>::load(a + i) * Lanes<8>::load(b + i);
    odd = odd + Lanes<8>::load(a + i + 8) * Lanes<8>::load(b + i + 8);
  }
  float lane[8];
  (even + odd).store(lane);
  auto four = Lanes<4>::load(lane) + Lanes<4>::load(lane + 4);
  for (; i + 4 <= n; i += 4) four = four + Lanes<4>::load(a + i) * Lanes<4>::load(b + i);
  four.store(lane);
  float sum = (lane[0] + lane[2]) + (lane[1] + lane[3]);
  for (; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace clickfleet
