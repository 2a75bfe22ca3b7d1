#include "table.h"

#include <algorithm>

#include "cut.h"
#include "plan.h"
#include "sweep.h"

namespace clickfleet {
namespace {

constexpr size_t kAhead = 16;  // keys between two stages of the pipeline: tags prefetched, row prefetched, row used
constexpr size_t kPullPiece = 8192;

thread_local Plan plan;  // scratch of the call under way

void copy_floats(const float* from, float* to, int n) {
  if (n >= 8) {  // whole vectors; the last one may overlap
    for (int i = 0; i + 8 <= n; i += 8) std::memcpy(to + i, from + i, 32);
    std::memcpy(to + n - 8, from + n - 8, 32);
  } else {
    for (int i = 0; i < n; ++i) to[i] = from[i];
  }
}

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

void init_weights(const Part& part, uint64_t seed, uint64_t key, uint32_t column, int n, float* w) {
  part.init.fill(seed, key, column, n, w);
  for (int i = 0; i < n; ++i) w[i] = std::clamp(w[i], part.bounds.lower, part.bounds.upper);
}

void init_part(const Part& part, uint64_t seed, uint64_t key, uint32_t column, int n, float* w, float* state) {
  init_weights(part, seed, key, column, n, w);
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
  for (int s = 0; s < kStripes; ++s) stripes_.push_back(std::make_unique<Stripe>(budget_, layout_));
  if (config_.memory_limit == 0) return;
  // Room for a few buckets in every stripe, and for one piece of work in the undo log.
  const size_t rows = kStripes * 8 * stripes_[0]->shelves[1].bytes_if(1);
  const size_t log = 4 * kPiece * static_cast<size_t>(layout_.bytes(true) + 1) * 2;
  if (config_.snapshot_reserve < log || config_.memory_limit < config_.snapshot_reserve + rows)
    throw Error("memory_limit is too small: this table needs at least " + std::to_string(rows / 1024) +
                " KiB for rows and a snapshot_reserve of " + std::to_string(log / 1024) + " KiB");
}

Table::~Table() = default;

// ---- pull ----

void Table::pull(const uint64_t* keys, size_t n, bool training, float* out) const {
  const auto width = static_cast<size_t>(1 + config_.factors);
  for (size_t at = 0; at < n; at += kPullPiece)
    pull_piece(keys + at, std::min(kPullPiece, n - at), training, out + at * width);
  if (!config_.padding) return;
  for (size_t i = 0; i < n; ++i)
    if (keys[i] == *config_.padding) std::fill_n(out + i * width, width, 0.0F);
}

void Table::pull_piece(const uint64_t* keys, size_t n, bool training, float* out) const {
  // With many keys nearly every stripe is needed: if none is busy, have them all at once and leave the keys in their
  // order.
  if (n >= 4 * kStripes) {
    int locked = 0;
    while (locked < kStripes && stripes_[locked]->lock.try_lock_shared()) ++locked;
    if (locked == kStripes)
      pull_keys([&](uint64_t hash) -> const Stripe& { return *stripes_[stripe_of(hash)]; },
                [&](size_t i) { return mix64(keys[i]); }, [&](size_t i) { return i; }, keys, n, training, out);
    for (int s = 0; s < locked; ++s) stripes_[s]->lock.unlock_shared();
    if (locked == kStripes) return;
  }
  plan.make(keys, n);
  plan.each_stripe(
      [&](int s, bool wait) {
        return wait ? (stripes_[s]->lock.lock_shared(), true) : stripes_[s]->lock.try_lock_shared();
      },
      [&](int s) {
        const std::shared_lock guard(stripes_[s]->lock, std::adopt_lock);
        const uint32_t begin = plan.begin[s];
        pull_keys([&](uint64_t) -> const Stripe& { return *stripes_[s]; },
                  [&](size_t i) { return plan.hash[begin + i]; }, [&](size_t i) { return plan.where[begin + i]; }, keys,
                  plan.end[s] - begin, training, out);
      });
}

// Three tight loops over blocks of keys: tags of one block are fetched while rows of the block before are, and those of
// the block before that are read.
template <class Home, class Hash, class Where>
void Table::pull_keys(const Home& home, const Hash& hash_of, const Where& where, const uint64_t* keys, size_t n,
                      bool training, float* out) const {
  constexpr size_t kBlock = 16;
  const int width = 1 + config_.factors;
  uint64_t hashes[3][kBlock];
  Ref guesses[2][kBlock];
  const size_t blocks = (n + kBlock - 1) / kBlock;
  for (size_t step = 0; step < blocks + 2; ++step) {
    if (const size_t b = step; b < blocks) {
      uint64_t* hash = hashes[b % 3];
      const size_t begin = b * kBlock, count = std::min(kBlock, n - begin);
      for (size_t i = 0; i < count; ++i) {
        hash[i] = hash_of(begin + i);
        home(hash[i]).prefetch_tags(hash[i]);
      }
    }
    if (const size_t b = step - 1; step >= 1 && b < blocks) {
      const uint64_t* hash = hashes[b % 3];
      const size_t count = std::min(kBlock, n - b * kBlock);
      for (size_t i = 0; i < count; ++i) {
        const Stripe& stripe = home(hash[i]);
        const Ref ref = guesses[b % 2][i] = stripe.guess(hash[i]);
        if (ref) stripe.shelves[ref.full()].prefetch_hot(ref.slot());
      }
    }
    if (step < 2) continue;
    const size_t b = step - 2, begin = b * kBlock, count = std::min(kBlock, n - begin);
    for (size_t i = 0; i < count; ++i) {
      const uint64_t hash = hashes[b % 3][i];
      const size_t at = where(begin + i);
      const Stripe& stripe = home(hash);
      float* to = out + at * static_cast<size_t>(width);
      Ref ref = guesses[b % 2][i];
      if (ref && stripe.shelves[ref.full()].key(ref.slot()) != keys[at]) ref = stripe.find(hash, keys[at]);
      if (!ref) {
        read_unknown(keys[at], training, to);
      } else if (ref.full()) {
        copy_floats(stripe.row(ref).weights(), to, width);
      } else {
        to[0] = stripe.row(ref).weights()[0];
        std::fill_n(to + 1, config_.factors, 0.0F);
      }
    }
  }
}

void Table::read_unknown(uint64_t key, bool training, float* out) const {
  std::fill_n(out, 1 + config_.factors, 0.0F);
  if (!training) return;
  init_weights(config_.embed, config_.seed, key, 0, 1, out);
  if (at_birth_) init_weights(config_.embedx, config_.seed, key, 1, config_.factors, out + 1);
}

// ---- push ----

// One key of a push with all its occurrences merged.
struct Table::Item {
  uint64_t hash, key;
  const float* g;
  double show, click;
  uint16_t slot;
  Ref guess;  // where its row was when it was prefetched
};

void Table::push(const Push& push) {
  make_room();
  const Gate::Pass pass(gate_, false);
  plan.make(push.keys, push.size);
  thread_local std::vector<Item> items;
  const auto piece = [&](uint32_t at, uint32_t n) { return cut_ == nullptr ? n : std::min(n - at, kPiece); };
  plan.each_stripe(
      [&](int s, bool wait) {
        const uint32_t images = piece(0, plan.end[s] - plan.begin[s]);
        take_undo(images);
        if (wait ? (stripes_[s]->lock.lock(), true) : stripes_[s]->lock.try_lock()) return true;
        give_back_undo(images);
        return false;
      },
      [&](int s) {
        Stripe& stripe = *stripes_[s];
        std::unique_lock guard(stripe.lock, std::adopt_lock);
        merge(plan, s, push, items);
        const auto count = plan.end[s] - plan.begin[s], n = static_cast<uint32_t>(items.size());
        give_back_undo(piece(0, count) - piece(0, n));  // merged keys need less
        for (uint32_t at = 0, size = piece(0, n); at < n; at += size, size = piece(at, n)) {
          if (at > 0) {
            guard.unlock();
            take_undo(size);
            guard.lock();
          }
          push_items(stripe, items.data() + at, size, push.n);
          give_back_undo(size);
        }
      });
}

namespace {

// Finds keys that occur twice in one stripe of a push: a small table that stays in the first cache.
class Seen {
 public:
  void reset(uint32_t n) {
    uint32_t size = 64;
    while (size < 2 * n) size *= 2;
    slots_.assign(size, 0);
  }
  // The place where `hash` was put first, or `at` if it is new.
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
  thread_local std::vector<uint64_t> hashes;  // of items
  thread_local std::vector<float> merged;
  thread_local Seen seen;
  const auto width = static_cast<size_t>(1 + config_.factors);
  const uint32_t count = p.end[s] - p.begin[s];
  items.clear();
  hashes.clear();
  merged.clear();
  merged.reserve(count * width);  // never moves: items point into it
  seen.reset(count);
  for (uint32_t i = p.begin[s]; i < p.end[s]; ++i) {
    const uint32_t from = p.where[i];
    if (config_.padding && push.keys[from] == *config_.padding) continue;
    const float* g = push.grads + from * width;
    const double show = push.show == nullptr ? 1.0 : push.show[from];
    const double click = push.click == nullptr ? 0.0 : push.click[from];
    const auto at = static_cast<uint32_t>(items.size());
    const uint32_t first = seen.put(p.hash[i], at, hashes);
    if (first == at) {
      items.push_back(
          {p.hash[i], push.keys[from], g, show, click, push.slot == nullptr ? kNoSlot : push.slot[from], {}});
      hashes.push_back(p.hash[i]);
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

void Table::push_items(Stripe& stripe, Item* items, uint32_t size, float n) {
  for (size_t i = 0; i < size + 2 * kAhead; ++i) {
    if (i < size) stripe.prefetch_tags(items[i].hash);
    if (const size_t j = i - kAhead; i >= kAhead && j < size) {
      const Ref ref = items[j].guess = stripe.guess(items[j].hash);
      if (ref) {
        stripe.shelves[ref.full()].prefetch_hot(ref.slot());
        stripe.shelves[ref.full()].prefetch_cold(ref.slot());
      }
    }
    if (i >= 2 * kAhead) update(stripe, items[i - 2 * kAhead], n);
  }
}

void Table::update(Stripe& stripe, const Item& item, float n) {
  // The guess may be stale: rows move when a shelf grows and when they are admitted.
  Ref ref = stripe.holds(item.guess, item.key) ? item.guess : stripe.find(item.hash, item.key);
  const bool born = !ref;
  if (born) ref = create(stripe, item.hash, item.key);
  const Row row = stripe.row(ref);
  if (!born) touch(stripe, row, ref.full(), item.hash);

  row.set_show(row.show() + item.show);
  row.set_click(row.click() + item.click);
  row.set_delta_score(row.delta_score() + static_cast<float>(config_.policy.score(item.show, item.click)));
  row.set_unseen_days(0);
  if (item.slot != kNoSlot) row.set_slot(item.slot);
  apply_embed_(embed_rule_, config_.embed.bounds, row.weights(), row.state_of_embed(), item.g, 1,
               divisor(config_.embed.scale, item.show, n));
  mark_changed(stripe, row);
  if (ref.full()) {
    if (config_.factors > 0)
      apply_embedx_(embedx_rule_, config_.embedx.bounds, row.embedx(), layout_.state_of_embedx(row), item.g + 1,
                    config_.factors, divisor(config_.embedx.scale, item.show, n));
  } else if (admits(row, item.show)) {
    admit(stripe, item.hash, ref);  // its factors are trained from the next push on
  }
}

float Table::divisor(Scale scale, double show, float n) const {
  const float by = scale == Scale::show ? static_cast<float>(show) : scale == Scale::batch ? n : 1.0F;
  return by > 0 ? by : 1.0F;
}

Ref Table::add(Stripe& stripe, bool full, uint64_t hash, uint64_t key) {
  Shelf& shelf = stripe.shelves[full];
  if (shelf.slots() == 0 || (shelf.crowded() && may_grow(shelf, full)))
    shelf.resize(shelf.larger());
  else if (shelf.full())
    evict_one(stripe, full, hash);
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
      // Each show has the same chance, however shows are spread over pushes; the draw depends on nothing but seed, key
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

// ---- restoring ----

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
  copy_floats(rows.embed_state + i * e, row.state_of_embed(), layout_.embed_state);
  if (!rows.full) return;
  copy_floats(rows.embedx + i * d, row.embedx(), config_.factors);
  copy_floats(rows.embedx_state + i * x, layout_.state_of_embedx(row), layout_.embedx_state);
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
