#include "small_rows.h"

#include <limits>
#include <random>
#include <vector>

#include "check.h"

namespace clickfleet {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Numbers of all sizes, among them zeros and those that lie between two halves.
float number(std::mt19937_64& random) {
  const auto part = static_cast<float>(static_cast<int>(random() % 4097) - 2048) / 2048.0F;
  return random() % 8 == 0 ? 0.0F : std::ldexp(part, static_cast<int>(random() % 40) - 28);
}

TEST(halves_are_exact_and_numbers_round_to_the_nearest_one) {
  for (uint32_t half = 0; half < 0x7c00; ++half) {
    const auto bits = static_cast<uint16_t>(half);
    const float x = from_half(bits), next = from_half(static_cast<uint16_t>(half + 1));
    CHECK(to_half(x) == bits && to_half(-x) == (bits | 0x8000));
    CHECK(from_half(static_cast<uint16_t>(bits | 0x8000)) == -x);
    if (half == 0x7bff) continue;
    const float middle = (x + next) / 2;
    CHECK(to_half(middle) == (half % 2 == 0 ? half : half + 1));
    CHECK(to_half(std::nextafter(middle, 0.0F)) == half && to_half(std::nextafter(middle, kInfinity)) == half + 1);
  }
}

TEST(unpacked_rows_pack_to_the_same_record) {
  std::mt19937_64 random(3);
  for (const RowFormat format : {RowFormat::kFloat32, RowFormat::kFloat16, RowFormat::kInt8})
    for (const size_t factors : {0, 1, 3, 7, 8, 10, 16, 21})
      for (int turn = 0; turn < 2000; ++turn) {
        const float weight = number(random);
        const float size = std::ldexp(1.0F, static_cast<int>(random() % 30) - 20);
        std::vector<float> row(factors), out(1 + factors), again(1 + factors);
        for (float& x : row) x = number(random) * size;
        std::vector<uint8_t> record(record_bytes(format, factors)), second(record.size());
        if (!pack(format, weight, row.data(), factors, record.data())) continue;
        unpack(format, record.data(), factors, out.data());
        CHECK(pack(format, out[0], out.data() + 1, factors, second.data()));
        CHECK(record == second);
        float most = 0;
        for (const float x : row) most = std::max(most, std::abs(x));
        const float step = format == RowFormat::kInt8 ? std::max(most / 112, 0x1p-24F) : most / 2048 + 0x1p-25F;
        for (size_t k = 0; k < factors; ++k) CHECK(std::abs(out[1 + k] - row[k]) <= step);
      }
}

TEST(numbers_that_a_format_cannot_hold_are_refused) {
  for (const RowFormat format : {RowFormat::kFloat16, RowFormat::kInt8}) {
    std::vector<uint8_t> record(64);
    for (const float wrong : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN(), 1e6F, -1e6F}) {
      const std::vector<float> row = {0, wrong, 0}, zeros(3);
      CHECK(!pack(format, 0, row.data(), 3, record.data()));
      CHECK(!pack(format, wrong, zeros.data(), 3, record.data()));
    }
    const std::vector<float> large = {30000, -30000, 0};
    CHECK(pack(format, 65504, large.data(), 3, record.data()));
  }
}

}  // namespace
}  // namespace clickfleet
