// Operations on all rows: decay, ageing, eviction.
#include <algorithm>
#include <bit>
#include <cmath>

#include "cut.h"
#include "sweep.h"

namespace clickfleet {

bool Table::publishable(Row row) const {
  return config_.policy.score(row.show(), row.click()) >= config_.policy.base_threshold &&
         row.unseen_days() <= config_.policy.delta_keep_days;
}

void Table::mark_if_unpublishable(Stripe& stripe, Row row) const {
  // Consumers have this row, or will have it once the pending changes are committed. They must delete it.
  if ((row.flags() & (kListed | kEmitted)) != 0 && !publishable(row)) mark_changed(stripe, row);
}

void Table::remove(Stripe& stripe, Ref ref, Row row) {
  const uint64_t key = row.key();
  if ((row.flags() & kListed) != 0)
    stripe.deleted.push_back(key);
  else if ((row.flags() & kEmitted) != 0)
    stripe.deleted_if_committed.push_back(key);
  stripe.shelves[ref.full()].erase(ref.slot());
}

uint64_t Table::shrink() {
  const Policy& policy = config_.policy;
  uint64_t removed = 0;
  const Gate::Pass pass(gate_, true);
  sweep([&](Stripe& stripe, Ref ref, Row row) {
    touch(stripe, row, ref.full(), mix64(row.key()));
    row.set_show(row.show() * policy.decay_rate);
    row.set_click(row.click() * policy.decay_rate);
    if (policy.score(row.show(), row.click()) < policy.delete_threshold ||
        row.unseen_days() > policy.delete_after_unseen_days) {
      remove(stripe, ref, row);
      ++removed;
    } else {
      mark_if_unpublishable(stripe, row);
    }
  });
  trim(0);
  shrunk_ += removed;
  return removed;
}

void Table::end_day() {
  const Gate::Pass pass(gate_, true);
  sweep([&](Stripe& stripe, Ref ref, Row row) {
    touch(stripe, row, ref.full(), mix64(row.key()));
    if (row.unseen_days() < 0xffff) row.set_unseen_days(row.unseen_days() + 1);
    mark_if_unpublishable(stripe, row);
  });
}

// Shrinks shelves with many erased rows. For the kinds of rows in the bit mask `tightly`, shrinks whenever it saves
// anything worthwhile.
void Table::trim(int tightly) {
  for (const auto& stripe : stripes_)
    for (int full = 0; full < 2; ++full) {
      Shelf& shelf = stripe->shelves[full];
      const uint32_t buckets = shelf.trimmed(), spare = shelf.buckets() - buckets;
      const bool worth = (tightly >> full & 1) != 0 ? spare > shelf.buckets() / 40 : spare > shelf.buckets() / 8;
      if (!worth || !fits(shelf.bytes_if(buckets))) continue;
      const std::unique_lock guard(stripe->lock);
      shelf.resize(buckets);
    }
}

// ---- the memory limit ----

// A shelf grows while all rows then take less than 97% of their part of the limit. After that, rows use up the
// remaining free slots; before the next push, the lowest-scored rows are evicted, 5% of that memory. While a shelf is
// copied, both copies count. None of this depends on whether a cut is being read, or on the order in which rows
// arrived. A run resumed from a checkpoint therefore evicts the same rows.

bool Table::fits(size_t bytes) const { return config_.memory_limit == 0 || lasting_.used() + bytes <= room(); }

bool Table::may_resize(const Shelf& shelf, uint32_t buckets) const {
  const size_t now = shelf.bytes_if(shelf.buckets()), then = shelf.bytes_if(buckets);
  return config_.memory_limit == 0 || (lasting_.used() + then - now <= room() / 100 * 97 && fits(then));
}

bool Table::may_grow(const Shelf& shelf, bool full) {
  if (may_resize(shelf, shelf.larger(scarce()))) return true;
  crowded_ |= 1 << static_cast<int>(full);
  return false;
}

void Table::make_room() {
  if (crowded_ == 0) return;
  const Gate::Pass pass(gate_, true);
  if (crowded_ == 0) return;  // another thread made room
  evict(room() / 100 * 5);
  trim(~crowded_);  // gives space freed by the other kind of rows to the kind that needs it
  crowded_ = 0;
}

// The eviction order, lowest first: the score, then a hash of the key. The hash is not mix64 itself because rows are
// ordered by it: if rows of equal score always left from one end, shelves would fill up at the other.
uint64_t Table::rank(Row row) const {
  const auto bits = std::bit_cast<uint32_t>(static_cast<float>(config_.policy.score(row.show(), row.click())));
  const uint32_t ordered = (bits >> 31) != 0 ? ~bits : bits | 0x80000000U;  // maps floats to integers of the same order
  return uint64_t{ordered} << 32 | mix64(mix64(row.key())) >> 32;
}

void Table::evict(size_t bytes) {
  // Radix search from the top digit for the rank up to which rows must be evicted to free just enough.
  constexpr int kBits = 12;
  uint64_t found = 0;  // the digits known so far
  int known = 0;       // and the number of their bits
  size_t left = bytes;
  while (known < 64) {
    const int bits = std::min(kBits, 64 - known), low = 64 - known - bits;
    size_t freed[1 << kBits] = {};
    for (const auto& stripe : stripes_)
      for (const Shelf& shelf : stripe->shelves)
        for (uint32_t slot = 0; slot < shelf.slots(); ++slot) {
          if (!shelf.used(slot)) continue;
          const uint64_t r = rank(shelf.row(slot)) >> low;
          if (r >> bits == found) freed[r & ((1U << bits) - 1)] += shelf.row_bytes();
        }
    uint64_t digit = 0;
    while (digit + 1 < uint64_t{1} << bits && freed[digit] < left) left -= freed[digit++];
    found = found << bits | digit;
    known += bits;
    if (freed[digit] <= left + bytes / 64) break;  // close enough: evict all rows with these digits
  }
  uint64_t removed = 0;
  sweep([&](Stripe& stripe, Ref ref, Row row) {
    if (rank(row) >> (64 - known) > found) return;
    touch(stripe, row, ref.full(), mix64(row.key()));
    remove(stripe, ref, row);
    ++removed;
  });
  evicted_ += removed;
}

// Returns whether this many new rows may bring the table to its limit.
bool Table::may_fill_up(size_t rows) const {
  return scarce() && lasting_.used() + 2 * rows * static_cast<size_t>(layout_.bytes(true)) > room() / 100 * 90;
}

// For a push that fills a shelf completely: evicts the lowest-ranked rows of the shelf. Every call must examine all
// rows, so it evicts several at a time.
void Table::evict_some(Stripe& stripe, bool full) {
  const Shelf& shelf = stripe.shelves[full];
  std::vector<std::pair<uint64_t, uint64_t>> ranks;  // with keys, to break ties deterministically
  ranks.reserve(shelf.size());
  for (uint32_t slot = 0; slot < shelf.slots(); ++slot)
    if (shelf.used(slot)) ranks.emplace_back(rank(shelf.row(slot)), shelf.key(slot));
  const size_t some = ranks.size() / 64 + 1;
  std::nth_element(ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(some - 1), ranks.end());
  for (size_t i = 0; i < some; ++i) {
    const uint64_t key = ranks[i].second, hash = mix64(key);
    const Ref ref(full, shelf.find(hash, key));
    touch(stripe, stripe.row(ref), full, hash);
    remove(stripe, ref, stripe.row(ref));
    ++evicted_;
  }
}

}  // namespace clickfleet
