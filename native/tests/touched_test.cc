#include "touched.h"

#include <map>

#include "check.h"

namespace clickfleet {
namespace {

constexpr size_t kWidth = 3;

// Rows as a worker has them, beside a plain map of what `Touched` must remember.
TEST(touched_rows_keep_their_first_values_and_all_counts) {
  struct Row {
    float before, show;
    uint16_t slot;
  };
  Touched touched(kWidth);
  for (int round = 0; round < 3; ++round) {
    std::map<uint64_t, Row> wanted;
    for (uint64_t batch = 0; batch < 20; ++batch) {
      std::vector<uint64_t> keys;
      for (uint64_t i = 0; i < 300; ++i) keys.push_back(i % 2 == 0 ? i : mix64(batch * 1000 + i));
      const auto value = static_cast<float>(batch);
      const std::vector<float> rows(keys.size() * kWidth, value), ones(keys.size(), 1.0F), zeros(keys.size());
      const std::vector<uint16_t> slots(keys.size(), static_cast<uint16_t>(batch));
      touched.add(keys.data(), keys.size(), rows.data(), ones.data(), zeros.data(), slots.data());
      for (const uint64_t key : keys) {
        Row& row = wanted.try_emplace(key, Row{value, 0.0F, 0}).first->second;
        row.show += 1.0F;
        row.slot = static_cast<uint16_t>(batch);
      }
    }
    // Others changed one of the rows, and one that was not touched.
    const std::vector<uint64_t> changed = {0, mix64(1ULL << 40)};
    std::vector<float> values(changed.size() * kWidth, 7.0F);
    std::vector<uint8_t> here(changed.size());
    touched.rebase(changed.data(), changed.size(), values.data(), here.data());
    CHECK(here[0] == 1 && here[1] == 0);
    CHECK(values[0] == 7.0F - wanted[0].before && values[kWidth] == 7.0F);
    wanted[0].before = 7.0F;

    CHECK(touched.size() == wanted.size());
    const std::vector<uint64_t> keys(touched.keys(), touched.keys() + touched.size());
    std::vector<float> rows(keys.size() * kWidth, 100.0F), show(keys.size()), click(keys.size());
    std::vector<uint16_t> slots(keys.size());
    touched.take(rows.data(), show.data(), click.data(), slots.data());
    for (size_t i = 0; i < keys.size(); ++i) {
      const Row& row = wanted.at(keys[i]);
      CHECK(rows[i * kWidth] == 100.0F - row.before && rows[i * kWidth + 2] == 100.0F - row.before);
      CHECK(show[i] == row.show && click[i] == 0.0F && slots[i] == row.slot);
    }
    CHECK(touched.size() == 0);
  }
}

}  // namespace
}  // namespace clickfleet
