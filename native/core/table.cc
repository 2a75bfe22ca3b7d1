#include "table.h"

#include <algorithm>

#include "cut.h"
#include "floats.h"
#include "plan.h"
#include "sweep.h"

namespace clickfleet {
namespace {

thread_local Plan plan;  // scratch memory of the current call

Layout layout_of(const Config& config) {
  const auto state = [](const Rule& rule, int n) {
    return std::visit([n](const auto& r) { return r.state(n); }, rule);
  };
  return {config.factors, state(config.embed.rule, 1),
          config.factors > 0 ? state(config.embedx.rule, config.factors) : 0};
}

bool at_birth(const Config& config) {
  const Admission& admission = config.admission;
  return admission.by == Admission::birth || config.factors == 0 ||
         (admission.by != Admission::probability && admission.threshold <= 0);
}

const void* address(const Rule& rule) {
  return std::visit([](const auto& r) -> const void* { return &r; }, rule);
}

void init_part(const Part& part, uint64_t seed, uint64_t key, uint32_t column, int n, float* w, float* state) {
  part.weights(seed, key, column, n, w);
  std::visit([&](const auto& rule) { rule.init(w, state, n); }, part.rule);
}

}  // namespace

Table::Table(const Config& config)
    : config_(config),
      layout_(layout_of(config)),
      at_birth_(at_birth(config)),
      apply_embed_(kernels().apply[config.embed.rule.index()]),
      apply_embedx_(kernels().apply[config.embedx.rule.index()]),
      embed_rule_(address(config_.embed.rule)),
      embedx_rule_(address(config_.embedx.rule)) {
  for (int s = 0; s < kStripes; ++s) stripes_.push_back(std::make_unique<Stripe>(lasting_, budget_, layout_));
  if (config_.memory_limit == 0) return;
  // The minimum: a few buckets per stripe, and one piece of work in the undo log.
  const size_t rows = kStripes * 8 * stripes_[0]->shelves[1].bytes_if(1);
  const size_t log = kStripes * ImageLog::kBlock + 4 * kPiece * static_cast<size_t>(layout_.bytes(true) + 1);
  if (config_.snapshot_reserve < log || config_.memory_limit < config_.snapshot_reserve + rows)
    throw Error("memory_limit is too small: this table needs at least " + std::to_string(rows / 1024) +
                " KiB for rows and a snapshot_reserve of " + std::to_string(log / 1024) + " KiB");
}

Table::~Table() = default;

// ---- push ----

// One key of a push with all its occurrences merged.
struct Table::Item {
  uint64_t hash, key;
  const float* g;
  double show, click;
  uint16_t slot;
};

void Table::push(const Push& push) {
  make_room();
  const Gate::Pass pass(gate_, false);
  plan.make(push.keys, push.size);
  thread_local std::vector<Item> items;
  const auto piece = [&](uint32_t at, uint32_t n) { return cut_ == nullptr ? n : std::min(n - at, kPiece); };
  // Near the limit, the order of stripes decides which rows get the last memory, so it must be deterministic.
  const bool in_order = may_fill_up(push.size);
  plan.each_stripe(
      [&](int s, bool wait) {
        const uint32_t images = piece(0, plan.end[s] - plan.begin[s]);
        take_undo(images);
        if (wait || in_order ? (stripes_[s]->lock.lock(), true) : stripes_[s]->lock.try_lock()) return true;
        give_back_undo(images);
        return false;
      },
      [&](int s) {
        Stripe& stripe = *stripes_[s];
        std::unique_lock guard(stripe.lock, std::adopt_lock);
        merge(plan, s, push, items);
        const auto count = plan.end[s] - plan.begin[s], n = static_cast<uint32_t>(items.size());
        give_back_undo(piece(0, count) - piece(0, n));  // merged keys need less room
        for (uint32_t at = 0, size = piece(0, n); at < n; at += size, size = piece(at, n)) {
          if (at > 0) {
            guard.unlock();
            take_undo(size);
            guard.lock();
          }
          push_items(stripe, items.data() + at, size, push);
          give_back_undo(size);
        }
      });
}

void Table::known(const uint64_t* keys, size_t n, uint8_t* out) const {
  plan.make(keys, n);
  plan.each_stripe(
      [&](int s, bool wait) {
        return wait ? (stripes_[s]->lock.lock_shared(), true) : stripes_[s]->lock.try_lock_shared();
      },
      [&](int s) {
        const Stripe& stripe = *stripes_[s];
        const std::shared_lock guard(stripe.lock, std::adopt_lock);
        // Pipelined as in pull.cc: prefetch the tags of one key, prefetch the row of an earlier key, answer for a still
        // earlier one.
        constexpr uint32_t kAhead = 16;
        const uint64_t* hash = plan.hash.data() + plan.begin[s];
        const uint32_t *where = plan.where.data() + plan.begin[s], count = plan.end[s] - plan.begin[s];
        for (uint32_t i = 0; i < count + 2 * kAhead; ++i) {
          if (i < count) stripe.prefetch_tags(hash[i]);
          if (const uint32_t j = i - kAhead; j < count)
            if (const Ref ref = stripe.guess(hash[j]); ref) stripe.shelves[ref.full()].prefetch_hot(ref.slot());
          if (const uint32_t j = i - 2 * kAhead; j < count)
            out[where[j]] = stripe.find(hash[j], keys[where[j]]) ? 1 : 0;
        }
      });
}

namespace {

// Finds duplicate keys in one stripe of a push: a small table that stays in the first-level cache.
class DuplicateFinder {
 public:
  void reset(uint32_t n) {
    uint32_t size = 64;
    while (size < 2 * n) size *= 2;
    slots_.assign(size, 0);
  }
  // Returns the position at which `hash` was first put, or `at` if it is new.
  uint32_t put(uint64_t hash, uint32_t at, const std::vector<uint64_t>& hashes) {
    const auto mask = static_cast<uint32_t>(slots_.size() - 1);
    uint32_t i = static_cast<uint32_t>(hash >> 10) & mask;
    for (; slots_[i] != 0; i = (i + 1) & mask)
      if (hashes[slots_[i] - 1] == hash) return slots_[i] - 1;
    slots_[i] = at + 1;
    return at;
  }

 private:
  std::vector<uint32_t> slots_;
};

}  // namespace

void Table::merge(const Plan& p, int s, const Push& push, std::vector<Item>& items) const {
  thread_local std::vector<uint64_t> hashes;  // of the items
  thread_local std::vector<float> merged;
  thread_local DuplicateFinder seen;
  const auto width = static_cast<size_t>(1 + config_.factors);
  const uint32_t count = p.end[s] - p.begin[s];
  items.clear();
  hashes.clear();
  merged.clear();
  merged.reserve(count * width);  // no reallocation: items point into it
  if (!push.distinct) seen.reset(count);
  for (uint32_t i = p.begin[s]; i < p.end[s]; ++i) {
    const uint32_t from = p.where[i];
    if (config_.padding && push.keys[from] == *config_.padding) continue;
    const float* g = push.grads + from * width;
    const double show = push.show == nullptr ? 1.0 : push.show[from];
    const double click = push.click == nullptr ? 0.0 : push.click[from];
    const auto at = static_cast<uint32_t>(items.size());
    const uint32_t first = push.distinct ? at : seen.put(p.hash[i], at, hashes);
    if (first == at) {
      items.push_back({p.hash[i], push.keys[from], g, show, click, push.slot == nullptr ? kNoSlot : push.slot[from]});
      if (!push.distinct) hashes.push_back(p.hash[i]);
      continue;
    }
    Item& item = items[first];
    if (item.g < merged.data() || item.g >= merged.data() + merged.size()) {
      merged.insert(merged.end(), item.g, item.g + width);
      item.g = merged.data() + merged.size() - width;
    }
    auto* sum = const_cast<float*>(item.g);
    for (size_t c = 0; c < width; ++c) sum[c] += g[c];
    item.show += show;
    item.click += click;
    if (push.slot != nullptr) item.slot = push.slot[from];
  }
}

void Table::push_items(Stripe& stripe, const Item* items, size_t size, const Push& push) {
  // Pipelined as in pull.cc: prefetch the tags of one block, prefetch the rows of the previous block, update the block
  // before that.
  constexpr size_t kBlock = 16;
  Ref guesses[2][kBlock];
  const size_t blocks = (size + kBlock - 1) / kBlock;
  for (size_t step = 0; step < blocks + 2; ++step) {
    if (step < blocks)
      for (size_t i = step * kBlock; i < std::min(size, (step + 1) * kBlock); ++i) stripe.prefetch_tags(items[i].hash);
    if (const size_t b = step - 1; step >= 1 && b < blocks) {
      const size_t count = std::min(kBlock, size - b * kBlock);
      for (size_t i = 0; i < count; ++i) {
        const Ref ref = guesses[b % 2][i] = stripe.guess(items[b * kBlock + i].hash);
        if (!ref) continue;
        stripe.shelves[ref.full()].prefetch_hot(ref.slot());
        stripe.shelves[ref.full()].prefetch_cold(ref.slot());
      }
    }
    if (step < 2) continue;
    const size_t begin = (step - 2) * kBlock, count = std::min(kBlock, size - begin);
    for (size_t i = 0; i < count; ++i) update(stripe, items[begin + i], guesses[step % 2][i], push);
  }
}

void Table::update(Stripe& stripe, const Item& item, Ref guess, const Push& push) {
  // The guess may be stale: rows move when a shelf grows and when they are admitted.
  Ref ref = stripe.holds(guess, item.key) ? guess : stripe.find(item.hash, item.key);
  const bool born = !ref;
  if (born) ref = create(stripe, item.hash, item.key);
  const Row row = stripe.row(ref);
  if (!born) touch(stripe, row, ref.full(), item.hash);

  row.set_show(row.show() + item.show);
  row.set_click(row.click() + item.click);
  row.set_delta_score(row.delta_score() + static_cast<float>(config_.policy.score(item.show, item.click)));
  if (push.move == Move::train || item.show > 0) row.set_unseen_days(0);
  if (item.slot != kNoSlot) row.set_slot(item.slot);
  const bool factors = ref.full() && config_.factors > 0;
  if (push.move == Move::train) {
    apply_embed_(embed_rule_, config_.embed.bounds, row.weights(), row.state_of_embed(), item.g, 1,
                 factor(config_.embed.scale, item.show, push.n));
    if (factors)
      apply_embedx_(embedx_rule_, config_.embedx.bounds, row.embedx(), layout_.state_of_embedx(row), item.g + 1,
                    config_.factors, factor(config_.embedx.scale, item.show, push.n));
  } else {
    for (int i = 0; i < (factors ? 1 + config_.factors : 1); ++i)
      row.weights()[i] = (push.move == Move::add ? row.weights()[i] : 0.0F) + item.g[i];
  }
  mark_changed(stripe, row);
  if (!ref.full() && admits(row, item.show))
    admit(stripe, item.hash, ref);  // its factors are trained from the next push on
}

float Table::factor(Scale scale, double show, float n) const {
  const float by = scale == Scale::show ? static_cast<float>(show) : scale == Scale::batch ? n : 1.0F;
  return by > 0 ? 1 / by : 1.0F;
}

Ref Table::add(Stripe& stripe, bool full, uint64_t hash, uint64_t key) {
  Shelf& shelf = stripe.shelves[full];
  if (shelf.slots() == 0 || (shelf.crowded() && !(restoring_ && !shelf.full()) && may_grow(shelf, full)))
    shelf.resize(shelf.larger(scarce()));
  else if (shelf.full())
    evict_some(stripe, full);
  const Ref ref(full, shelf.insert(hash, key));
  const Row row = stripe.row(ref);
  row.epoch() = epoch_;
  row.flags() = 0;
  return ref;
}

Ref Table::create(Stripe& stripe, uint64_t hash, uint64_t key) {
  const Ref ref = add(stripe, at_birth_, hash, key);
  const Row row = stripe.row(ref);
  row.set_show(0);
  row.set_click(0);
  row.set_delta_score(0);
  row.set_unseen_days(0);
  row.set_slot(kNoSlot);
  init_part(config_.embed, config_.seed, key, 0, 1, row.weights(), row.state_of_embed());
  if (ref.full() && config_.factors > 0)
    init_part(config_.embedx, config_.seed, key, 1, config_.factors, row.embedx(), layout_.state_of_embedx(row));
  return ref;
}

bool Table::admits(Row row, double show) const {
  const Admission& admission = config_.admission;
  switch (admission.by) {
    case Admission::score:
      return config_.policy.score(row.show(), row.click()) >= admission.threshold;
    case Admission::count:
      return row.show() >= admission.threshold;
    case Admission::probability: {
      // Every show has the same chance, however shows are distributed over pushes. The draw depends only on seed, key
      // and shows.
      const uint64_t bits = mix64(mix64(config_.seed ^ row.key()) ^ load<uint64_t>(row.cold));
      const double chance = show > 0 ? 1 - std::pow(1 - admission.threshold, show) : 0;
      return static_cast<double>(bits >> 11) * 0x1p-53 < chance;
    }
    default:
      return true;
  }
}

void Table::admit(Stripe& stripe, uint64_t hash, Ref ref) {
  const Row to = stripe.row(add(stripe, true, hash, stripe.row(ref).key()));
  const Row from = stripe.row(ref);
  std::memcpy(to.hot, from.hot, Row::kWeights + 4);
  std::memcpy(to.cold, from.cold, static_cast<size_t>(layout_.cold_bytes(false)));
  init_part(config_.embedx, config_.seed, to.key(), 1, config_.factors, to.embedx(), layout_.state_of_embedx(to));
  stripe.shelves[0].erase(ref.slot());
  admitted_.fetch_add(1, std::memory_order_relaxed);
}

void Table::mark_changed(Stripe& stripe, Row row) const {
  if (!tracking() || (row.flags() & kChanged) != 0) return;
  row.flags() |= kChanged;
  stripe.changed.push_back(row.key());
}

// ---- restore ----

void Table::reserve(uint64_t short_rows, uint64_t full_rows) {
  constexpr uint64_t kMost = uint64_t{1} << 36;  // of each kind: at most 2^31 slots in each of 32 stripes
  if (short_rows > kMost || full_rows > kMost) throw Error("a table holds at most 2^36 rows of each kind");
  const Gate::Pass pass(gate_, true);
  const double bytes =
      static_cast<double>(short_rows) * layout_.bytes(false) + static_cast<double>(full_rows) * layout_.bytes(true);
  const double share =
      config_.memory_limit == 0 || bytes == 0 ? 1 : std::min(1.0, 0.85 * static_cast<double>(room()) / bytes);
  const uint64_t wanted[2] = {static_cast<uint64_t>(share * static_cast<double>(short_rows)),
                              static_cast<uint64_t>(share * static_cast<double>(full_rows))};
  for (const auto& stripe : stripes_)
    for (const int full : {0, 1}) {
      Shelf& shelf = stripe->shelves[full];
      const auto buckets = static_cast<uint32_t>(wanted[full] / kStripes * 103 / 100 / (Shelf::kBucket * 92 / 100) + 1);
      if (wanted[full] == 0 || buckets <= shelf.buckets() || !may_resize(shelf, buckets)) continue;
      const std::unique_lock guard(stripe->lock);
      shelf.resize(buckets);
    }
}

void Table::restore(const Rows& rows, int first, int last) {
  constexpr size_t kRows = 1 << 16;
  for (size_t start = 0; start < rows.size; start += kRows) {
    make_room();
    const Gate::Pass pass(gate_, false);
    plan.make(rows.key + start, std::min(kRows, rows.size - start));
    for (int s = 0; s < kStripes; ++s)
      for (uint32_t at = plan.begin[s]; at < plan.end[s]; at += kPiece) {
        const uint32_t to = std::min(plan.end[s], at + kPiece);
        take_undo(to - at);
        {
          Stripe& stripe = *stripes_[s];
          const std::unique_lock guard(stripe.lock);
          for (uint32_t i = at; i < to; ++i)
            if (const auto shard = static_cast<int>(plan.hash[i] % kVirtualShards); shard >= first && shard < last)
              restore_row(stripe, plan.hash[i], rows, start + plan.where[i]);
        }
        give_back_undo(to - at);
      }
  }
}

void Table::restore_row(Stripe& stripe, uint64_t hash, const Rows& rows, size_t i) {
  const auto d = static_cast<size_t>(config_.factors), e = static_cast<size_t>(layout_.embed_state),
             x = static_cast<size_t>(layout_.embedx_state);
  if (const Ref old = stripe.find(hash, rows.key[i]); old) {
    touch(stripe, stripe.row(old), old.full(), hash);
    remove(stripe, old, stripe.row(old));
  }
  const Row row = stripe.row(add(stripe, rows.full, hash, rows.key[i]));
  row.set_slot(rows.slot[i]);
  row.set_show(rows.show[i]);
  row.set_click(rows.click[i]);
  row.set_unseen_days(rows.unseen_days[i]);
  row.set_delta_score(rows.delta_score[i]);
  row.flags() = rows.published[i] != 0 ? kListed : 0;
  row.weights()[0] = rows.embed_w[i];
  copy_floats(rows.embed_state + i * e, row.state_of_embed(), e);
  if (!rows.full) return;
  copy_floats(rows.embedx + i * d, row.embedx(), d);
  copy_floats(rows.embedx_state + i * x, layout_.state_of_embedx(row), x);
}

// These numbers come from a file: none of them may request more memory than the table may use.
void Table::check_memory(const std::vector<uint64_t>& memory) const {
  const char* const wrong = "the saved memory layout does not fit this table";
  if (memory.size() != Cut::kNumbers * kStripes + 1 || memory.back() > 6) throw Error(wrong);
  const uint64_t limit = config_.memory_limit;
  uint64_t bytes = 0;
  for (size_t s = 0; s < kStripes; ++s) {
    const uint64_t* own = &memory[s * Cut::kNumbers];
    for (const int i : {0, 1, 2, 3, 4, 5})
      if (own[i] > limit / 8 || own[i] > UINT32_MAX / Shelf::kBucket) throw Error(wrong);
    bytes += stripes_[s]->shelves[0].bytes_if(static_cast<uint32_t>(own[0])) +
             stripes_[s]->shelves[1].bytes_if(static_cast<uint32_t>(own[1])) +
             8 * (std::max(own[2], own[3]) + std::max(own[4], own[5]));
  }
  if (bytes > limit) throw Error(wrong);
}

void Table::prepare(const std::vector<uint64_t>& memory) {
  const Gate::Pass pass(gate_, true);
  check_memory(memory);
  for (const auto& stripe : stripes_)
    if (stripe->rows() != 0) throw Error("only an empty table can restore a saved memory layout");
  restoring_ = true;
  for (size_t s = 0; s < kStripes; ++s) {
    const uint64_t* own = &memory[s * Cut::kNumbers];
    Stripe& stripe = *stripes_[s];
    const std::unique_lock guard(stripe.lock);
    for (const int full : {0, 1})
      if (own[full] != 0) stripe.shelves[full].resize(static_cast<uint32_t>(own[full]));
    stripe.changed.reserve(own[3]);
    stripe.deleted.reserve(own[5]);
  }
}

void Table::settle(const std::vector<uint64_t>& memory) {
  const Gate::Pass pass(gate_, true);
  check_memory(memory);
  for (size_t s = 0; s < kStripes; ++s) {
    const uint64_t* own = &memory[s * Cut::kNumbers];
    Stripe& stripe = *stripes_[s];
    const std::unique_lock guard(stripe.lock);
    // The lists may have held duplicates and keys of removed rows. Repeat a key to restore their original size.
    if (stripe.changed.size() < own[2]) stripe.changed.resize(own[2], stripe.changed.empty() ? 0 : stripe.changed[0]);
    if (stripe.deleted.size() < own[4] && !stripe.deleted.empty()) stripe.deleted.resize(own[4], stripe.deleted[0]);
  }
  restoring_ = false;
  crowded_ = static_cast<int>(memory.back());
}

void Table::restore_changes(const uint64_t* changed, size_t n_changed, const uint64_t* deleted, size_t n_deleted) {
  const Gate::Pass pass(gate_, true);
  tracking_.store(true, std::memory_order_relaxed);
  for (size_t i = 0; i < n_changed; ++i) {
    const uint64_t hash = mix64(changed[i]);
    Stripe& stripe = *stripes_[stripe_of(hash)];
    const std::unique_lock guard(stripe.lock);
    if (const Ref ref = stripe.find(hash, changed[i]); ref) mark_changed(stripe, stripe.row(ref));
  }
  for (size_t i = 0; i < n_deleted; ++i) {
    Stripe& stripe = *stripes_[stripe_of(mix64(deleted[i]))];
    const std::unique_lock guard(stripe.lock);
    stripe.deleted.push_back(deleted[i]);
  }
}

void Table::restore_readers(const uint64_t* keys, size_t n) {
  const Gate::Pass pass(gate_, true);
  tracking_.store(true, std::memory_order_relaxed);
  const auto owed = static_cast<float>(config_.policy.delta_threshold);
  for (size_t i = 0; i < n; ++i) {
    const uint64_t hash = mix64(keys[i]);
    Stripe& stripe = *stripes_[stripe_of(hash)];
    const std::unique_lock guard(stripe.lock);
    const Ref ref = stripe.find(hash, keys[i]);
    if (!ref) {
      stripe.deleted.push_back(keys[i]);
      continue;
    }
    Row row = stripe.row(ref);
    touch(stripe, row, ref.full(), hash);
    row.flags() |= kListed;
    row.set_delta_score(std::max(row.delta_score(), owed));
    mark_changed(stripe, row);
  }
}

Stats Table::stats() const {
  Stats stats;
  for (const auto& stripe : stripes_) {
    const std::shared_lock guard(stripe->lock);
    stats.rows += stripe->rows();
    stats.full_rows += stripe->shelves[1].size();
    stats.changed += stripe->changed.size();
    stats.deleted += stripe->deleted.size();
  }
  stats.bytes = budget_.used();
  stats.peak_bytes = budget_.peak();
  stats.own_bytes = stats.full_rows * static_cast<uint64_t>(layout_.own_bytes(true)) +
                    (stats.rows - stats.full_rows) * static_cast<uint64_t>(layout_.own_bytes(false));
  stats.admitted = admitted_;
  stats.shrunk = shrunk_;
  stats.evicted = evicted_;
  stats.undo_waits = undo_waits_;
  return stats;
}

}  // namespace clickfleet
