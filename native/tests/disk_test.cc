// The disk tier: a table with a small memory limit and a directory must equal one without limits, bit for bit.
#include "disk.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <random>
#include <thread>

#include "check.h"
#include "cut.h"
#include "table.h"

namespace clickfleet {
namespace {

namespace fs = std::filesystem;

class Folder {
 public:
  Folder() {
    static std::atomic<int> number{0};
    path_ = fs::temp_directory_path() /
            ("clickfleet-core-" + std::to_string(std::random_device()()) + "-" + std::to_string(++number));
    fs::create_directories(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string path() const { return path_.string(); }
  std::vector<fs::path> files() const {
    std::vector<fs::path> all;
    for (const auto& entry : fs::directory_iterator(path_)) all.push_back(entry.path());
    return all;
  }

 private:
  fs::path path_;
};

Config small(int factors, const std::string& folder, size_t limit = size_t{3} << 20) {
  Config config;
  config.factors = factors;
  config.embedx.init = {Init::uniform, -0.1F, 0.1F};
  config.disk = folder;
  if (!folder.empty()) {
    config.memory_limit = limit;
    config.snapshot_reserve = limit / 5;
  }
  return config;
}

// Gives slots 1 and 3 rows of other widths, and perhaps of another rule and admission.
void add_classes(Config& config, bool rules) {
  config.others = {config, config};
  config.others[0].factors = 17;
  config.others[1].factors = 1;
  config.slot_class = {0, 1, 0, 2};
  if (!rules) return;
  config.others[0].embedx.rule = Adam{};
  config.others[1].admission = {Admission::count, 3};
}

// Every column of every row, as bytes.
using Content = std::map<uint64_t, std::string>;

template <class T>
void append(std::string& to, const std::vector<T>& column, size_t i, size_t rows) {
  const size_t width = column.size() / rows;
  to.append(reinterpret_cast<const char*>(column.data() + i * width), width * sizeof(T));
}

Content read(Cut& cut) {
  Content rows;
  Cut::Batch batch;
  uint64_t last[kMostKinds] = {};
  int file[kMostKinds];
  std::fill(std::begin(file), std::end(file), -1);
  while (cut.next(batch)) {
    for (size_t i = 0; i < batch.size; ++i) {
      const uint64_t hash = mix64(batch.key[i]);
      CHECK(file[batch.kind] != batch.file || hash > last[batch.kind]);
      file[batch.kind] = batch.file;
      last[batch.kind] = hash;
      std::string& row = rows[batch.key[i]];
      CHECK(row.empty());
      row.push_back(static_cast<char>(batch.full));
      append(row, batch.slot, i, batch.size);
      append(row, batch.embed_w, i, batch.size);
      append(row, batch.embedx, i, batch.size);
      append(row, batch.show, i, batch.size);
      append(row, batch.click, i, batch.size);
      append(row, batch.unseen_days, i, batch.size);
      append(row, batch.delta_score, i, batch.size);
      append(row, batch.published, i, batch.size);
      append(row, batch.embed_state, i, batch.size);
      append(row, batch.embedx_state, i, batch.size);
    }
  }
  for (const uint64_t key : cut.changed_keys()) rows[key] += "changed";
  for (const uint64_t key : cut.deleted_keys()) rows[key] += "deleted";
  return rows;
}

Content content(Table& table) {
  Cut cut(table, Cut::snapshot, 4);
  return read(cut);
}

std::vector<uint64_t> some_keys(std::mt19937_64& random, size_t n, uint64_t range) {
  std::vector<uint64_t> keys(n);
  for (auto& key : keys) {  // small numbers more often
    const double u = static_cast<double>(random() >> 11) * 0x1p-53;
    key = static_cast<uint64_t>(std::pow(static_cast<double>(range), u));
  }
  return keys;
}

void push(Table& table, const std::vector<uint64_t>& keys, float g) {
  const auto width = static_cast<size_t>(1 + table.widest());
  std::vector<float> grads(keys.size() * width);
  std::vector<uint16_t> slots(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) slots[i] = static_cast<uint16_t>(keys[i] % 4);
  for (size_t i = 0; i < grads.size(); ++i) grads[i] = g * static_cast<float>(i % 7 + keys[i / width] % 5) / 8;
  const std::vector<float> click(keys.size(), static_cast<float>(keys.size() % 3 == 0));
  Push push;
  push.keys = keys.data();
  push.grads = grads.data();
  push.click = click.data();
  push.slot = slots.data();
  push.size = keys.size();
  table.push(push);
}

std::vector<float> pull(const Table& table, const std::vector<uint64_t>& keys, bool training) {
  std::vector<float> rows(keys.size() * static_cast<size_t>(1 + table.widest()), -7);
  table.pull(keys.data(), keys.size(), training, rows.data());
  return rows;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Plays the same random history on both tables and compares everything that can be seen.
void play(Table& table, Table& unlimited, uint64_t seed, int rounds, uint64_t range) {
  std::mt19937_64 random(seed);
  const auto each = [&](const auto& call) {
    call(table);
    call(unlimited);
  };
  for (int round = 0; round < rounds; ++round) {
    const auto keys = some_keys(random, 1 + random() % 4000, range);
    if (random() % 3 != 0) table.announce(keys.data(), keys.size());
    if (random() % 4 != 0) CHECK(same(pull(table, keys, true), pull(unlimited, keys, true)));
    const float g = static_cast<float>(random() % 7) - 3;
    each([&](Table& one) { push(one, keys, g); });
    CHECK(table.stats().bytes <= table.config().memory_limit);
    CHECK(table.stats().rows == unlimited.stats().rows);
    CHECK(table.stats().full_rows == unlimited.stats().full_rows);
    switch (random() % 14) {
      case 0:
        CHECK(table.shrink() == unlimited.shrink());
        break;
      case 1:
        each([](Table& one) { one.end_day(); });
        break;
      case 2: {
        const auto asked = some_keys(random, 3000, 2 * range);
        CHECK(same(pull(table, asked, false), pull(unlimited, asked, false)));
        std::vector<uint8_t> a(asked.size()), b(asked.size());
        table.known(asked.data(), asked.size(), a.data());
        unlimited.known(asked.data(), asked.size(), b.data());
        CHECK(a == b);
        break;
      }
      case 3:
      case 4:
      case 5: {  // publish, with pushes and days in the midst
        const bool whole = !unlimited.tracking() || random() % 3 == 0, abort = random() % 3 == 0,
                   aging = random() % 3 == 0;
        const auto more = some_keys(random, 2000, range);
        Cut a(table, whole ? Cut::base : Cut::changes, 1), b(unlimited, whole ? Cut::base : Cut::changes, 1);
        if (random() % 2 == 0) each([&](Table& one) { push(one, more, 1); });
        std::thread shrinking([&] {
          if (aging) CHECK(table.shrink() == unlimited.shrink());
        });
        const Content x = read(a), y = read(b);
        shrinking.join();
        CHECK(x == y);
        if (random() % 2 == 0) each([&](Table& one) { push(one, more, 2); });
        if (random() % 2 == 0) each([](Table& one) { one.end_day(); });
        if (random() % 3 == 0) CHECK(content(table) == content(unlimited));
        abort ? a.abort() : a.commit();
        abort ? b.abort() : b.commit();
        break;
      }
      case 6:
      case 7: {  // a snapshot is of its moment
        const auto more = some_keys(random, 2000, range);
        Cut a(table, Cut::snapshot, 8), b(unlimited, Cut::snapshot, 8);
        std::thread pushing([&] { each([&](Table& one) { push(one, more, 1); }); });
        const Content x = read(a);
        pushing.join();
        CHECK(x == read(b));
        break;
      }
      case 8: {
        const auto some = some_keys(random, 50, 2 * range);
        each([&](Table& one) { one.restore_readers(some.data(), some.size()); });
        break;
      }
      case 9:
        CHECK(content(table) == content(unlimited));
        break;
      case 10:
      case 11: {  // take the changes at once, also while a snapshot is read
        if (!unlimited.tracking()) break;
        std::optional<Cut> a, b;
        if (random() % 2 == 0) {
          a.emplace(table, Cut::snapshot, 4);
          b.emplace(unlimited, Cut::snapshot, 4);
        }
        std::thread saving([&] {
          if (a) CHECK(read(*a) == read(*b));
        });
        Cut taken(table), expected(unlimited);
        CHECK(read(taken) == read(expected));
        saving.join();
        break;
      }
      default:
        break;
    }
  }
  table.wait_for_disk();
  CHECK(content(table) == content(unlimited));
  CHECK(table.stats().peak_bytes <= table.config().memory_limit);
}

}  // namespace

TEST(rows_on_disk_equal_rows_in_memory) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    const Folder folder;
    Config a = small(seed % 2 == 0 ? 8 : 3, folder.path(),
                     (seed == 5   ? size_t{5}
                      : seed == 6 ? size_t{9}
                                  : size_t{3})
                         << 20);
    if (seed > 4) add_classes(a, seed == 6);
    a.disk_ring = seed != 3;
    if (seed > 1 && seed != 6) {
      a.policy.decay_rate = 0.9;
      a.policy.delete_threshold = 0.09;
      a.policy.base_threshold = 0.15;
      a.policy.delta_threshold = seed == 4 ? 0.2 : 0;
      a.policy.delta_keep_days = 4;
      a.policy.delete_after_unseen_days = 9;
    }
    if (seed > 2 && seed < 5) a.admission = {Admission::count, 2};
    Config b = a;
    b.disk.clear();
    b.memory_limit = b.snapshot_reserve = 0;
    Table table(a), unlimited(b);
    play(table, unlimited, 10 + seed, 100, seed > 4 ? 2000000 : 200000);
    const Stats stats = table.stats();
    std::fprintf(stderr,
                 "  %llu rows, %llu on disk, %llu spilled, %llu fetched, %llu read, %llu waited for, %llu segments\n",
                 static_cast<unsigned long long>(stats.rows), static_cast<unsigned long long>(stats.disk_rows),
                 static_cast<unsigned long long>(stats.spilled), static_cast<unsigned long long>(stats.fetched),
                 static_cast<unsigned long long>(stats.disk_reads), static_cast<unsigned long long>(stats.disk_waits),
                 static_cast<unsigned long long>(stats.segments));
    CHECK(stats.spilled > 0 && stats.fetched > 0);
  }
}

// One thread pushes to its own keys, so that each of them must read what it wrote, wherever the row is.
TEST(threads_share_both_tiers) {
  const Folder folder;
  Config config = small(3, folder.path());
  config.embed.rule = config.embedx.rule = Sgd{1.0F};
  config.embed.scale = config.embedx.scale = Scale::none;
  config.embed.bounds = config.embedx.bounds = {-1e9F, 1e9F};
  config.embedx.init = {};
  Table table(config);
  constexpr int kThreads = 3;
  constexpr uint64_t kKeys = 16000;
  std::atomic<int> running{kThreads};
  std::atomic<uint64_t> rows_made{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      std::mt19937_64 random(static_cast<uint64_t>(t));
      std::vector<float> level(kKeys, 0);
      for (int n = 0; n < 60; ++n) {
        std::vector<uint64_t> keys;
        for (uint64_t i = 0; i < kKeys; ++i)
          if (random() % 8 == 0) keys.push_back(i * kThreads + static_cast<uint64_t>(t));
        if (n % 2 == 0) table.announce(keys.data(), keys.size());
        const auto rows = pull(table, keys, true);
        for (size_t i = 0; i < keys.size(); ++i)
          for (size_t c = 0; c < 4; ++c) CHECK(rows[i * 4 + c] == -level[keys[i] / kThreads]);
        const std::vector<float> ones(keys.size() * 4, 1);
        Push push;
        push.keys = keys.data();
        push.grads = ones.data();
        push.size = keys.size();
        table.push(push);
        for (const uint64_t key : keys) rows_made += (level[key / kThreads] += 1) == 1;
      }
      --running;
    });
  std::thread aging([&] {
    while (running > 0) {
      table.shrink();
      table.end_day();
      const Stats stats = table.stats();
      CHECK(stats.bytes <= config.memory_limit && stats.rows >= stats.disk_rows);
    }
  });
  int cuts = 0;
  while (running > 0 || cuts == 0) {
    if (cuts % 2 == 0) {
      content(table);
    } else {
      Cut cut(table, table.tracking() ? Cut::changes : Cut::base, 1);
      read(cut);
      cuts % 4 == 1 ? cut.commit() : cut.abort();
    }
    ++cuts;
  }
  for (auto& thread : threads) thread.join();
  aging.join();
  CHECK(table.stats().rows == rows_made);
  CHECK(table.stats().disk_rows > 0);
  CHECK(table.stats().peak_bytes <= config.memory_limit);
  std::fprintf(stderr, "  %d cuts\n", cuts);
}

TEST(wide_rows_go_to_disk) {
  const Folder folder;
  Config a = small(400, folder.path(), size_t{110} << 20), b = small(400, "");
  a.embedx.rule = b.embedx.rule = Adam{};
  a.snapshot_reserve = size_t{10} << 20;
  Table table(a), unlimited(b);
  std::mt19937_64 random(5);
  for (int n = 0; n < 30; ++n) {
    const auto keys = some_keys(random, 1500, 300000);
    push(table, keys, 1);
    push(unlimited, keys, 1);
  }
  CHECK(table.stats().spilled > 0);
  CHECK(content(table) == content(unlimited));
}

TEST(the_disk_limit_deletes_the_same_rows_whatever_the_memory) {
  const Folder one, other;
  Config a = small(8, one.path()), b = small(8, other.path(), size_t{64} << 20);
  a.disk_limit = b.disk_limit = size_t{16} << 20;
  a.admission = b.admission = {Admission::count, 2};
  Table little(a), much(b);
  std::mt19937_64 random(9);
  for (int n = 0; n < 120; ++n) {
    const auto keys = some_keys(random, 4000, 2000000000);
    push(little, keys, 1);
    push(much, keys, 1);
    if (n % 40 == 20) CHECK(little.shrink() == much.shrink());
    if (n % 15 == 14)
      for (Table* table : {&little, &much}) {
        Cut cut(*table, table->tracking() ? Cut::changes : Cut::base, 1);
        read(cut);
        cut.commit();
      }
    CHECK(little.stats().evicted == much.stats().evicted);
  }
  CHECK(little.stats().evicted > 1000);
  CHECK(content(little) == content(much));
  CHECK(little.stats().peak_disk_bytes <= a.disk_limit);
  CHECK(little.stats().peak_bytes <= a.memory_limit);
  CHECK(much.stats().spilled == 0);
}

TEST(a_saved_table_loads_into_both_tiers) {
  const Folder folder;
  Config b = small(8, "");
  b.admission = {Admission::count, 2};
  Table unlimited(b);
  std::mt19937_64 random(2);
  for (int n = 0; n < 60; ++n) push(unlimited, some_keys(random, 4000, 300000), 1);
  Config a = b;
  a.disk = folder.path();
  a.memory_limit = size_t{3} << 20;
  a.snapshot_reserve = a.memory_limit / 5;
  Table table(a);
  const Stats stats = unlimited.stats();
  std::vector<uint64_t> counts;
  for (const auto& of : stats.kinds) counts.push_back(of.rows);
  table.reserve(counts);
  // Saved rows come in order of their hashes: a shelf that changed its size meanwhile would be crowded at one end.
  const auto shelves = [&] {
    uint64_t bytes = 0;
    for (const auto& of : table.stats().kinds) bytes += of.bytes;
    return bytes;
  };
  const uint64_t reserved = shelves();
  CHECK(reserved > a.memory_limit / 4);
  {
    Cut cut(unlimited, Cut::snapshot, 4);
    Cut::Batch batch;
    while (cut.next(batch))
      table.restore({batch.size, batch.kind, batch.key.data(), batch.slot.data(), batch.show.data(), batch.click.data(),
                     batch.unseen_days.data(), batch.delta_score.data(), batch.published.data(), batch.embed_w.data(),
                     batch.embed_state.data(), batch.embedx.data(), batch.embedx_state.data()},
                    0, kVirtualShards);
  }
  CHECK(shelves() == reserved);
  CHECK(content(table) == content(unlimited));
  CHECK(table.stats().disk_rows > 0 && table.stats().disk_rows < stats.rows);
  CHECK(table.stats().peak_bytes <= a.memory_limit);
  play(table, unlimited, 3, 15, 300000);
}

template <class Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(a_damaged_segment_is_reported) {
  const Folder folder;
  Table table(small(3, folder.path()));
  std::vector<uint64_t> keys(60000);
  for (uint64_t i = 0; i < keys.size(); ++i) keys[i] = i;
  push(table, keys, 1);
  table.wait_for_disk();
  CHECK(table.stats().disk_rows > 10000);
  for (const auto& path : folder.files()) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    for (int at = 40; at < static_cast<int>(fs::file_size(path)); at += 64) {
      file.seekp(at);
      file.put('x');
    }
  }
  const std::string error = error_of([&] { pull(table, keys, true); });
  CHECK(error.find("does not match its checksum") != std::string::npos);
  CHECK(error.find(folder.path()) != std::string::npos);
  CHECK(error_of([&] { content(table); }).find("checksum") != std::string::npos);
}

TEST(a_directory_that_cannot_be_used_is_reported) {
  const Folder folder;
  const auto error = [&](const std::string& path) { return error_of([&] { const Table table(small(3, path)); }); };
  CHECK(error(folder.path() + "/nowhere").find("cannot create " + folder.path() + "/nowhere") == 0);
  CHECK(error(folder.path()).empty());
  Config config = small(3, folder.path());
  config.memory_limit = config.snapshot_reserve = 0;
  CHECK(error_of([&] { const Table table(config); }).find("needs a memory limit") != std::string::npos);
  config = small(3, folder.path());
  config.disk_limit = 1;
  CHECK(error_of([&] { const Table table(config); }).find("disk_limit is too small") != std::string::npos);
  CHECK(folder.files().empty());
}

}  // namespace clickfleet
