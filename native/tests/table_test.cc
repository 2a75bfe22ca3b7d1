#include "table.h"

#include <atomic>
#include <map>
#include <random>
#include <thread>

#include "check.h"
#include "cut.h"

namespace clickfleet {
namespace {

// The inverse of mix64. Rows are ordered by the hash alone, so no two keys may share one.
uint64_t unmix64(uint64_t x) {
  x ^= (x >> 31) ^ (x >> 62);
  x *= 0x319642b2d24d8ec3ULL;
  x ^= (x >> 27) ^ (x >> 54);
  x *= 0x96de1b173f119089ULL;
  x ^= (x >> 30) ^ (x >> 60);
  return x;
}

Config plain(int factors) {
  Config config;
  config.factors = factors;
  config.embedx.init = {Init::uniform, -0.1F, 0.1F};
  return config;
}

void push_ones(Table& table, const std::vector<uint64_t>& keys, float g = 1) {
  const std::vector<float> grads(keys.size() * static_cast<size_t>(1 + table.config().factors), g);
  Push push;
  push.keys = keys.data();
  push.grads = grads.data();
  push.size = keys.size();
  table.push(push);
}

std::map<uint64_t, std::vector<float>> read(Cut& cut) {
  std::map<uint64_t, std::vector<float>> rows;
  Cut::Batch batch;
  uint64_t last[2] = {0, 0};
  int file[2] = {-1, -1};
  while (cut.next(batch)) {
    const size_t d = batch.full ? batch.embedx.size() / batch.size : 0;
    for (size_t i = 0; i < batch.size; ++i) {
      const uint64_t hash = mix64(batch.key[i]);
      CHECK(file[batch.full] != batch.file || hash > last[batch.full]);  // ascending within a file
      file[batch.full] = batch.file;
      last[batch.full] = hash;
      std::vector<float> row{batch.embed_w[i]};
      if (d > 0)
        row.insert(row.end(), batch.embedx.begin() + static_cast<ptrdiff_t>(i * d),
                   batch.embedx.begin() + static_cast<ptrdiff_t>((i + 1) * d));
      CHECK(rows.emplace(batch.key[i], row).second);
    }
  }
  return rows;
}

std::vector<uint64_t> some_keys(size_t n, uint64_t seed, uint64_t range) {
  std::mt19937_64 random(seed);
  std::vector<uint64_t> keys(n);
  for (auto& key : keys) key = random() % range;
  return keys;
}

}  // namespace

TEST(mix64_is_a_bijection) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 10000; ++i) {
    const uint64_t x = random();
    CHECK(unmix64(mix64(x)) == x);
  }
}

TEST(extreme_keys_and_growth) {
  Table table(plain(3));
  push_ones(table, {0, 1, UINT64_MAX, UINT64_MAX - 1, uint64_t{1} << 63});
  CHECK(table.stats().rows == 5);
  std::vector<uint64_t> keys(50000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i * 7919;
  push_ones(table, keys);
  std::vector<float> rows(keys.size() * 4);
  table.pull(keys.data(), keys.size(), false, rows.data());
  for (size_t i = 0; i < keys.size(); ++i) CHECK(rows[i * 4] != 0);
}

TEST(duplicates_merge) {
  Table a(plain(2)), b(plain(2));
  push_ones(a, {5, 9, 5, 5}, 1);
  const std::vector<uint64_t> keys{5, 9};
  const std::vector<float> grads{3, 3, 3, 1, 1, 1}, show{3, 1};
  Push push;
  push.keys = keys.data();
  push.grads = grads.data();
  push.show = show.data();
  push.size = 2;
  b.push(push);
  float x[6], y[6];
  a.pull(keys.data(), 2, false, x);
  b.pull(keys.data(), 2, false, y);
  for (int i = 0; i < 6; ++i) CHECK(x[i] == y[i]);
}

TEST(rules_agree_on_every_level) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const std::vector<Rule> rules{Sgd{}, Adagrad{}, StdAdagrad{}, AdagradV2{}, Adam{}, SharedAdam{}, Ftrl{}};
  for (const Rule& rule : rules)
    for (const int n : {1, 2, 7, 10, 16, 33, 64}) {
      std::visit(
          [&](const auto& r) {
            std::vector<float> w(n), g(n), s(r.state(n) + 1);
            for (auto& x : w) x = normal(random);
            r.init(w.data(), s.data(), n);
            auto w2 = w, s2 = s;
            for (int step = 0; step < 5; ++step) {
              for (auto& x : g) x = normal(random);
              kernels("base").apply[rule.index()](&r, {}, w.data(), s.data(), g.data(), n, 3.0F);
              kernels().apply[rule.index()](&r, {}, w2.data(), s2.data(), g.data(), n, 3.0F);
            }
            CHECK(w == w2);
            CHECK(s == s2);
          },
          rule);
    }
}

TEST(short_rows_are_admitted_and_move) {
  Config config = plain(4);
  config.admission = {Admission::count, 3};
  Table table(config);
  const auto keys = some_keys(3000, 4, 1500);
  std::map<uint64_t, int> shows;
  for (int pass = 0; pass < 4; ++pass) {
    push_ones(table, keys);
    for (const auto key : keys) ++shows[key];
  }
  size_t full = 0;
  for (const auto& [key, n] : shows) full += n >= 3;
  CHECK(table.stats().rows == shows.size());
  CHECK(table.stats().full_rows == full);
  for (const auto& [key, n] : shows) {
    float row[5];
    table.pull(&key, 1, false, row);
    CHECK(row[0] != 0);
  }
}

TEST(shrink_keeps_the_rest_intact) {
  Config config = plain(2);
  config.policy.delete_threshold = 0.15;  // one show scores 0.1
  Table table(config);
  std::vector<uint64_t> once(2000), twice(2000);
  for (uint64_t i = 0; i < 2000; ++i) once[i] = 2 * i, twice[i] = 2 * i + 1;
  push_ones(table, once);
  push_ones(table, twice);
  push_ones(table, twice);
  std::vector<float> before(6000), after(6000);
  table.pull(twice.data(), 2000, false, before.data());
  CHECK(table.shrink() == 2000);
  CHECK(table.stats().rows == 2000);
  table.pull(twice.data(), 2000, false, after.data());
  CHECK(before == after);
  table.pull(once.data(), 2000, false, after.data());
  for (const float x : after) CHECK(x == 0);
}

TEST(threads_push_pull_shrink_and_snapshot) {
  Config config = plain(3);
  config.embed.rule = Sgd{1.0F};
  config.embed.scale = Scale::none;
  config.embed.bounds = config.embedx.bounds = {-1e9F, 1e9F};
  config.embedx.rule = Sgd{1.0F};
  config.embedx.scale = Scale::none;
  config.embedx.init = {};
  Table table(config);
  constexpr int kThreads = 3, kPushes = 60, kKeys = 400;
  std::atomic<int> running{kThreads};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      // Every push of thread t moves all its keys by -1: in a torn cut they would differ.
      std::vector<uint64_t> keys(kKeys);
      for (int i = 0; i < kKeys; ++i) keys[i] = static_cast<uint64_t>(i * kThreads + t);
      std::vector<float> rows(kKeys * 4);
      for (int n = 0; n < kPushes; ++n) {
        push_ones(table, keys);
        table.pull(keys.data(), keys.size(), true, rows.data());
        for (int i = 0; i < kKeys * 4; ++i) CHECK(rows[i] == rows[0]);
      }
      --running;
    });
  std::thread aging([&] {
    while (running > 0) {
      table.shrink();
      table.end_day();
    }
  });
  int cuts = 0;
  while (running > 0 || cuts == 0) {
    Cut cut(table, Cut::snapshot, 4);
    std::map<uint64_t, float> level;
    for (const auto& [key, row] : read(cut)) {
      const auto [at, fresh] = level.emplace(key % kThreads, row[0]);
      CHECK(at->second == row[0]);
      for (const float x : row) CHECK(x == row[0]);
    }
    ++cuts;
  }
  for (auto& thread : threads) thread.join();
  aging.join();
  CHECK(table.stats().rows == kThreads * kKeys);
  std::fprintf(stderr, "  %d cuts\n", cuts);
}

TEST(changes_follow_the_table) {
  Config config = plain(2);
  config.admission = {Admission::count, 2};
  config.policy.base_threshold = 0.25;
  config.policy.delete_threshold = 0.12;
  config.policy.decay_rate = 0.9;
  Table table(config);
  std::map<uint64_t, std::vector<float>> reader;
  std::mt19937_64 random(11);
  for (int round = 0; round < 120; ++round) {
    const auto apply = [&](Cut& cut) {
      if (cut.kind() == Cut::base) reader.clear();
      for (auto& [key, row] : read(cut)) reader[key] = row;
      for (const uint64_t key : cut.deleted_keys()) reader.erase(key);
    };
    push_ones(table, some_keys(1 + random() % 200, random(), 400), static_cast<float>(random() % 7) - 3);
    if (random() % 3 == 0) table.shrink();
    if (random() % 9 == 0) {
      Cut cut(table, table.tracking() ? Cut::changes : Cut::base, 1);
      if (random() % 2 == 0) read(cut);
      push_ones(table, some_keys(50, random(), 400));
      cut.abort();
    }
    Cut cut(table, table.tracking() && random() % 10 != 0 ? Cut::changes : Cut::base, 1);
    const auto at_the_cut = reader;
    apply(cut);
    if (random() % 2 == 0) push_ones(table, some_keys(100, random(), 400));
    if (random() % 4 == 0) table.shrink();
    if (random() % 4 != 0) {
      cut.commit();
      // Read what changed since, so that a base shows the same state.
      if (random() % 2 == 0) {
        Cut now(table, Cut::changes, 1);
        apply(now);
        now.commit();
      } else {
        Cut now(table);
        apply(now);
      }
      Cut whole(table, Cut::base, 1);
      CHECK(read(whole) == reader);
      whole.abort();
    } else {
      cut.abort();
      reader = at_the_cut;
    }
  }
  CHECK(!reader.empty());
}

TEST(changes_are_taken_beside_a_snapshot_and_pushes) {
  Config config = plain(3);
  Table table(config);
  push_ones(table, some_keys(500, 1, 1000));
  std::map<uint64_t, std::vector<float>> reader;
  {
    Cut base(table, Cut::base, 1);
    reader = read(base);
    base.commit();
  }
  std::atomic<int> running{2};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t)
    threads.emplace_back([&, t] {
      for (int n = 0; n < 80; ++n) push_ones(table, some_keys(200, static_cast<uint64_t>(2 * n + t), 1000));
      --running;
    });
  std::thread saving([&] {
    while (running > 0) {
      Cut snapshot(table, Cut::snapshot, 4);
      CHECK(!read(snapshot).empty());
    }
  });
  const auto take = [&] {
    Cut taken(table);
    for (auto& [key, row] : read(taken)) reader[key] = row;
    for (const uint64_t key : taken.deleted_keys()) reader.erase(key);
  };
  while (running > 0) take();
  for (auto& thread : threads) thread.join();
  saving.join();
  take();
  CHECK(table.stats().changed == 0);
  Cut whole(table, Cut::base, 1);
  CHECK(read(whole) == reader);
  whole.abort();
}

TEST(the_memory_limit_holds) {
  Config config = plain(6);
  config.admission = {Admission::count, 2};
  config.memory_limit = size_t{16} << 20;
  config.snapshot_reserve = config.memory_limit / 10;
  Table table(config);
  std::vector<uint64_t> keep(1000);
  for (uint64_t i = 0; i < keep.size(); ++i) keep[i] = i;
  for (int i = 0; i < 5; ++i) push_ones(table, keep);
  for (uint64_t i = 0; i < 200; ++i) {
    std::vector<uint64_t> fresh(4000);
    for (uint64_t k = 0; k < fresh.size(); ++k) fresh[k] = 1000000 + i * fresh.size() + k;
    push_ones(table, fresh);
    CHECK(table.stats().bytes <= config.memory_limit);
  }
  CHECK(table.stats().peak_bytes <= config.memory_limit);
  CHECK(table.stats().evicted > 0);
  std::vector<float> rows(keep.size() * 7);
  table.pull(keep.data(), keep.size(), false, rows.data());
  for (size_t i = 0; i < keep.size(); ++i) CHECK(rows[i * 7] != 0);  // rows with the highest scores stay
}

}  // namespace clickfleet
