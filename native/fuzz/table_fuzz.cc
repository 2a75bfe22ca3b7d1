// A table under any sequence of calls, and its cuts.
#include <optional>

#include "cut.h"
#include "fuzz.h"
#include "table.h"

using namespace clickfleet;
using clickfleet::fuzz::Input;
using clickfleet::fuzz::raw;

namespace {

Config config_of(Input& in, bool limited) {
  Config config;
  config.factors = static_cast<int>(in.below(4));
  config.admission.by = static_cast<Admission::By>(in.below(4));
  config.admission.threshold = static_cast<double>(in.below(4)) / 2;
  config.policy.delta_threshold = static_cast<double>(in.below(3)) / 4;
  config.policy.base_threshold = static_cast<double>(in.below(3)) / 4;
  config.policy.decay_rate = 0.5;
  config.policy.delete_threshold = static_cast<double>(in.below(3)) / 4;
  if (in.below(2) != 0) config.padding = 3;
  for (size_t n = in.below(3); n > 0; --n) {  // slots of other widths, rules and admissions
    RowClass& other = config.others.emplace_back(config);
    other.factors = static_cast<int>(in.below(5));
    other.admission.by = static_cast<Admission::By>(in.below(4));
    if (in.below(2) != 0) other.embedx.rule = Adam{};
    config.slot_class.push_back(static_cast<uint8_t>(in.below(config.others.size() + 1)));
  }
  if (limited) {
    config.memory_limit = size_t{48} << 20;
    config.snapshot_reserve = size_t{40} << 20;
  }
  return config;
}

// Keys of a few bytes, so that they repeat.
std::vector<uint64_t> keys_of(Input& in) {
  std::vector<uint64_t> keys(in.below(24));
  for (auto& key : keys) key = in.take<uint8_t>();
  return keys;
}

void push(Table& table, Input& in) {
  const auto keys = keys_of(in);
  const auto width = static_cast<size_t>(1 + table.widest());
  std::vector<float> grads(keys.size() * width, in.take<float>());
  const std::vector<float> show(keys.size(), static_cast<float>(in.below(4)));
  std::vector<uint16_t> slots(keys.size());
  for (auto& slot : slots) slot = static_cast<uint16_t>(in.below(4));
  table.push({keys.data(), grads.data(), show.data(), nullptr, slots.data(), keys.size(), in.take<float>(), false,
              static_cast<Move>(in.below(3))});
}

void pull(const Table& table, Input& in) {
  const auto keys = keys_of(in);
  std::vector<float> out(keys.size() * static_cast<size_t>(1 + table.widest()));
  table.pull(keys.data(), keys.size(), in.below(2) != 0, out.data());
  std::vector<uint8_t> known(keys.size());
  table.known(keys.data(), keys.size(), known.data());
}

void restore(Table& table, Input& in) {
  const auto keys = keys_of(in);
  const size_t n = keys.size();
  const Layout& layout = table.layout();
  const std::vector<uint16_t> small(n, static_cast<uint16_t>(in.below(4)));
  const RowKind kind = kind_of(n == 0 ? 0 : table.class_of_slot(small[0]), in.below(2) != 0);
  const std::vector<double> shows(n, 1.0);
  const std::vector<uint8_t> flags(n, static_cast<uint8_t>(in.below(2)));
  const std::vector<float> one(n, in.take<float>()), state(n * static_cast<size_t>(layout.embed_state(kind)), 1.0F),
      x(n * static_cast<size_t>(layout.factors(kind)), 1.0F),
      x_state(n * static_cast<size_t>(layout.embedx_state(kind)), 1.0F);
  table.restore({n, kind, keys.data(), small.data(), shows.data(), shows.data(), small.data(), one.data(), flags.data(),
                 one.data(), state.data(), x.data(), x_state.data()},
                static_cast<int>(in.below(4)), 1024);
}

void read_to_the_end(Cut& cut) {
  Cut::Batch batch;
  while (cut.next(batch)) CHECK(batch.size == batch.key.size());
}

// A call that is invalid at this point is rejected, and the sequence continues.
template <class Call>
void attempt(const Call& call) {
  try {
    call();
  } catch (const Error&) {
  }
}

void history(Input& in, bool limited) {
  Table table(config_of(in, limited));
  std::optional<Cut> cut;
  while (!in.empty()) {
    switch (in.below(14)) {
      case 0:
      case 1:
        if (limited && cut) read_to_the_end(*cut);  // otherwise a push would wait until it is read
        push(table, in);
        break;
      case 2:
        pull(table, in);
        break;
      case 3:
        table.shrink();
        break;
      case 4:
        table.end_day();
        break;
      case 5:
        attempt([&] {
          cut.reset();
          cut.emplace(table, static_cast<Cut::Kind>(in.below(3)), 1 << in.below(6));
        });
        break;
      case 6:
        if (cut) {
          Cut::Batch batch;
          cut->next(batch);
        }
        break;
      case 7:
        if (cut) read_to_the_end(*cut);
        break;
      case 8:
        if (cut) attempt([&] { cut->commit(); });
        break;
      case 9:
        if (cut) attempt([&] { cut->abort(); });
        break;
      case 10:
        if (cut) cut->close();
        break;
      case 12:
        if (limited && cut) read_to_the_end(*cut);
        attempt([&] {
          Cut taken(table);
          read_to_the_end(taken);
        });
        break;
      case 11: {
        const auto changed = keys_of(in), deleted = keys_of(in);
        table.restore_changes(changed.data(), changed.size(), deleted.data(), deleted.size());
        table.restore_readers(changed.data(), changed.size());
        break;
      }
      default:
        if (limited && cut) read_to_the_end(*cut);
        restore(table, in);
    }
  }
  cut.reset();
  const Stats stats = table.stats();
  CHECK(stats.full_rows <= stats.rows && (!limited || stats.bytes <= table.config().memory_limit));
  Cut last(table, Cut::snapshot, 4);
  uint64_t rows = 0;
  for (Cut::Batch batch; last.next(batch);) rows += batch.size;
  CHECK(rows == stats.rows);
}

}  // namespace

FUZZ(table, raw("\2\0\0\0\0\0\0\0\4abcd\0\0\0\0\1\0\0\x80\x3f\0\2\3abc\1\5\0\2\6\0\3xyz\7"),
     raw("\2\1\2\1\1\1\0\0\6abcdef\0\0\x80\x3f\1\0\0\x80\x3f\0\5\1\0\7\x8\0\3abc\3\5\2\0\7\x9")) {
  history(in, false);
}

FUZZ(limited_table, raw("\2\0\0\0\0\0\0\0\4abcd\0\0\0\0\1\0\0\x80\x3f\0\2\3abc\1\5\0\2\6\0\3xyz\7")) {
  history(in, true);
}

// Numbers that a checkpoint file may contain.
FUZZ(memory_numbers, raw("\2\0\0\0\0\0\0\1\0\0\0\0\0\0\0")) {
  Table table(config_of(in, true));
  std::vector<uint64_t> numbers((table.layout().kinds() + Cut::kLists) * kStripes + 1);
  const auto few = in.some<uint64_t>(12);
  if (in.below(4) != 0)
    for (size_t i = 0; i + 1 < numbers.size(); ++i) numbers[i] = few.empty() ? 0 : few[i % few.size()] >> in.below(64);
  else
    numbers.resize(few.size());
  table.prepare(numbers);
  push(table, in);
  table.settle(numbers);
  push(table, in);
  CHECK(table.stats().bytes <= table.config().memory_limit);
}
