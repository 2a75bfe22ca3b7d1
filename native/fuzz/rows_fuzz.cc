// Keys, offsets and rows: pooling, published rows, distribution over shards, metrics.
#include <cmath>

#include "bounds.h"
#include "buckets.h"
#include "frozen_rows.h"
#include "fuzz.h"
#include "groups.h"
#include "hash.h"
#include "key_set.h"
#include "pool.h"
#include "spread.h"
#include "unique.h"

using namespace clickfleet;
using clickfleet::fuzz::Input;
using clickfleet::fuzz::raw;

FUZZ(pool, raw("\2\3\2\0\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0\0\0\0\0\1\0\0\0"),
     raw("\1\3\2\0\0\0\0\0\0\0\0\xff\xff\xff\xff\xff\xff\xff\x7f\0\0\0\0\0\0\0\x80\xff\xff\xff\xff\xff\xff\xff\xff\1\0"
         "\0\0\0\0\0\0")) {
  const size_t slots = in.below(4), factors = in.below(4), cells = in.below(8), rows = in.below(4);
  const auto offsets = in.some<int64_t>(cells + 1);
  const auto where = in.some<uint32_t>(in.size());
  if (!ascending(offsets.data(), offsets.size(), where.size()) || !below(where.data(), where.size(), rows)) return;
  if (slots == 0 ? offsets.size() != 1 : (offsets.size() - 1) % slots != 0) return;
  const size_t batch = slots == 0 ? 0 : (offsets.size() - 1) / slots;
  const std::vector<float> table(rows * (1 + factors), 0.5F), values(where.size(), 2.0F), show(batch, 1.0F);
  const std::vector<uint8_t> mean(slots, 1);
  const Ragged keys{batch, slots, offsets.data(), where.data(), values.data(), mean.data(), slots};
  std::vector<float> first(batch * slots), pooled(batch * slots * factors), grads(table.size());
  pool(keys, table.data(), static_cast<int>(factors), first.data(), pooled.data());
  unpool(keys, first.data(), pooled.data(), static_cast<int>(factors), grads.data());
  std::vector<float> shows(rows), clicks(rows);
  std::vector<uint16_t> slot(rows);
  count(keys, show.data(), nullptr, nullptr, shows.data(), clicks.data(), slot.data());
}

FUZZ(events,
     raw("\1\2\2\3\2\6\0\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0\3\0\0\0\0\0\0\0\5\0\0\0\0\0\0\0\6\0\0\0\0\0\0\0\x08\0\0\0\0\0\0"
         "\0\x0a"
         "\0\0\0\0\0\0\0\0\0\0\0\1\0\0\0\1\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\1\0\0\0\1\0\0\0\0\0\0\0\0\0\0\0"),
     raw("\0\1\1\1\1\2\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0")) {
  const size_t slots = in.below(3), count = 1 + in.below(3), factors = in.below(4), rows = in.below(4);
  const bool valued = in.below(2) != 0;
  const size_t columns = slots + count, cells = in.below(16);
  const auto offsets = in.some<int64_t>(cells + 1);
  const auto where = in.some<uint32_t>(in.size());
  if (!ascending(offsets.data(), offsets.size(), where.size()) || !below(where.data(), where.size(), rows)) return;
  if ((offsets.size() - 1) % columns != 0) return;
  const size_t batch = (offsets.size() - 1) / columns;
  const std::vector<float> values(where.size(), 2.0F);
  const Ragged keys{batch, slots, offsets.data(), where.data(), valued ? values.data() : nullptr, nullptr, columns};
  Events events{slots, count};
  std::vector<int64_t> row(batch), from(batch), length(batch);
  if (!find_events(keys, events, row.data(), from.data(), length.data())) return;
  CHECK(events.distinct <= batch && (batch == 0 || events.distinct > 0));
  for (size_t b = 0; b < batch; ++b) {
    const auto h = static_cast<size_t>(row[b]);
    const int64_t *mine = offsets.data() + b * columns + slots,
                  *shared = offsets.data() + static_cast<size_t>(from[h]) * columns + slots;
    CHECK(h < events.distinct && length[h] == mine[1] - mine[0] && length[h] <= static_cast<int64_t>(events.longest));
    for (int64_t i = 0; i < mine[count] - mine[0]; ++i) CHECK(where[mine[0] + i] == where[shared[0] + i]);
  }
  const std::vector<float> table(rows * (1 + factors), 0.5F);
  std::vector<float> out(events.distinct * events.longest * count * factors, NAN), grads(table.size());
  gather(keys, events, table.data(), static_cast<int>(factors), out.data());
  for (const float x : out) CHECK(x == 0.0F || x == (valued ? 1.0F : 0.5F));
  scatter(keys, events, out.data(), static_cast<int>(factors), grads.data());
  for (size_t r = 0; r < rows; ++r) CHECK(grads[r * (1 + factors)] == 0.0F);  // the first-order weight takes no part
}

FUZZ(offsets, raw("\0\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0"), raw("\xff\xff\xff\xff\xff\xff\xff\x7f\0\0\0\0\0\0\0\x80")) {
  const size_t end = in.take<uint8_t>();
  const auto offsets = in.some<int64_t>(in.size());
  bool plain = !offsets.empty() && offsets[0] >= 0;
  for (size_t i = 1; i < offsets.size(); ++i) plain = plain && offsets[i] >= offsets[i - 1];
  plain = plain && offsets.back() <= static_cast<int64_t>(end);
  CHECK(ascending(offsets.data(), offsets.size(), end) == plain);
}

FUZZ(frozen, raw("\1\2\3\1\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0\3\0\0\0\0\0\0\0\4\0\0\0\0\0\0\0"), raw("\0")) {
  const size_t factors = 2 + in.below(3);
  const bool sorted = in.below(4) != 0;
  Layers layers;
  std::vector<std::vector<uint64_t>> kept;
  std::vector<std::vector<float>> numbers;
  for (size_t n = in.below(4); n > 0; --n) {
    const auto set = [&](bool weights, bool wide) {
      auto& keys = kept.emplace_back(in.some<uint64_t>(in.below(8)));
      if (sorted) {
        std::sort(keys.begin(), keys.end(), [](uint64_t a, uint64_t b) { return mix64(a) < mix64(b); });
        keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
      }
      const auto& w = numbers.emplace_back(keys.size(), 1.0F);
      const auto& x = numbers.emplace_back(keys.size() * factors, 2.0F);
      return FrozenSet({{keys.data(), weights ? w.data() : nullptr, wide ? x.data() : nullptr, keys.size()}},
                       wide ? factors - in.below(2) : 0);  // rows of two widths
    };
    kept.reserve(64);
    numbers.reserve(64);
    auto layer = std::make_shared<FrozenLayer>();
    for (size_t sets = in.below(3); sets > 0; --sets) layer->full.push_back(set(true, true));
    layer->brief = set(true, false);
    layer->deleted = set(false, false);
    layers.push_back(layer);
  }
  const FrozenRows rows(layers, factors);
  std::vector<uint64_t> asked = in.some<uint64_t>(in.size());
  for (const auto& keys : kept) asked.insert(asked.end(), keys.begin(), keys.end());
  std::vector<float> out(asked.size() * (1 + factors));
  std::vector<uint8_t> known(asked.size());
  rows.read(asked.data(), asked.size(), out.data());
  rows.known(asked.data(), asked.size(), known.data());
  const MergedRows merged = merge(layers, asked.empty() ? 0 : asked[0], ~0ULL, true);
  for (const auto& one : merged.full) CHECK(one.factors.size() == one.keys.size() * one.width);
}

FUZZ(small, raw("\1\3\0\0\200\77\0\0\200\277\0\0\0\0"), raw("\2\12")) {
  const auto format = static_cast<RowFormat>(in.below(3));
  const size_t factors = in.below(24);
  std::vector<uint8_t> record(record_bytes(format, factors)), again(record.size());
  for (auto& byte : record) byte = in.take<uint8_t>();
  std::vector<float> row(1 + factors);
  unpack(format, record.data(), factors, row.data());  // whatever the bytes are
  std::vector<float> given = in.some<float>(1 + factors);
  given.resize(1 + factors);
  if (!pack(format, given[0], given.data() + 1, factors, record.data())) return;
  unpack(format, record.data(), factors, row.data());
  CHECK(pack(format, row[0], row.data() + 1, factors, again.data()) && record == again);
}

FUZZ(spread, raw("\2\1\1\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0")) {
  const size_t shards = 1 + in.below(4), width = in.below(4);
  std::vector<uint16_t> owner(kVirtualShards);
  for (auto& one : owner) one = static_cast<uint16_t>(in.below(8));
  const auto keys = in.some<uint64_t>(in.size());
  if (!below(owner.data(), owner.size(), shards)) return;
  std::vector<uint64_t> sorted(keys.size());
  std::vector<uint32_t> order(keys.size());
  std::vector<int64_t> starts(shards + 1);
  split(keys.data(), keys.size(), owner.data(), shards, sorted.data(), order.data(), starts.data());
  CHECK(ascending(starts.data(), starts.size(), keys.size()) && below(order.data(), order.size(), keys.size()));
  std::vector<float> rows(keys.size() * width, 1.0F), out(rows.size());
  take_rows(order.data(), order.size(), rows.data(), width, out.data());
  put_rows(order.data(), order.size(), rows.data(), width, out.data());
  add_rows(order.data(), order.size(), rows.data(), width, out.data());
}

FUZZ(keys, raw("\1\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0")) {
  const auto keys = in.some<uint64_t>(in.size());
  std::vector<uint64_t> distinct(keys.size());
  std::vector<uint32_t> where(keys.size());
  const size_t count = unique(keys.data(), keys.size(), distinct.data(), where.data());
  for (size_t i = 0; i < keys.size(); ++i) CHECK(where[i] < count && distinct[where[i]] == keys[i]);
  KeySet set;
  set.add(keys.data(), keys.size());
  CHECK(set.size() == count);
  std::vector<uint8_t> has(keys.size());
  set.has(keys.data(), keys.size(), has.data());
  CHECK(std::all_of(has.begin(), has.end(), [](uint8_t there) { return there == 1; }));
}

FUZZ(metrics, raw("\5\2\0\0\0\0\0\0\0\x3f\0\0\x80\x3f\0\0\xc0\x7f")) {
  const int thresholds = 1 + static_cast<int>(in.below(64));
  const size_t repeat = 1 + in.below(64), limit = in.below(8);
  auto scores = in.some<float>(in.size() / 2);
  const auto some = in.some<float>(scores.size());
  scores.resize(some.size());
  std::vector<float> labels, weights, all;
  std::vector<uint64_t> ids;
  for (size_t n = 0; n < repeat; ++n)
    for (size_t i = 0; i < scores.size(); ++i) {
      all.push_back(scores[i]);
      labels.push_back(some[i]);
      weights.push_back(scores[scores.size() - 1 - i]);
      ids.push_back(i % 5);
    }
  const Rows rows{all.data(), labels.data(), weights.data(), ids.data(), all.size()};
  Buckets buckets(thresholds);
  buckets.update(rows);
  (void)buckets.auc();
  (void)buckets.calibration_groups();
  Window window(thresholds, 2);
  window.update(rows);
  window.update(rows);
  (void)window.sum().auc();
  Slices slices(thresholds, limit);
  slices.update(rows);
  Groups groups(limit * 8);
  groups.update(rows);
  Groups other(limit * 8);
  other.merge(groups);
  (void)groups.gauc();
  (void)other.gauc();
}
