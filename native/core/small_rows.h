// Rows in fewer bytes, for published entries. A record holds one row:
//
//   float16   embed_w and every factor as an IEEE half, little-endian
//   int8      a signed byte per factor, then embed_w as a half, then a byte s that gives the scale of the factors:
//             the float32 with the bits (s + 824) << 20, so from 2^-24 in steps of an eighth of a power of two to 240
//
// A row without factors is one half in both. A factor is byte · scale, which is exact in float32. Packing rounds to the
// nearest value, ties to even. An unpacked row packs to the same record again.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace clickfleet {

enum class RowFormat : uint8_t { kFloat32, kFloat16, kInt8 };

// Returns the bytes of a row.
inline size_t record_bytes(RowFormat format, size_t factors) {
  switch (format) {
    case RowFormat::kFloat16:
      return 2 * (1 + factors);
    case RowFormat::kInt8:
      return factors == 0 ? 2 : factors + 3;
    default:
      return 4 * (1 + factors);
  }
}

// Returns the number of factors in a record of this size; 0 for one that is too small for any.
inline size_t record_width(RowFormat format, size_t bytes) {
  switch (format) {
    case RowFormat::kFloat16:
      return bytes < 4 ? 0 : bytes / 2 - 1;
    case RowFormat::kInt8:
      return bytes < 4 ? 0 : bytes - 3;
    default:
      return bytes < 8 ? 0 : bytes / 4 - 1;
  }
}

inline float from_half(uint16_t half) {
#if defined(__F16C__)
  return _cvtsh_ss(half);
#else
  const uint32_t sign = (half & 0x8000U) << 16, exponent = (half >> 10) & 31U, fraction = half & 0x3ffU;
  if (exponent == 0) {  // fraction · 2^-24
    const float x = static_cast<float>(fraction) * 0x1p-24F;
    return sign != 0 ? -x : x;
  }
  const uint32_t wide = exponent == 31 ? 255U : exponent + 112U;
  return std::bit_cast<float>(sign | wide << 23 | fraction << 13);
#endif
}

// The number must be finite. A result that is too large becomes infinite.
inline uint16_t to_half(float number) {
#if defined(__F16C__)
  return _cvtss_sh(number, _MM_FROUND_TO_NEAREST_INT);
#else
  const auto bits = std::bit_cast<uint32_t>(number);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000U);
  const uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude < 0x38800000U) {  // below the least normal half: a multiple of 2^-24
    const float steps = std::nearbyint(std::bit_cast<float>(magnitude) * 0x1p24F);
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(steps));
  }
  if (magnitude >= 0x47800000U) return static_cast<uint16_t>(sign | 0x7c00U);
  const uint32_t odd = (magnitude >> 13) & 1U;
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000U + 0xfffU + odd) >> 13));
#endif
}

inline float to_scale(uint8_t code) { return std::bit_cast<float>((code + 824U) << 20); }

// Writes n halves as floats.
inline void unpack_halves(const uint8_t* from, size_t n, float* to) {
  size_t i = 0;
#if defined(__F16C__)
  const auto eight = [&](size_t at) {
    _mm256_storeu_ps(to + at, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * at))));
  };
  if (n >= 8) {
    for (; i + 8 <= n; i += 8) eight(i);
    if (i < n) eight(n - 8);  // overlaps the previous ones
    return;
  }
#endif
  for (; i < n; ++i) {
    uint16_t half = 0;
    std::memcpy(&half, from + 2 * i, 2);
    to[i] = from_half(half);
  }
}

// Writes n signed bytes, multiplied by the scale.
inline void unpack_bytes(const uint8_t* from, size_t n, float scale, float* to) {
#if defined(__GNUC__)
  using Bytes __attribute__((vector_size(8))) = int8_t;
  using Ints __attribute__((vector_size(32))) = int32_t;
  using Floats __attribute__((vector_size(32))) = float;
  const auto eight = [&](size_t at) {
    Bytes bytes;
    std::memcpy(&bytes, from + at, 8);
    const Floats floats = __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats) * scale;
    std::memcpy(to + at, &floats, 32);
  };
  if (n >= 8) {
    for (size_t i = 0; i + 8 <= n; i += 8) eight(i);
    if (n % 8 != 0) eight(n - 8);  // overlaps the previous ones
    return;
  }
#endif
  for (size_t i = 0; i < n; ++i) to[i] = static_cast<float>(static_cast<int8_t>(from[i])) * scale;
}

// Writes embed_w and the factors of a record, 1 + `factors` floats.
inline void unpack(RowFormat format, const uint8_t* record, size_t factors, float* out) {
  if (format == RowFormat::kFloat32) {
    std::memcpy(out, record, 4 * (1 + factors));
  } else if (format == RowFormat::kFloat16 || factors == 0) {
    unpack_halves(record, 1 + factors, out);
  } else {
    unpack_halves(record + factors, 1, out);
    unpack_bytes(record, factors, to_scale(record[factors + 2]), out + 1);
  }
}

// Writes the record of a row. Returns false if a number is not finite or too large for the format.
bool pack(RowFormat format, float weight, const float* row, size_t factors, uint8_t* record);

// The records of rows that follow each other. Returns the first row that cannot be packed, or `rows`.
size_t pack_rows(RowFormat format, const float* weights, const float* x, size_t rows, size_t factors, uint8_t* records);

}  // namespace clickfleet
