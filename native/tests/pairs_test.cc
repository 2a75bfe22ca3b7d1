#include "pairs.h"

#include <cmath>
#include <cstring>
#include <map>
#include <thread>

#include "check.h"
#include "cut.h"

namespace clickfleet {
namespace {

constexpr uint32_t kWords = 200;
constexpr int kDim = 21;

uint64_t in_key(uint32_t id) { return 1000 + id; }
uint64_t out_key(uint32_t id) { return 5000 + id; }

Words vocabulary() {
  std::vector<uint64_t> in, out;
  std::vector<double> keep, noise;
  for (uint32_t id = 0; id < kWords; ++id) {
    in.push_back(in_key(id));
    out.push_back(out_key(id));
    keep.push_back(1);
    noise.push_back(1.0 + id);
  }
  return {in.data(), out.data(), keep.data(), noise.data(), kWords};
}

Config sgd() {
  Config config;
  config.factors = kDim;
  for (Part* part : {&config.embed, &config.embedx}) {
    part->rule = Sgd{};
    part->scale = Scale::none;
  }
  config.embedx.init = {Init::uniform, -0.1F, 0.1F};
  return config;
}

std::vector<uint64_t> all_keys() {
  std::vector<uint64_t> keys;
  for (uint32_t id = 0; id < kWords; ++id) keys.push_back(in_key(id));
  for (uint32_t id = 0; id < kWords; ++id) keys.push_back(out_key(id));
  return keys;
}

void create(Table& table) {
  const auto keys = all_keys();
  const std::vector<float> nothing(keys.size() * (1 + kDim), 0.0F);
  Push push;
  push.keys = keys.data();
  push.grads = nothing.data();
  push.size = keys.size();
  push.move = Move::add;
  table.push(push);
}

struct Text {
  std::vector<uint64_t> keys;
  std::vector<int64_t> offsets{0};
};

Text text(uint64_t seed, int sentences) {
  Random random{seed};
  Text out;
  for (int i = 0; i < sentences; ++i) {
    for (int j = 0; j < 12; ++j) out.keys.push_back(in_key(Random::below(random(), kWords)));
    out.keys.push_back(7);  // not a word
    out.offsets.push_back(static_cast<int64_t>(out.keys.size()));
  }
  return out;
}

std::vector<float> pull(const Table& table) {
  const auto keys = all_keys();
  std::vector<float> rows(keys.size() * (1 + kDim));
  table.pull(keys.data(), keys.size(), false, rows.data());
  return rows;
}

}  // namespace

TEST(noise_is_drawn_by_weight) {
  const Words words = vocabulary();
  Random random{1};
  std::vector<double> seen(kWords);
  constexpr int draws = 400000;
  for (int i = 0; i < draws; ++i) ++seen[words.draw(random())];
  const double total = kWords * (kWords + 1) / 2.0;
  double chi = 0;
  for (uint32_t id = 0; id < kWords; ++id) {
    const double expected = draws * (1.0 + id) / total;
    chi += (seen[id] - expected) * (seen[id] - expected) / expected;
  }
  CHECK(chi < 300);  // 199 degrees of freedom: above 300 once in 200,000 tries
}

TEST(in_place_is_the_way_by_pull_and_push) {
  const Words words = vocabulary();
  Table one(sgd()), two(sgd());
  create(one);
  create(two);
  const auto keys = all_keys();
  InPlace held(one, keys.data(), keys.size());
  Pairs a(words, 3, 4), b(words, 3, 4);
  for (uint64_t step = 0; step < 20; ++step) {
    const Text some = text(step, 10);
    a.draw(some.keys.data(), some.offsets.data(), 10, 1, step);
    a.train(held, 0.05F, true, step % 2 == 1);
    b.draw(some.keys.data(), some.offsets.data(), 10, 1, step);
    const size_t n = b.gather();
    std::vector<uint64_t> mine(n);
    std::vector<float> show(n), rows(n * (1 + kDim)), grads(n * (1 + kDim));
    std::vector<uint16_t> slots(n);
    b.rows(mine.data(), show.data(), slots.data());
    two.pull(mine.data(), n, true, rows.data());
    b.move(rows.data(), kDim, 0.05F, 0.05F, true, {}, {}, grads.data());
    Push push;
    push.keys = mine.data();
    push.grads = grads.data();
    push.show = show.data();
    push.size = n;
    two.push(push);
    CHECK(std::fabs(a.loss() - b.loss()) < 1e-3);
    CHECK(a.words() == 120 && a.size() == b.size());
  }
  const auto x = pull(one), y = pull(two);
  for (size_t i = 0; i < x.size(); ++i) CHECK(std::fabs(x[i] - y[i]) < 1e-5);
}

// Several threads update the same rows while a snapshot is read. It must contain the rows as they were when it was
// made.
TEST(a_cut_sees_no_row_half_trained_in_place) {
  const Words words = vocabulary();
  Table table(sgd());
  create(table);
  const auto keys = all_keys();
  const auto before = pull(table);
  std::atomic<bool> stop{false};
  std::atomic<int> steps{0};
  Cut cut(table, Cut::snapshot, 1);
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 3; ++t)
    threads.emplace_back([&, t] {
      InPlace held(table, keys.data(), keys.size());
      Pairs pairs(words, 3, 4);
      for (uint64_t step = t; !stop; step += 3) {
        const Text some = text(step, 5);
        pairs.draw(some.keys.data(), some.offsets.data(), 5, 1, step);
        pairs.train(held, 0.05F, true, true);
        ++steps;
      }
    });
  while (steps < 20) std::this_thread::yield();
  std::map<uint64_t, std::vector<float>> saved;
  Cut::Batch batch;
  while (cut.next(batch))
    for (size_t i = 0; i < batch.size; ++i) {
      std::vector<float> row{batch.embed_w[i]};
      row.insert(row.end(), batch.embedx.begin() + static_cast<ptrdiff_t>(i * kDim),
                 batch.embedx.begin() + static_cast<ptrdiff_t>((i + 1) * kDim));
      saved[batch.key[i]] = row;
    }
  stop = true;
  for (auto& thread : threads) thread.join();
  cut.close();
  CHECK(saved.size() == keys.size());
  for (size_t i = 0; i < keys.size(); ++i)
    CHECK(std::memcmp(saved[keys[i]].data(), before.data() + i * (1 + kDim), 4 * (1 + kDim)) == 0);
  const auto after = pull(table);
  CHECK(std::memcmp(after.data(), before.data(), 4 * after.size()) != 0);
}

TEST(rows_that_move_are_found_again) {
  const Words words = vocabulary();
  Table table(sgd());
  create(table);
  const auto keys = all_keys();
  InPlace held(table, keys.data(), keys.size());
  Pairs pairs(words, 3, 4);
  for (uint64_t step = 0; step < 5; ++step) {
    const Text some = text(step, 10);
    pairs.draw(some.keys.data(), some.offsets.data(), 10, 1, step);
    const auto before = pull(table);
    pairs.train(held, 0.05F, true, false);
    const auto after = pull(table);
    CHECK(std::memcmp(after.data(), before.data(), 4 * after.size()) != 0);
    std::vector<uint64_t> others;  // the shelves grow
    for (uint64_t i = 0; i < 5000; ++i) others.push_back(1000000 * (step + 1) + i);
    const std::vector<float> nothing(others.size() * (1 + kDim), 0.0F);
    Push push;
    push.keys = others.data();
    push.grads = nothing.data();
    push.size = others.size();
    table.push(push);
    const auto still = pull(table);
    CHECK(std::memcmp(after.data(), still.data(), 4 * after.size()) == 0);
  }
}

TEST(pairs_give_the_same_bits_on_every_cpu_level) {
  const Words words = vocabulary();
  const std::vector<float> start = [] {
    std::vector<float> rows(7 * (1 + kDim));
    Random random{5};
    for (float& x : rows) x = static_cast<float>(random() >> 40) * 0x1p-24F - 0.5F;
    return rows;
  }();
  const Sigmoid sigmoid;
  std::vector<float> found[2];
  const char* const levels[2] = {"base", cpu_level()};
  for (int level = 0; level < 2; ++level) {
    std::vector<float> rows = start, scratch(3 * kDim), logits(6);
    std::vector<float*> targets;
    for (int i = 1; i < 7; ++i) targets.push_back(rows.data() + i * (1 + kDim));
    const StepSettings settings{
        kDim, 0.05F, {}, {}, true, false, scratch.data(), scratch.data() + kDim, scratch.data() + 2 * kDim, &sigmoid};
    const Window window{rows.data(), nullptr, targets.data(), nullptr, 6, 3, logits.data()};
    kernels(levels[level]).move_pairs(window, settings);
    rows.insert(rows.end(), logits.begin(), logits.end());
    found[level] = rows;
  }
  CHECK(std::memcmp(found[0].data(), found[1].data(), 4 * found[0].size()) == 0);
  CHECK(std::memcmp(found[0].data(), start.data(), 4 * start.size()) != 0);
}

}  // namespace clickfleet
