// Reads rows. The work is pipelined over blocks of keys: while the rows of one block are copied, the rows of the next
// block and the tags of the block after that are prefetched.
#include <algorithm>
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

// The shelves of one stripe, in the form the loops need: those of class 0.
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
  View views[kStripes];
  const auto view = [&](int s) {
    views[s] = {stripes_[s].get(), stripes_[s]->shelves[1].view(), stripes_[s]->shelves[0].view()};
  };
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
      const auto home = [&](uint64_t hash) -> const View& { return views[stripe_of(hash)]; };
      if (layout_.kinds() > 2)
        pull_classes(home, at, keys, slots, n, training, out);
      else
        brief ? pull_keys<true>(home, at, keys, n, training, out) : pull_keys<false>(home, at, keys, n, training, out);
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
        const auto home = [&](uint64_t) -> const View& { return views[s]; };
        const size_t count = plan.end[s] - plan.begin[s];
        layout_.kinds() > 2 ? pull_classes(home, at, keys, slots, count, training, out)
                            : pull_keys<true>(home, at, keys, count, training, out);
      });
}

// Pulls n keys: the i-th is keys[at(i)], and home(hash) is its stripe. All rows are of one class. Without `Brief` the
// table has no short rows.
template <bool Brief, class Home, class At>
void Table::pull_keys(const Home& home, const At& at, const uint64_t* keys, size_t n, bool training, float* out) const {
  const auto width = static_cast<size_t>(1 + layout_.widest());
  uint64_t hashes[3][kBlock];
  const char* rows[2][kBlock];
  bool full[2][kBlock];
  const size_t blocks = (n + kBlock - 1) / kBlock;
  // Offset of the last byte read from a full row; 0 if a row is exactly one cache line.
  const size_t beyond = layout_.hot_bytes(1) == 64 ? 0 : Row::kWeights + 4 * width - 1;
  for (size_t step = 0; step < blocks + 2; ++step) {
    if (const size_t begin = step * kBlock; step < blocks) {
      uint64_t* hash = hashes[step % 3];
      const size_t count = std::min(kBlock, n - begin);
      for (size_t i = 0; i < count; ++i) hash[i] = mix64(keys[at(begin + i)]);
      for (size_t i = 0; i < count; ++i) {
        const View& view = home(hash[i]);
        prefetch(view.full.tags_of(hash[i]));
        if (Brief) prefetch(view.brief.tags_of(hash[i]));
      }
    }
    if (const size_t b = step - 1; step >= 1 && b < blocks) {
      const uint64_t* hash = hashes[b % 3];
      const size_t count = std::min(kBlock, n - b * kBlock);
      for (size_t i = 0; i < count; ++i) {
        const View& view = home(hash[i]);
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
      if (row == nullptr || load<uint64_t>(row) != key) {  // unknown key, or another key with the same tag
        const Stripe& stripe = *home(hashes[b % 3][i]).stripe;
        // A key that is not in memory needs no second look there: pull_cold looks up all such keys together.
        if ((row == nullptr && stripe.has_cold_rows()) || !read_one(stripe, key, training, to))
          cold.push_back(static_cast<uint32_t>(place));
      } else if (!Brief || full[b % 2][i]) {
        copy_floats(reinterpret_cast<const float*>(row + Row::kWeights), to, width);
      } else {
        to[0] = load<float>(row + Row::kWeights);
        std::fill_n(to + 1, width - 1, 0.0F);
      }
    }
  }
}

// The same for rows of several classes.
template <class Home, class At>
void Table::pull_classes(const Home& home, const At& at, const uint64_t* keys, const uint16_t* slots, size_t n,
                         bool training, float* out) const {
  const auto width = static_cast<size_t>(1 + layout_.widest());
  uint64_t hashes[3][kBlock];
  Ref refs[2][kBlock];
  const size_t blocks = (n + kBlock - 1) / kBlock;
  for (size_t step = 0; step < blocks + 2; ++step) {
    if (const size_t begin = step * kBlock; step < blocks)
      for (size_t i = 0; i < std::min(kBlock, n - begin); ++i) {
        const uint64_t hash = hashes[step % 3][i] = mix64(keys[at(begin + i)]);
        home(hash).stripe->prefetch_tags(hash, likely_class(slots, at(begin + i)));
      }
    if (const size_t b = step - 1; step >= 1 && b < blocks)
      for (size_t i = 0; i < std::min(kBlock, n - b * kBlock); ++i) {
        const Stripe& stripe = *home(hashes[b % 3][i]).stripe;
        const Ref ref = refs[b % 2][i] = stripe.guess(hashes[b % 3][i], likely_class(slots, at(b * kBlock + i)));
        if (ref) stripe.shelves[ref.kind()].prefetch_hot(ref.slot());
      }
    if (step < 2) continue;
    const size_t b = step - 2, begin = b * kBlock, count = std::min(kBlock, n - begin);
    for (size_t i = 0; i < count; ++i) {
      const size_t place = at(begin + i);
      const Stripe& stripe = *home(hashes[b % 3][i]).stripe;
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
