// Reads rows. The work is pipelined over blocks of keys: while the rows of one block are copied, the rows of the next
// block and the tags of the block after that are prefetched.
#include <algorithm>
#include <type_traits>
#include <utility>

#include "floats.h"
#include "plan.h"
#include "tiers.h"

namespace clickfleet {
namespace {

constexpr size_t kPulled = 8192;  // number of keys per lock acquisition
constexpr size_t kBlock = 32;

thread_local Plan plan;
thread_local std::vector<uint32_t> cold;  // places of keys, in the current piece, whose rows may be on disk

}  // namespace

// The shelves of one class in one stripe, in the form the loops need.
struct alignas(64) Table::View {
  const Stripe* stripe;
  Shelf::View full, brief;
};

void Table::pull(const uint64_t* keys, size_t n, bool training, float* out, const uint16_t* slots) const {
  const auto width = static_cast<size_t>(1 + layout_.widest());
  for (size_t at = 0; at < n; at += kPulled) {
    pull_piece(keys + at, slots == nullptr ? nullptr : slots + at, std::min(kPulled, n - at), training,
               out + at * width);
    if (!cold.empty()) pull_cold(keys + at, std::exchange(cold, {}), training, out + at * width);
  }
  if (disk_ != nullptr) disk_->pulled += n;
  if (!config_.padding) return;
  for (size_t i = 0; i < n; ++i)
    if (keys[i] == *config_.padding) std::fill_n(out + i * width, width, 0.0F);
}

void Table::pull_piece(const uint64_t* keys, const uint16_t* slots, size_t n, bool training, float* out) const {
  thread_local std::vector<View> views;  // by stripe and class
  const size_t classes = classes_.size();
  views.resize(kStripes * classes);
  const auto view = [&](int s) {
    for (size_t c = 0; c < classes; ++c) {
      const Shelves& shelves = stripes_[s]->shelves;
      views[static_cast<size_t>(s) * classes + c] = {stripes_[s].get(),
                                                     shelves[kind_of(static_cast<int>(c), true)].view(),
                                                     shelves[kind_of(static_cast<int>(c), false)].view()};
    }
  };
  const View* const first = views.data();
  // With many keys, nearly every stripe is needed. If no stripe is busy, lock them all at once and process the keys in
  // their order.
  if (n >= 8 * kStripes) {
    int locked = 0;
    bool brief = false;
    for (; locked < kStripes && stripes_[locked]->lock.try_lock_shared(); ++locked) {
      view(locked);
      brief = brief || stripes_[locked]->shelves[0].size() != 0;
    }
    if (locked == kStripes) {
      const auto at = [](size_t i) { return i; };
      if (classes == 1) {
        const auto home = [first](uint64_t hash, size_t) -> const View& { return first[stripe_of(hash)]; };
        pull_one_class(brief, home, at, keys, n, training, out);
      } else {
        const auto home = [first, classes](uint64_t hash, size_t c) -> const View& {
          return first[static_cast<size_t>(stripe_of(hash)) * classes + c];
        };
        pull_any_class(home, at, keys, slots, n, training, out);
      }
    }
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
        view(s);
        const auto at = [where = plan.where.data() + plan.begin[s]](size_t i) { return where[i]; };
        const auto home = [own = first + static_cast<size_t>(s) * classes](uint64_t, size_t c) -> const View& {
          return own[c];
        };
        const size_t count = plan.end[s] - plan.begin[s];
        classes == 1 ? pull_one_class(true, home, at, keys, count, training, out)
                     : pull_any_class(home, at, keys, slots, count, training, out);
      });
}

namespace {

// The class of the key at a place.
struct OneClass {
  size_t operator()(size_t) const { return 0; }
};
struct ClassBySlot {
  const Table& table;
  const uint16_t* slots;
  size_t operator()(size_t place) const { return static_cast<size_t>(table.class_of_slot(slots[place])); }
};

}  // namespace

template <class Home, class At>
void Table::pull_one_class(bool brief, const Home& home, const At& at, const uint64_t* keys, size_t n, bool training,
                           float* out) const {
  brief ? pull_keys<true>(OneClass{}, home, at, keys, n, training, out)
        : pull_keys<false>(OneClass{}, home, at, keys, n, training, out);
}

template <class Home, class At>
void Table::pull_any_class(const Home& home, const At& at, const uint64_t* keys, const uint16_t* slots, size_t n,
                           bool training, float* out) const {
  slots == nullptr ? search_keys(home, at, keys, n, training, out)
                   : pull_keys<true>(ClassBySlot{*this, slots}, home, at, keys, n, training, out);
}

// Pulls n keys: the i-th is keys[at(i)], classes(at(i)) is its class, almost surely, and home(hash, class) is where its
// row is. Without `Brief` the table has no short rows.
template <bool Brief, class Classes, class Home, class At>
void Table::pull_keys(const Classes& classes, const Home& home, const At& at, const uint64_t* keys, size_t n,
                      bool training, float* out) const {
  constexpr bool kOneClass = std::is_same_v<Classes, OneClass>;
  const auto width = static_cast<size_t>(1 + layout_.widest());
  const auto full_width = [&](size_t c) {
    return kOneClass ? width : static_cast<size_t>(1 + layout_.factors(kind_of(static_cast<int>(c), true)));
  };
  uint64_t hashes[3][kBlock];
  const char* rows[2][kBlock];
  bool full[2][kBlock];
  const size_t blocks = (n + kBlock - 1) / kBlock;
  // Offset of the last byte read from a full row; 0 if a row is exactly one cache line.
  size_t last[kMostClasses];
  for (size_t c = 0; c < classes_.size(); ++c)
    last[c] = layout_.hot_bytes(kind_of(static_cast<int>(c), true)) == 64 ? 0 : Row::kWeights + 4 * full_width(c) - 1;
  for (size_t step = 0; step < blocks + 2; ++step) {
    if (const size_t begin = step * kBlock; step < blocks) {
      uint64_t* hash = hashes[step % 3];
      const size_t count = std::min(kBlock, n - begin);
      for (size_t i = 0; i < count; ++i) hash[i] = mix64(keys[at(begin + i)]);
      for (size_t i = 0; i < count; ++i) {
        const View& view = home(hash[i], classes(at(begin + i)));
        prefetch(view.full.tags_of(hash[i]));
        if (Brief) prefetch(view.brief.tags_of(hash[i]));
      }
    }
    if (const size_t b = step - 1; step >= 1 && b < blocks) {
      const uint64_t* hash = hashes[b % 3];
      const size_t count = std::min(kBlock, n - b * kBlock);
      for (size_t i = 0; i < count; ++i) {
        const size_t own = classes(at(b * kBlock + i)), beyond = last[own];
        const View& view = home(hash[i], own);
        const char* row = view.full.guess(hash[i]);
        if (Brief) {
          full[b % 2][i] = row != nullptr;
          if (row == nullptr) row = view.brief.guess(hash[i]);
        }
        rows[b % 2][i] = row;
        prefetch(row);
        if (beyond != 0 && (!Brief || full[b % 2][i]))
          for (size_t line = 64; line < beyond + 64; line += 64) prefetch(row + std::min(line, beyond));
      }
    }
    if (step < 2) continue;
    const size_t b = step - 2, begin = b * kBlock, count = std::min(kBlock, n - begin);
    for (size_t i = 0; i < count; ++i) {
      const size_t place = at(begin + i);
      const uint64_t key = keys[place];
      const char* row = rows[b % 2][i];
      float* to = out + place * width;
      if (row == nullptr || load<uint64_t>(row) != key) {
        // It is unknown, of another class, or another key has the same tag.
        const Stripe& stripe = *home(hashes[b % 3][i], 0).stripe;
        // A key that is not in memory needs no second look there: pull_cold looks up all such keys together.
        if ((kOneClass && row == nullptr && stripe.has_cold_rows()) || !read_one(stripe, key, training, to))
          cold.push_back(static_cast<uint32_t>(place));
      } else if (!Brief || full[b % 2][i]) {
        const size_t own = full_width(classes(place));
        copy_floats(reinterpret_cast<const float*>(row + Row::kWeights), to, own);
        if (!kOneClass) std::fill_n(to + own, width - own, 0.0F);
      } else {
        to[0] = load<float>(row + Row::kWeights);
        std::fill_n(to + 1, width - 1, 0.0F);
      }
    }
  }
}

// The same for keys of unknown classes: it looks for them in all.
template <class Home, class At>
void Table::search_keys(const Home& home, const At& at, const uint64_t* keys, size_t n, bool training,
                        float* out) const {
  const auto width = static_cast<size_t>(1 + layout_.widest());
  uint64_t hashes[3][kBlock];
  Ref refs[2][kBlock];
  const size_t blocks = (n + kBlock - 1) / kBlock;
  for (size_t step = 0; step < blocks + 2; ++step) {
    if (const size_t begin = step * kBlock; step < blocks)
      for (size_t i = 0; i < std::min(kBlock, n - begin); ++i) {
        const uint64_t hash = hashes[step % 3][i] = mix64(keys[at(begin + i)]);
        home(hash, 0).stripe->prefetch_tags(hash);
      }
    if (const size_t b = step - 1; step >= 1 && b < blocks)
      for (size_t i = 0; i < std::min(kBlock, n - b * kBlock); ++i) {
        const Stripe& stripe = *home(hashes[b % 3][i], 0).stripe;
        const Ref ref = refs[b % 2][i] = stripe.guess(hashes[b % 3][i]);
        if (ref) stripe.shelves[ref.kind()].prefetch_hot(ref.slot());
      }
    if (step < 2) continue;
    const size_t b = step - 2, begin = b * kBlock, count = std::min(kBlock, n - begin);
    for (size_t i = 0; i < count; ++i) {
      const size_t place = at(begin + i);
      const Stripe& stripe = *home(hashes[b % 3][i], 0).stripe;
      const Ref ref = refs[b % 2][i];
      if (const Row row = ref ? stripe.row(ref) : Row{}; ref && row.key() == keys[place])
        copy_row(row.hot, ref.kind(), out + place * width);
      else if ((!ref && stripe.has_cold_rows()) || !read_one(stripe, keys[place], training, out + place * width))
        cold.push_back(static_cast<uint32_t>(place));
    }
  }
}

// Copies the weights of a row, whose hot part may be unaligned, and zeros beyond its width.
void Table::copy_row(const char* hot, RowKind kind, float* out) const {
  const auto width = static_cast<size_t>(1 + layout_.widest()), own = static_cast<size_t>(1 + layout_.factors(kind));
  std::memcpy(out, hot + Row::kWeights, sizeof(float) * own);
  std::fill_n(out + own, width - own, 0.0F);
}

bool Table::read_one(const Stripe& stripe, uint64_t key, bool training, float* out) const {
  const uint64_t hash = mix64(key);
  if (const Ref ref = stripe.find(hash, key); ref) {
    copy_row(stripe.row(ref).hot, ref.kind(), out);
    return true;
  }
  if (stripe.cold != nullptr && stripe.cold->may_hold(hash)) return false;
  initial(key, training, out);
  return true;
}

void Table::initial(uint64_t key, bool training, float* out) const {
  std::fill_n(out, static_cast<size_t>(1 + layout_.widest()), 0.0F);
  if (!training) return;
  config_.embed.weights(config_.seed, key, 0, 1, out);
  if (at_birth_) config_.embedx.weights(config_.seed, key, 1, layout_.widest(), out + 1);
}

void Table::pull_cold(const uint64_t* keys, const std::vector<uint32_t>& places, bool training, float* out) const {
  const auto width = static_cast<size_t>(1 + layout_.widest());
  read_keys(
      keys, places.data(), places.size(), false,
      [&](uint32_t i, const ColdRow& row) { copy_row(row.image, row.kind, out + places[i] * width); },
      [&](uint32_t i) { initial(keys[places[i]], training, out + places[i] * width); });
}

}  // namespace clickfleet
