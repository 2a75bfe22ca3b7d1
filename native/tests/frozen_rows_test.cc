#include "frozen_rows.h"

#include <algorithm>
#include <map>
#include <random>
#include <stdexcept>

#include "check.h"
#include "hash.h"

namespace clickfleet {
namespace {

constexpr size_t kFactors = 3;

struct Made {
  std::vector<uint64_t> full, narrow, brief, deleted;
  std::vector<float> full_w, full_x, narrow_w, narrow_x, brief_w;
  std::vector<uint8_t> full_records, brief_records;
  // The same in a small format, which holds these whole numbers exactly.
  std::shared_ptr<const FrozenLayer> small_layer(RowFormat format) {
    full_records.resize(full.size() * record_bytes(format, kFactors));
    brief_records.resize(brief.size() * record_bytes(format, 0));
    CHECK(pack_rows(format, full_w.data(), full_x.data(), full.size(), kFactors, full_records.data()) == full.size());
    CHECK(pack_rows(format, brief_w.data(), nullptr, brief.size(), 0, brief_records.data()) == brief.size());
    auto made = std::make_shared<FrozenLayer>();
    made->full.emplace_back(std::vector<RecordBatch>{{full.data(), nullptr, nullptr, full.size(), full_records.data()}},
                            kFactors, format);
    made->brief = FrozenSet({{brief.data(), nullptr, nullptr, brief.size(), brief_records.data()}}, 0, format);
    made->deleted = FrozenSet({{deleted.data(), nullptr, nullptr, deleted.size()}});
    return made;
  }
  std::shared_ptr<const FrozenLayer> layer() const {
    auto made = std::make_shared<FrozenLayer>();
    made->full.emplace_back(std::vector<RecordBatch>{{full.data(), full_w.data(), full_x.data(), full.size()}},
                            kFactors);
    made->full.emplace_back(std::vector<RecordBatch>{{narrow.data(), narrow_w.data(), narrow_x.data(), narrow.size()}},
                            1);
    made->brief = FrozenSet({{brief.data(), brief_w.data(), nullptr, brief.size()}});
    made->deleted = FrozenSet({{deleted.data(), nullptr, nullptr, deleted.size()}});
    return made;
  }
};

using Truth = std::map<uint64_t, std::vector<float>>;

// Sets, shortens, deletes or skips every key of a small universe.
Made make(std::mt19937_64& random, Truth& truth, size_t universe, bool widths = true) {
  std::vector<uint64_t> keys(universe);
  for (size_t i = 0; i < universe; ++i) keys[i] = i * i + 1;
  std::sort(keys.begin(), keys.end(), [](uint64_t a, uint64_t b) { return mix64(a) < mix64(b); });
  Made made;
  for (const uint64_t key : keys) {
    const auto value = static_cast<float>(random() % 1000);
    switch (random() % (widths ? 5 : 4)) {
      case 4:
        made.narrow.push_back(key);
        made.narrow_w.push_back(value);
        made.narrow_x.push_back(value + 1);
        truth[key] = {value, value + 1, 0, 0};
        break;
      case 0:
        made.full.push_back(key);
        made.full_w.push_back(value);
        made.full_x.insert(made.full_x.end(), {value + 1, value + 2, value + 3});
        truth[key] = {value, value + 1, value + 2, value + 3};
        break;
      case 1:
        made.brief.push_back(key);
        made.brief_w.push_back(value);
        truth[key] = {value, 0, 0, 0};
        break;
      case 2:
        made.deleted.push_back(key);
        truth.erase(key);
        break;
      default:
        break;
    }
  }
  return made;
}

TEST(frozen_layers_answer_like_a_map_and_so_does_their_merge) {
  std::mt19937_64 random(5);
  for (const size_t universe : {0, 1, 7, 3000}) {
    Truth truth;
    std::vector<Made> made;
    for (int i = 0; i < 5; ++i) made.push_back(make(random, truth, universe));
    Layers layers;
    for (const Made& one : made) layers.insert(layers.begin(), one.layer());
    const auto check = [&](const Layers& these) {
      const FrozenRows rows(these, kFactors);
      std::vector<uint64_t> keys;
      for (size_t i = 0; i < universe + 9; ++i) keys.push_back(i * i + 1);
      std::vector<float> out(keys.size() * (1 + kFactors), -1.0F);
      rows.read(keys.data(), keys.size(), out.data());
      std::vector<uint8_t> known(keys.size());
      rows.known(keys.data(), keys.size(), known.data());
      for (size_t i = 0; i < keys.size(); ++i) {
        const auto it = truth.find(keys[i]);
        CHECK(known[i] == (it != truth.end()));
        for (size_t k = 0; k <= kFactors; ++k)
          CHECK(out[i * (1 + kFactors) + k] == (it == truth.end() ? 0.0F : it->second[k]));
      }
    };
    check(layers);
    const uint64_t middle = ~0ULL / 3;
    const auto merged = [&](const Layers& these, bool keep) {
      Made out;
      for (const auto& [low, high] :
           {std::pair<uint64_t, uint64_t>{0, middle}, std::pair<uint64_t, uint64_t>{middle + 1, ~0ULL}}) {
        const MergedRows part = merge(these, low, high, keep);
        const auto add = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
        for (const auto& one : part.full) {
          const bool wide = one.width == kFactors;
          add(wide ? out.full : out.narrow, one.keys), add(wide ? out.full_w : out.narrow_w, one.weights);
          add(wide ? out.full_x : out.narrow_x, one.factors);
        }
        add(out.brief, part.brief_keys), add(out.brief_w, part.brief_weights), add(out.deleted, part.deleted);
      }
      return out;
    };
    const Made newer = merged({layers[0], layers[1], layers[2]}, true);  // three overlays into one
    check({newer.layer(), layers[3], layers[4]});
    const Made all = merged(layers, false);  // everything into a new base
    CHECK(all.deleted.empty());
    CHECK(all.full.size() + all.narrow.size() + all.brief.size() == truth.size());
    check({all.layer()});
  }
}

TEST(small_layers_answer_like_those_of_floats) {
  std::mt19937_64 random(6);
  for (const bool mixed : {false, true}) {
    Truth truth;
    std::vector<Made> made;
    for (int i = 0; i < 3; ++i) made.push_back(make(random, truth, 500, false));
    for (Made& one : made)
      for (float& x : one.full_x) x = static_cast<float>(static_cast<int>(x) % 100);  // a byte each
    Layers small, floats;
    for (size_t i = 0; i < made.size(); ++i) {
      floats.insert(floats.begin(), made[i].layer());
      small.insert(small.begin(), mixed && i == 1 ? made[i].layer() : made[i].small_layer(RowFormat::kFloat16));
    }
    std::vector<uint64_t> keys;
    for (size_t i = 0; i < 509; ++i) keys.push_back(i * i + 1);
    const auto read = [&](const Layers& layers) {
      std::vector<float> out(keys.size() * (1 + kFactors), -1.0F);
      FrozenRows(layers, kFactors).read(keys.data(), keys.size(), out.data());
      return out;
    };
    CHECK(read(small) == read(floats));
    const MergedRows merged = merge(small, 0, ~0ULL, true), others = merge(floats, 0, ~0ULL, true);
    CHECK(merged.full.size() == 1 && others.full.size() == 1);
    const MergedRows::Full &one = merged.full[0], &other = others.full[0];
    CHECK(one.keys == other.keys && one.factors == other.factors && one.weights == other.weights);
    CHECK(merged.brief_weights == others.brief_weights);
    if (mixed) continue;
    const MergedRows packed = merge(small, 0, ~0ULL, true, true);
    CHECK(packed.full.size() == 1 && packed.brief_keys == others.brief_keys);
    const MergedRows::Full& records = packed.full[0];
    CHECK(records.keys == other.keys);
    const size_t bytes = record_bytes(RowFormat::kFloat16, kFactors);
    CHECK(records.records.size() == records.keys.size() * bytes);
    for (size_t i = 0; i < records.keys.size(); ++i) {
      std::vector<float> row(1 + kFactors);
      unpack(RowFormat::kFloat16, records.records.data() + i * bytes, kFactors, row.data());
      CHECK(row[0] == other.weights[i] && row[1] == other.factors[i * kFactors]);
    }
  }
}

TEST(frozen_sets_refuse_rows_out_of_order) {
  std::vector<uint64_t> keys = {1, 2, 3};
  std::sort(keys.begin(), keys.end(), [](uint64_t a, uint64_t b) { return mix64(a) > mix64(b); });
  const std::vector<float> weights(3);
  bool refused = false;
  try {
    const FrozenSet set({{keys.data(), weights.data(), nullptr, 3}});
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
}

}  // namespace
}  // namespace clickfleet
