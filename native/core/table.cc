#include "table.h"

#include <algorithm>

#include "floats.h"
#include "plan.h"
#include "tiers.h"

namespace clickfleet {
namespace {

thread_local Plan plan;  // scratch memory of the current call

Layout layout_of(const Config& config) {
  if (config.others.size() >= kMostClasses)
    throw Error("a table has at most " + std::to_string(kMostClasses) + " different widths and rules");
  for (const uint8_t row_class : config.slot_class)
    if (row_class > config.others.size()) throw Error("a slot names an unknown class of rows");
  const auto state = [](const Rule& rule, int n) {
    return std::visit([n](const auto& r) { return r.state(n); }, rule);
  };
  Layout layout;
  const auto add = [&](const RowClass& one) {
    layout.add_class(one.factors, state(one.embed.rule, 1), one.factors > 0 ? state(one.embedx.rule, one.factors) : 0);
  };
  add(config);
  for (const RowClass& one : config.others) add(one);
  return layout;
}

bool at_birth(const RowClass& one) {
  const Admission& admission = one.admission;
  return admission.by == Admission::birth || one.factors == 0 ||
         (admission.by != Admission::probability && admission.threshold <= 0);
}

const void* address(const Rule& rule) {
  return std::visit([](const auto& r) -> const void* { return &r; }, rule);
}

// A list of keys as `visit_keys` needs it.
std::vector<CountedVector<uint64_t>> by_stripe(const uint64_t* keys, size_t n) {
  static Budget uncounted;
  std::vector<CountedVector<uint64_t>> lists(kStripes,
                                             CountedVector<uint64_t>(CountingAllocator<uint64_t>(&uncounted)));
  for (size_t i = 0; i < n; ++i) lists[static_cast<size_t>(stripe_of(mix64(keys[i])))].push_back(keys[i]);
  return lists;
}

void init_part(const Part& part, uint64_t seed, uint64_t key, uint32_t column, int n, float* w, float* state) {
  part.weights(seed, key, column, n, w);
  std::visit([&](const auto& rule) { rule.init(w, state, n); }, part.rule);
}

}  // namespace

Table::Table(const Config& config) : config_(config), layout_(layout_of(config)) {
  const auto add_class = [&](const RowClass& one) {
    classes_.push_back({&one, at_birth(one), kernels().apply[one.embed.rule.index()],
                        kernels().apply[one.embedx.rule.index()], address(one.embed.rule), address(one.embedx.rule),
                        one.embed.bounds, one.embedx.bounds, one.embed.scale, one.embedx.scale});
  };
  add_class(config_);
  for (const RowClass& one : config_.others) add_class(one);
  at_birth_ = std::all_of(classes_.begin(), classes_.end(), [](const OwnClass& one) { return one.at_birth; });
  for (int s = 0; s < kStripes; ++s)
    stripes_.push_back(std::make_unique<Stripe>(s, shelves_, lasting_, budget_, layout_));
  if (config_.memory_limit == 0) {
    if (!config_.disk.empty())
      throw Error("a table on disk needs a memory limit\n  set table.memory_limit beside table.disk");
    return;
  }
  // The minimum: a few buckets per stripe, and one piece of work in the undo log.
  size_t rows = 0;
  for (RowKind kind = 1; kind < layout_.kinds(); kind += 2)
    rows += kStripes * 8 * stripes_[0]->shelves[kind].bytes_if(1);
  const size_t log = kStripes * ImageLog::kBlock + 4 * kPiece * static_cast<size_t>(layout_.most_bytes() + 1);
  if (config_.snapshot_reserve < log || config_.memory_limit < config_.snapshot_reserve + rows)
    throw Error("memory_limit is too small: this table needs at least " + std::to_string(rows / 1024) +
                " KiB for rows and a snapshot_reserve of " + std::to_string(log / 1024) + " KiB");
  if (config_.disk.empty()) return;
  constexpr size_t kLeastDisk = size_t{16} << 20;
  if (config_.disk_limit != 0 && config_.disk_limit < kLeastDisk)
    throw Error("disk_limit is too small: it must be at least 16 MiB");
  if (const size_t least = 2 * (rows + DiskMemory(0, layout_).total); room() < least)
    throw Error("memory_limit is too small: beside its snapshot_reserve, this table with rows on disk needs at least " +
                std::to_string(least / 1024) + " KiB");
  disk_ = std::make_unique<Disk>(
      config_, layout_, room(), budget_,
      Disk::Work{[this] { return merge_one(); }, [this](std::vector<uint64_t>& keys) { look_ahead(keys); }});
  for (const auto& stripe : stripes_) stripe->cold = std::make_unique<Cold>(layout_.kinds());
}

Table::~Table() {
  if (disk_ != nullptr) disk_->stop();  // its threads use the stripes
}

void Table::set_rules(const Config& like) {
  const Gate::Pass pass(gate_, true);
  const auto same = [](const RowClass& own, const RowClass& other) {
    return own.embed.rule.index() == other.embed.rule.index() && own.embedx.rule.index() == other.embedx.rule.index();
  };
  bool fits = config_.others.size() == like.others.size() && same(config_, like);
  for (size_t i = 0; fits && i < like.others.size(); ++i) fits = same(config_.others[i], like.others[i]);
  if (!fits) throw Error("rows have the state of other rules");
  // A rule of the same kind keeps its address, which `classes_` knows.
  const auto take = [](RowClass& own, const RowClass& other) {
    own.embed.rule = other.embed.rule;
    own.embedx.rule = other.embedx.rule;
  };
  take(config_, like);
  for (size_t i = 0; i < like.others.size(); ++i) take(config_.others[i], like.others[i]);
}

// ---- push ----

// One key of a push with all its occurrences merged.
struct Table::Item {
  uint64_t hash, key;
  const float* g;
  double show, click;
  uint16_t slot;
};

// Keys of a push whose rows must first be read from disk, with copies of their gradients.
struct Table::Deferred {
  std::vector<Item> items;
  std::vector<float> grads;

  void add(const Item& item, size_t width) {
    items.push_back(item);
    grads.insert(grads.end(), item.g, item.g + width);
  }
};

void Table::push(const Push& push) {
  make_room();
  const Gate::Pass pass(gate_, false);
  plan.make(push.keys, push.size);
  thread_local std::vector<Item> items;
  Deferred deferred;
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
          plain() ? push_items<true>(stripe, items.data() + at, size, push, &deferred)
                  : push_items<false>(stripe, items.data() + at, size, push, &deferred);
          give_back_undo(size);
        }
      });
  if (!deferred.items.empty()) push_deferred(deferred, push);
}

void Table::push_deferred(Deferred& deferred, const Push& push) {
  auto& items = deferred.items;
  const auto width = static_cast<size_t>(1 + layout_.widest());
  std::vector<uint64_t> keys(items.size());
  std::vector<uint32_t> places(items.size());
  for (uint32_t i = 0; i < items.size(); ++i) {
    items[i].g = deferred.grads.data() + i * width;
    keys[i] = items[i].key;
    places[i] = i;
  }
  const auto piece = std::max<size_t>(kPiece, disk_->memory().stage_slots * kStripes / 4);
  for (size_t at = 0; at < keys.size(); at += piece) {
    const size_t n = std::min(piece, keys.size() - at);
    uint64_t versions[kStripes];
    for (const auto& stripe : stripes_) {
      const std::shared_lock guard(stripe->lock);
      versions[stripe->number] = stripe->cold->version;
    }
    std::vector<bool> absent(n);
    read_keys(
        keys.data(), places.data() + at, n, false, [](uint32_t, const ColdRow&) {},
        [&](uint32_t i) { absent[i] = true; });
    for (size_t from = at; from < at + n;) {  // items of one stripe are adjacent
      Stripe& stripe = *stripes_[static_cast<size_t>(stripe_of(items[from].hash))];
      size_t to = from;
      while (to < at + n && to < from + kPiece && stripe_of(items[to].hash) == stripe.number) ++to;
      take_undo(to - from);
      {
        const std::unique_lock guard(stripe.lock);
        for (size_t i = from; i < to; ++i) {
          const bool new_key = absent[i - at] && stripe.cold->version == versions[stripe.number];
          update<false>(stripe, items[i], {}, push, new_key ? Fetch::never : Fetch::now);
        }
      }
      give_back_undo(to - from);
      from = to;
    }
  }
}

void Table::known(const uint64_t* keys, size_t n, uint8_t* out) const {
  std::vector<uint32_t> cold;  // places of keys that may be on disk
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
            if (const Ref ref = stripe.guess(hash[j]); ref) stripe.shelves[ref.kind()].prefetch_hot(ref.slot());
          if (const uint32_t j = i - 2 * kAhead; j < count) {
            out[where[j]] = stripe.find(hash[j], keys[where[j]]) ? 1 : 0;
            if (out[where[j]] == 0 && stripe.cold != nullptr && stripe.cold->may_hold(hash[j]))
              cold.push_back(where[j]);
          }
        }
      });
  if (!cold.empty())
    read_keys(
        keys, cold.data(), cold.size(), false, [&](uint32_t i, const ColdRow&) { out[cold[i]] = 1; }, [](uint32_t) {});
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
  const auto width = static_cast<size_t>(1 + layout_.widest());
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

template <bool Plain>
void Table::push_items(Stripe& stripe, const Item* items, size_t size, const Push& push, Deferred* deferred) {
  // Pipelined as in pull.cc: prefetch the tags of one block, prefetch the rows of the previous block, update the block
  // before that.
  constexpr size_t kBlock = 16;
  Ref guesses[2][kBlock];
  const bool slots_known = classes_.size() > 1 && push.slot != nullptr;
  const auto likely = [&](const Item& item) { return Plain ? 0 : slots_known ? class_of_slot(item.slot) : kAnyClass; };
  thread_local std::vector<const Item*> missing;  // not in memory: with rows on disk, they come last
  missing.clear();
  const size_t blocks = (size + kBlock - 1) / kBlock;
  for (size_t step = 0; step < blocks + 2; ++step) {
    if (step < blocks)
      for (size_t i = step * kBlock; i < std::min(size, (step + 1) * kBlock); ++i)
        stripe.prefetch_tags(items[i].hash, likely(items[i]));
    if (const size_t b = step - 1; step >= 1 && b < blocks) {
      const size_t count = std::min(kBlock, size - b * kBlock);
      for (size_t i = 0; i < count; ++i) {
        const Ref ref = guesses[b % 2][i] = stripe.guess(items[b * kBlock + i].hash, likely(items[b * kBlock + i]));
        if (!ref) continue;
        stripe.shelves[ref.kind()].prefetch_hot(ref.slot());
        stripe.shelves[ref.kind()].prefetch_cold(ref.slot());
      }
    }
    if (step < 2) continue;
    const size_t begin = (step - 2) * kBlock, count = std::min(kBlock, size - begin);
    for (size_t i = 0; i < count; ++i) {
      const Item& item = items[begin + i];
      const Ref guess = guesses[step % 2][i];
      if (Plain) {
        update<true>(stripe, item, guess, push, Fetch::never);
      } else if (disk_ != nullptr && !guess && !stripe.cold->stage.holds(item.key)) {
        stripe.cold->prefetch(item.hash, false);
        missing.push_back(&item);
      } else if (!update<false>(stripe, item, guess, push, Fetch::if_ready)) {
        deferred->add(item, static_cast<size_t>(1 + layout_.widest()));
      }
    }
  }
  if (Plain) return;
  constexpr size_t kAhead = 8;
  for (size_t i = 0; i < missing.size() + kAhead; ++i) {
    if (i < missing.size()) stripe.cold->prefetch(missing[i]->hash, true);
    if (i >= kAhead && !update<false>(stripe, *missing[i - kAhead], {}, push, Fetch::if_ready))
      deferred->add(*missing[i - kAhead], static_cast<size_t>(1 + layout_.widest()));
  }
}

// Returns false if the row must first be read from disk.
template <bool Plain>
bool Table::update(Stripe& stripe, const Item& item, Ref guess, const Push& push, Fetch fetch) {
  // The guess may be stale: rows move when a shelf grows and when they are admitted.
  Ref ref = stripe.holds(guess, item.key) ? guess : stripe.find(item.hash, item.key);
  if (!Plain && !ref && disk_ != nullptr && fetch != Fetch::never) {
    bool later = false;
    ref = bring(stripe, item.hash, item.key, fetch == Fetch::now, later);
    if (later) return false;
  }
  const bool born = !ref;
  if (born) ref = create(stripe, item.hash, item.key, Plain ? 0 : class_of_slot(item.slot));
  const RowKind kind = ref.kind();
  const OwnClass& own = classes_[Plain ? 0 : static_cast<size_t>(class_of(kind))];
  const int factors = layout_.factors(kind);
  // A row keeps its class, so it takes no slot of another one: its class follows from its slot wherever rows are read.
  const bool takes_slot = item.slot != kNoSlot && (Plain || class_of_slot(item.slot) == class_of(kind));
  const Row row = stripe.row(ref);
  if (!born) touch(stripe, row, kind, item.hash);

  row.set_show(row.show() + item.show);
  row.set_click(row.click() + item.click);
  row.set_delta_score(row.delta_score() + static_cast<float>(config_.policy.score(item.show, item.click)));
  if (push.move == Move::train || item.show > 0) row.set_unseen_days(0);
  if (takes_slot) row.set_slot(item.slot);
  if (!Plain) row.round() = stripe.spills;
  if (push.move == Move::train) {
    own.apply_embed(own.embed_rule, own.embed_bounds, row.weights(), row.state_of_embed(), item.g, 1,
                    factor(own.embed_scale, item.show, push.n));
    if (factors > 0)
      own.apply_embedx(own.embedx_rule, own.embedx_bounds, row.embedx(), layout_.state_of_embedx(row, kind), item.g + 1,
                       factors, factor(own.embedx_scale, item.show, push.n));
  } else {
    for (int i = 0; i < 1 + factors; ++i)
      row.weights()[i] = (push.move == Move::add ? row.weights()[i] : 0.0F) + item.g[i];
  }
  mark_changed(stripe, row);
  if (!is_full(kind) && admits(row, own.settings->admission, item.show))
    admit(stripe, item.hash, ref);  // its factors are trained from the next push on
  return true;
}

float Table::factor(Scale scale, double show, float n) const {
  const float by = scale == Scale::show ? static_cast<float>(show) : scale == Scale::batch ? n : 1.0F;
  return by > 0 ? 1 / by : 1.0F;
}

Ref Table::add(Stripe& stripe, RowKind kind, uint64_t hash, uint64_t key) {
  Shelf& shelf = stripe.shelves[kind];
  if (shelf.slots() == 0 || (shelf.crowded() && !(restoring_ && !shelf.full()) && may_grow(stripe, kind)))
    shelf.resize(shelf.larger(scarce()));
  else if (disk_ != nullptr && shelf.crowded())
    make_space(stripe, kind);
  else if (shelf.full())
    evict_some(stripe, kind);
  const Ref ref(kind, shelf.insert(hash, key));
  const Row row = stripe.row(ref);
  row.epoch() = epoch_;
  row.flags() = 0;
  row.round() = stripe.spills;
  return ref;
}

Ref Table::create(Stripe& stripe, uint64_t hash, uint64_t key, int row_class) {
  const OwnClass& own = classes_[static_cast<size_t>(row_class)];
  const RowKind kind = kind_of(row_class, own.at_birth);
  const Ref ref = add(stripe, kind, hash, key);
  count_row(kind, 1);
  const Row row = stripe.row(ref);
  row.set_show(0);
  row.set_click(0);
  row.set_delta_score(0);
  row.set_unseen_days(0);
  row.set_slot(kNoSlot);
  init_part(own.settings->embed, config_.seed, key, 0, 1, row.weights(), row.state_of_embed());
  if (const int factors = layout_.factors(kind); factors > 0)
    init_part(own.settings->embedx, config_.seed, key, 1, factors, row.embedx(), layout_.state_of_embedx(row, kind));
  return ref;
}

bool Table::admits(Row row, const Admission& admission, double show) const {
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
  thread_local std::vector<char> image;  // making space for the full row may move short rows
  constexpr size_t kHot = Row::kWeights + 4;
  const RowKind brief = ref.kind(), full = kind_of(class_of(brief), true);
  const auto cold = static_cast<size_t>(layout_.cold_bytes(brief));
  const Row from = stripe.row(ref);
  image.resize(kHot + cold);
  std::memcpy(image.data(), from.hot, kHot);
  std::memcpy(image.data() + kHot, from.cold, cold);
  const uint64_t key = from.key();
  stripe.shelves[brief].erase(ref.slot());
  const Row to = stripe.row(add(stripe, full, hash, key));
  std::memcpy(to.hot, image.data(), kHot);
  std::memcpy(to.cold, image.data() + kHot, cold);
  init_part(classes_[static_cast<size_t>(class_of(full))].settings->embedx, config_.seed, key, 1, layout_.factors(full),
            to.embedx(), layout_.state_of_embedx(to, full));
  count_row(brief, -1);
  count_row(full, 1);
  admitted_.fetch_add(1, std::memory_order_relaxed);
}

void Table::mark_changed(Stripe& stripe, Row row) const {
  if (!tracking() || (row.flags() & kChanged) != 0) return;
  row.flags() |= kChanged;
  stripe.changed.push_back(row.key());
}

// ---- restore ----

void Table::reserve(const std::vector<uint64_t>& rows) {
  constexpr uint64_t kMost = uint64_t{1} << 36;  // of each kind: at most 2^31 slots in each of 32 stripes
  if (rows.size() != layout_.kinds()) throw Error("expected the number of rows of every kind");
  for (const uint64_t n : rows)
    if (n > kMost) throw Error("a table holds at most 2^36 rows of each kind");
  const Gate::Pass pass(gate_, true);
  constexpr uint32_t kFilled = Shelf::kBucket * 92 / 100;  // slots of a bucket
  const auto buckets_of = [](double n) { return n / kStripes * 1.03 / kFilled; };
  double bytes = 0, total = 0;  // of all rows in memory: of their shelves if a share of them must fit exactly
  for (RowKind kind = 0; kind < layout_.kinds(); ++kind) {
    const auto n = static_cast<double>(rows[kind]);
    total += n;
    bytes += disk_ == nullptr ? n * layout_.bytes(kind)
                              : buckets_of(n) * kStripes * static_cast<double>(stripes_[0]->shelves[kind].bytes_if(1));
  }
  double most = 0.85 * static_cast<double>(room());
  if (disk_ != nullptr) {
    // A shelf that had to shrink while it fills would be crowded at its low end, so memory is left for the index, too.
    constexpr double kIndex = 3;  // bytes of a row on disk
    most = std::max(0.0, 0.95 * (0.96 * static_cast<double>(warm_room()) - kIndex * total));
  }
  const double share = config_.memory_limit == 0 || bytes == 0 ? 1 : std::min(1.0, most / bytes);
  kept_share_ = disk_ == nullptr || share == 1 ? 1 : share * 0.95;
  for (const auto& stripe : stripes_)
    for (RowKind kind = 0; kind < layout_.kinds(); ++kind) {
      Shelf& shelf = stripe->shelves[kind];
      const auto buckets = static_cast<uint32_t>(buckets_of(share * static_cast<double>(rows[kind])) + 1);
      if (rows[kind] == 0 || buckets <= shelf.buckets() || !may_resize(*stripe, kind, buckets)) continue;
      const std::unique_lock guard(stripe->lock);
      shelf.resize(buckets);
    }
}

void Table::restore(const Rows& rows, int first, int last) {
  // With a disk tier, each call makes a segment per stripe: fewer, larger ones.
  const size_t most = size_t{1} << (disk_ == nullptr ? 16 : 22);
  for (size_t start = 0; start < rows.size; start += most) {
    make_room();
    const Gate::Pass pass(gate_, false);
    plan.make(rows.key + start, std::min(most, rows.size - start));
    for (int s = 0; s < kStripes; ++s) {
      if (disk_ != nullptr) {
        restore_tiered(*stripes_[s], rows, start, plan, s, first, last);
        continue;
      }
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
}

void Table::restore_row(Stripe& stripe, uint64_t hash, const Rows& rows, size_t i) {
  Ref old = stripe.find(hash, rows.key[i]);
  if (bool later = false; !old && disk_ != nullptr) old = bring(stripe, hash, rows.key[i], true, later);
  if (old) {
    touch(stripe, stripe.row(old), old.kind(), hash);
    remove(stripe, old, stripe.row(old));
  }
  const Row row = stripe.row(add(stripe, rows.kind, hash, rows.key[i]));
  count_row(rows.kind, 1);
  fill(row, rows, i);
}

// Sets everything but the key, the epoch and the round.
void Table::fill(Row row, const Rows& rows, size_t i) const {
  const auto d = static_cast<size_t>(layout_.factors(rows.kind)),
             e = static_cast<size_t>(layout_.embed_state(rows.kind)),
             x = static_cast<size_t>(layout_.embedx_state(rows.kind));
  row.set_slot(rows.slot[i]);
  row.set_show(rows.show[i]);
  row.set_click(rows.click[i]);
  row.set_unseen_days(rows.unseen_days[i]);
  row.set_delta_score(rows.delta_score[i]);
  row.flags() = rows.published[i] != 0 ? kListed : 0;
  row.weights()[0] = rows.embed_w[i];
  copy_floats(rows.embed_state + i * e, row.state_of_embed(), e);
  if (!is_full(rows.kind)) return;
  copy_floats(rows.embedx + i * d, row.embedx(), d);
  copy_floats(rows.embedx_state + i * x, layout_.state_of_embedx(row, rows.kind), x);
}

// These numbers come from a file: none of them may request more memory than the table may use.
void Table::check_memory(const std::vector<uint64_t>& memory) const {
  const char* const wrong = "the saved memory layout does not fit this table";
  const size_t kinds = layout_.kinds(), numbers = kinds + Cut::kLists;
  if (memory.size() != numbers * kStripes + 1 || memory.back() >> kinds != 0) throw Error(wrong);
  const uint64_t limit = config_.memory_limit;
  uint64_t bytes = 0;
  for (size_t s = 0; s < kStripes; ++s) {
    const uint64_t *own = &memory[s * numbers], *lists = own + kinds;
    for (size_t i = 0; i < numbers; ++i)
      if (own[i] > limit / 8 || own[i] > UINT32_MAX / Shelf::kBucket) throw Error(wrong);
    for (size_t kind = 0; kind < kinds; ++kind)
      bytes += stripes_[s]->shelves[kind].bytes_if(static_cast<uint32_t>(own[kind]));
    bytes += 8 * (std::max(lists[0], lists[1]) + std::max(lists[2], lists[3]));
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
    const uint64_t *own = &memory[s * (layout_.kinds() + Cut::kLists)], *lists = own + layout_.kinds();
    Stripe& stripe = *stripes_[s];
    const std::unique_lock guard(stripe.lock);
    for (RowKind kind = 0; kind < layout_.kinds(); ++kind)
      if (own[kind] != 0) stripe.shelves[kind].resize(static_cast<uint32_t>(own[kind]));
    stripe.changed.reserve(lists[1]);
    stripe.deleted.reserve(lists[3]);
  }
}

void Table::settle(const std::vector<uint64_t>& memory) {
  const Gate::Pass pass(gate_, true);
  check_memory(memory);
  for (size_t s = 0; s < kStripes; ++s) {
    const uint64_t* lists = &memory[s * (layout_.kinds() + Cut::kLists) + layout_.kinds()];
    Stripe& stripe = *stripes_[s];
    const std::unique_lock guard(stripe.lock);
    // The lists may have held duplicates and keys of removed rows. Repeat a key to restore their original size.
    if (stripe.changed.size() < lists[0])
      stripe.changed.resize(lists[0], stripe.changed.empty() ? 0 : stripe.changed[0]);
    if (stripe.deleted.size() < lists[2] && !stripe.deleted.empty()) stripe.deleted.resize(lists[2], stripe.deleted[0]);
  }
  restoring_ = false;
  crowded_ = memory.back();
}

void Table::restore_changes(const uint64_t* changed, size_t n_changed, const uint64_t* deleted, size_t n_deleted) {
  const Gate::Pass pass(gate_, true);
  tracking_.store(true, std::memory_order_relaxed);
  visit_keys(by_stripe(changed, n_changed), [&](Stripe& stripe, Row row, RowKind) { mark_changed(stripe, row); });
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
  visit_keys(
      by_stripe(keys, n),
      [&](Stripe& stripe, Row row, RowKind) {
        row.flags() |= kListed;
        row.set_delta_score(std::max(row.delta_score(), owed));
        mark_changed(stripe, row);
      },
      [](Stripe& stripe, uint64_t key) { stripe.deleted.push_back(key); });
}

Stats Table::stats() const {
  Stats stats;
  stats.kinds.resize(layout_.kinds());
  for (const auto& stripe : stripes_) {
    const std::shared_lock guard(stripe->lock);
    for (RowKind kind = 0; kind < layout_.kinds(); ++kind) {
      Stats::OfKind& of = stats.kinds[kind];
      const Shelf& shelf = stripe->shelves[kind];
      of.rows += shelf.size();
      of.bytes += shelf.bytes_if(shelf.buckets());
      if (stripe->cold != nullptr) of.disk_rows += stripe->cold->rows[kind];
    }
    if (stripe->cold != nullptr) stats.segments += stripe->cold->segments.size();
    stats.changed += stripe->changed.size();
    stats.deleted += stripe->deleted.size();
  }
  for (RowKind kind = 0; kind < layout_.kinds(); ++kind) {
    Stats::OfKind& of = stats.kinds[kind];
    of.factors = layout_.factors(kind);
    of.full = is_full(kind);
    of.disk_bytes = of.disk_rows * Segment::record_size(layout_, kind);
    stats.rows += of.rows + of.disk_rows;
    stats.disk_rows += of.disk_rows;
    stats.full_rows += of.full ? of.rows + of.disk_rows : 0;
    stats.disk_full_rows += of.full ? of.disk_rows : 0;
    stats.own_bytes += (of.rows + of.disk_rows) * static_cast<uint64_t>(layout_.own_bytes(kind));
  }
  stats.bytes = budget_.used();
  stats.peak_bytes = budget_.peak();
  stats.admitted = admitted_;
  stats.shrunk = shrunk_;
  stats.evicted = evicted_;
  stats.undo_waits = undo_waits_;
  if (disk_ != nullptr) {
    stats.disk_bytes = disk_->files().used();
    stats.peak_disk_bytes = disk_->files().peak();
    stats.index_bytes = index_.used();
    stats.spilled = disk_->spilled;
    stats.fetched = disk_->fetched;
    stats.pulled = disk_->pulled;
    stats.disk_reads = disk_->reads_done;
    stats.disk_waits = disk_->reads_waited;
  }
  return stats;
}

}  // namespace clickfleet
