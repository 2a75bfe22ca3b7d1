#include "table.h"

#include <algorithm>

#include "cut.h"
#include "plan.h"
#include "sweep.h"

namespace clickfleet {
namespace {

constexpr int kAhead = 16;  // keys between two stages of the pipeline: entry prefetched, row prefetched, row used

thread_local Plan plan;  // scratch of the call under way

void copy_floats(const float* from, float* to, int n) {
  if (n >= 8) {  // whole vectors; the last one may overlap
    for (int i = 0; i + 8 <= n; i += 8) std::memcpy(to + i, from + i, 32);
    std::memcpy(to + n - 8, from + n - 8, 32);
  } else {
    for (int i = 0; i < n; ++i) to[i] = from[i];
  }
}

void prefetch_bytes(const char* from, const char* to) {
  for (const char* line = from; line < to; line += 64) prefetch(line);
  prefetch(to - 1);
}

size_t chunk_bytes_for(size_t memory_limit) {
  if (memory_limit == 0) return size_t{64} << 10;
  // All stripes may keep one half-used chunk of either kind: that must stay a small part of the limit.
  return std::clamp<size_t>(memory_limit * 3 / 100 / (2 * kStripes), size_t{4} << 10, size_t{64} << 10);
}

int shift_for(size_t chunk_bytes, int row_bytes) {
  int shift = 3;
  while ((size_t{2} << shift) * static_cast<size_t>(row_bytes) <= chunk_bytes) ++shift;
  return shift;
}

size_t chunk_of(int shift, int row_bytes) { return ((static_cast<size_t>(row_bytes) << shift) + 4095) / 4096 * 4096; }

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

Pools::Pools(Budget& budget, const Layout& layout, size_t chunk_bytes)
    : short_pool(budget, chunk_of(shift_for(chunk_bytes, layout.bytes(false)), layout.bytes(false))),
      full_pool(budget, chunk_of(shift_for(chunk_bytes, layout.bytes(true)), layout.bytes(true))),
      short_shift(shift_for(chunk_bytes, layout.bytes(false))),
      full_shift(shift_for(chunk_bytes, layout.bytes(true))) {}

Table::Table(const Config& config)
    : config_(config),
      layout_(layout_of(config)),
      at_birth_(at_birth(config)),
      apply_embed_(kernels().apply[config.embed.rule.index()]),
      apply_embedx_(kernels().apply[config.embedx.rule.index()]),
      embed_rule_(address(config_.embed.rule)),
      embedx_rule_(address(config_.embedx.rule)),
      pools_(budget_, layout_, chunk_bytes_for(config.memory_limit)) {
  for (int s = 0; s < kStripes; ++s) stripes_.push_back(std::make_unique<Stripe>(budget_, pools_, layout_));
  if (config_.memory_limit != 0 && config_.memory_limit - config_.snapshot_reserve < 4 * (budget_.used() + need(1)))
    throw Error("memory_limit is too small for this table: it needs at least " +
                std::to_string((4 * (budget_.used() + need(1)) + config_.snapshot_reserve) / 1000000 + 1) + " MB");
}

Table::~Table() = default;

// ---- pull ----

void Table::pull(const uint64_t* keys, size_t n, bool training, float* out) const {
  plan.make(keys, n, config_.padding);
  if (config_.padding)
    for (size_t i = 0; i < n; ++i)
      if (keys[i] == *config_.padding)
        std::fill_n(out + i * (1 + static_cast<size_t>(config_.factors)), 1 + config_.factors, 0.0F);
  plan.each_stripe(
      [&](int s, bool wait) {
        return wait ? (stripes_[s]->lock.lock_shared(), true) : stripes_[s]->lock.try_lock_shared();
      },
      [&](int s) {
        const std::shared_lock guard(stripes_[s]->lock, std::adopt_lock);
        pull_stripe(*stripes_[s], plan, s, training, out);
      });
}

void Table::pull_stripe(const Stripe& stripe, const Plan& p, int s, bool training, float* out) const {
  const uint32_t begin = p.begin[s], n = p.end[s] - begin;
  const uint64_t* hash = p.hash.data() + begin;
  const int width = 1 + config_.factors;
  Ref found[2 * kAhead];
  for (uint32_t i = 0; i < n + 2 * kAhead; ++i) {
    if (i < n) stripe.index.prefetch_home(tag_of(hash[i]));
    if (const uint32_t j = i - kAhead; i >= kAhead && j < n) {
      // Any entry with the right tag will nearly always be the right one; the key is compared when its row has arrived.
      const Index::Entry* entry = stripe.index.find(tag_of(hash[j]), [](Ref) { return true; });
      Ref& ref = found[j % (2 * kAhead)];
      ref = entry == nullptr ? Ref{} : entry->ref;
      if (ref) {
        const char* at = stripe.row(ref).at;
        prefetch_bytes(at + Row::kKey, at + Row::kWeights + 4 * (ref.full() ? width : 1));
      }
    }
    if (i < 2 * kAhead) continue;
    const uint32_t j = i - 2 * kAhead;
    float* to = out + static_cast<size_t>(p.where[begin + j]) * static_cast<size_t>(width);
    Ref ref = found[j % (2 * kAhead)];
    const uint64_t key = unmix64(hash[j]);
    if (ref && !stripe.is(ref, key)) {
      const Index::Entry* entry = stripe.find(hash[j], key);
      ref = entry == nullptr ? Ref{} : entry->ref;
    }
    if (!ref) {
      read_unknown(key, training, to);
    } else if (ref.full()) {
      copy_floats(stripe.row(ref).weights(), to, width);
    } else {
      to[0] = stripe.row(ref).weights()[0];
      std::fill_n(to + 1, config_.factors, 0.0F);
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
  Ref ref;  // a guess made when its row was prefetched
};

void Table::push(const Push& push) {
  const Room room(*this, push.size);
  const Gate::Pass pass(gate_, false);
  plan.make(push.keys, push.size, config_.padding);
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
  for (uint32_t i = 0; i < size + 2 * kAhead; ++i) {
    if (i < size) stripe.index.prefetch_home(tag_of(items[i].hash));
    if (const uint32_t j = i - kAhead; i >= kAhead && j < size) {
      const Index::Entry* entry = stripe.index.find(tag_of(items[j].hash), [](Ref) { return true; });
      if (entry != nullptr) {
        items[j].ref = entry->ref;
        const char* at = stripe.row(entry->ref).at;
        prefetch_bytes(at, at + layout_.bytes(entry->ref.full()));
      }
    }
    if (i >= 2 * kAhead) update(stripe, items[i - 2 * kAhead], n);
  }
}

void Table::update(Stripe& stripe, const Item& item, float n) {
  // The guess may be stale: rows move when others are admitted.
  Ref ref = item.ref;
  bool born = false;
  if (!ref || ref.row() >= stripe.arenas[ref.full()].size() || !stripe.is(ref, item.key)) {
    const Index::Entry* entry = stripe.find(item.hash, item.key);
    born = entry == nullptr;
    ref = born ? create(stripe, item.hash, item.key) : entry->ref;
  }
  const Row row = stripe.row(ref);
  if (!born) touch(stripe, row, ref.full(), tag_of(item.hash));

  row.set_show(row.show() + item.show);
  row.set_click(row.click() + item.click);
  row.set_delta_score(row.delta_score() + static_cast<float>(config_.policy.score(item.show, item.click)));
  row.set_unseen_days(0);
  if (item.slot != kNoSlot) row.set_slot(item.slot);
  apply_embed_(embed_rule_, config_.embed.bounds, row.weights(), layout_.state_of_embed(row, ref.full()), item.g, 1,
               divisor(config_.embed.scale, item.show, n));
  mark_changed(stripe, row);
  if (ref.full()) {
    if (config_.factors > 0)
      apply_embedx_(embedx_rule_, config_.embedx.bounds, layout_.embedx(row), layout_.state_of_embedx(row), item.g + 1,
                    config_.factors, divisor(config_.embedx.scale, item.show, n));
  } else if (admits(row, item.show)) {
    admit(stripe, item.hash, ref);  // its factors are trained from the next push on
  }
}

float Table::divisor(Scale scale, double show, float n) const {
  const float by = scale == Scale::show ? static_cast<float>(show) : scale == Scale::batch ? n : 1.0F;
  return by > 0 ? by : 1.0F;
}

Ref Table::create(Stripe& stripe, uint64_t hash, uint64_t key) {
  const bool full = at_birth_;
  const Ref ref = Ref::of(full, stripe.arenas[full].add());
  const Row row = stripe.row(ref);
  row.set_key(key);
  row.set_slot(kNoSlot);
  row.epoch() = epoch_;
  init_part(config_.embed, config_.seed, key, 0, 1, row.weights(), layout_.state_of_embed(row, full));
  if (full && config_.factors > 0)
    init_part(config_.embedx, config_.seed, key, 1, config_.factors, layout_.embedx(row), layout_.state_of_embedx(row));
  stripe.index.insert(tag_of(hash), ref, spare());
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
      const uint64_t bits = mix64(mix64(config_.seed ^ row.key()) ^ load<uint64_t>(row.at));
      const double chance = show > 0 ? 1 - std::pow(1 - admission.threshold, show) : 0;
      return static_cast<double>(bits >> 11) * 0x1p-53 < chance;
    }
    default:
      return true;
  }
}

Ref Table::admit(Stripe& stripe, uint64_t hash, Ref ref) {
  const Ref full = Ref::of(true, stripe.arenas[1].add());
  const Row from = stripe.row(ref), to = stripe.row(full);
  std::memcpy(to.at, from.at, Row::kWeights + 4);
  copy_floats(layout_.state_of_embed(from, false), layout_.state_of_embed(to, true), layout_.embed_state);
  init_part(config_.embedx, config_.seed, to.key(), 1, config_.factors, layout_.embedx(to),
            layout_.state_of_embedx(to));
  stripe.index.find(tag_of(hash), [&](Ref r) { return r.bits == ref.bits; })->ref = full;
  stripe.close_gap(ref);
  admitted_.fetch_add(1, std::memory_order_relaxed);
  return full;
}

void Table::mark_changed(Stripe& stripe, Row row) const {
  if (!tracking() || (row.flags() & kChanged) != 0) return;
  row.flags() |= kChanged;
  stripe.changed.push_back(row.key());
}

// ---- restoring ----

void Table::restore(const Rows& rows, int first, int last) {
  constexpr size_t kRows = 1 << 16;
  const auto factors = static_cast<size_t>(config_.factors), e = static_cast<size_t>(layout_.embed_state),
             x = static_cast<size_t>(layout_.embedx_state);
  for (size_t start = 0; start < rows.size; start += kRows) {
    const size_t n = std::min(kRows, rows.size - start);
    const Room room(*this, n);
    const Gate::Pass pass(gate_, false);
    plan.make(rows.key + start, n, {});
    for (int s = 0; s < kStripes; ++s) {
      Stripe& stripe = *stripes_[s];
      for (uint32_t at = plan.begin[s]; at < plan.end[s]; at += kPiece) {
        const uint32_t to = std::min(plan.end[s], at + kPiece);
        take_undo(to - at);
        const std::unique_lock guard(stripe.lock);
        for (uint32_t i = at; i < to; ++i) {
          const uint64_t hash = plan.hash[i];
          const auto shard = static_cast<int>(hash % kVirtualShards);
          if (shard < first || shard >= last) continue;
          const size_t from = start + plan.where[i];
          const uint64_t key = rows.key[from];
          if (Index::Entry* old = stripe.find(hash, key); old != nullptr) {
            touch(stripe, stripe.row(old->ref), old->ref.full(), tag_of(hash));
            remove(stripe, old->ref, stripe.row(old->ref));
          }
          const Ref ref = Ref::of(rows.full, stripe.arenas[rows.full].add());
          const Row row = stripe.row(ref);
          row.set_key(key);
          row.set_slot(rows.slot[from]);
          row.set_show(rows.show[from]);
          row.set_click(rows.click[from]);
          row.set_unseen_days(rows.unseen_days[from]);
          row.set_delta_score(rows.delta_score[from]);
          row.epoch() = epoch_;
          row.flags() = rows.published[from] != 0 ? kListed : 0;
          row.weights()[0] = rows.embed_w[from];
          copy_floats(rows.embed_state + from * e, layout_.state_of_embed(row, rows.full), layout_.embed_state);
          if (rows.full) {
            copy_floats(rows.embedx + from * factors, layout_.embedx(row), config_.factors);
            copy_floats(rows.embedx_state + from * x, layout_.state_of_embedx(row), layout_.embedx_state);
          }
          stripe.index.insert(tag_of(hash), ref, spare());
        }
        give_back_undo(to - at);
      }
    }
  }
}

void Table::restore_changes(const uint64_t* changed, size_t n_changed, const uint64_t* deleted, size_t n_deleted) {
  const Gate::Pass pass(gate_, true);
  tracking_.store(true, std::memory_order_relaxed);
  for (size_t i = 0; i < n_changed; ++i) {
    const uint64_t hash = mix64(changed[i]);
    Stripe& stripe = *stripes_[stripe_of(hash)];
    const std::unique_lock guard(stripe.lock);
    if (const Index::Entry* entry = stripe.find(hash, changed[i]); entry != nullptr)
      mark_changed(stripe, stripe.row(entry->ref));
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
    stats.full_rows += stripe->arenas[1].size();
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
