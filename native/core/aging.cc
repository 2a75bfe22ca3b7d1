// What happens to all rows: decay, age, eviction.
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

void Table::mark_if_left(Stripe& stripe, Row row) const {
  // Readers have it, or will once pending changes are committed, and must forget it.
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
      mark_if_left(stripe, row);
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
    mark_if_left(stripe, row);
  });
}

// Gives memory of erased rows back where that is much, or, for the kinds of rows named `tightly`, worth anything.
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

// A shelf grows while rows then take less than 97% of their part of the limit. After that rows take the last free
// slots, and before the next push the lowest-scored are evicted, worth 5%. While a shelf is copied both copies count.
// Nothing of this depends on whether a cut is being read, nor on the order in which rows came: a run that goes on from
// a checkpoint evicts what it would have evicted.

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
  if (crowded_ == 0) return;  // another thread did it
  evict(room() / 100 * 5);
  trim(~crowded_);  // what rows of the other kind leave is for those that want more
  crowded_ = 0;
}

// What rows are evicted by, lowest first: the score, then a hash of the key. Not mix64 itself: rows are in order of
// that, and shelves would fill up at one end if rows of equal score always went from the other.
uint64_t Table::rank(Row row) const {
  const auto bits = std::bit_cast<uint32_t>(static_cast<float>(config_.policy.score(row.show(), row.click())));
  const uint32_t ordered = (bits >> 31) != 0 ? ~bits : bits | 0x80000000U;  // floats in the order of integers
  return uint64_t{ordered} << 32 | mix64(mix64(row.key())) >> 32;
}

void Table::evict(size_t bytes) {
  // Digit by digit from the top, find the rank up to which rows must go to free just enough.
  constexpr int kBits = 12;
  uint64_t found = 0;  // the digits known so far
  int known = 0;       // and their bits
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
    if (freed[digit] <= left + bytes / 64) break;  // near enough: all rows with these digits go
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

// Whether so many new rows may bring the table to its limit.
bool Table::may_fill_up(size_t rows) const {
  return scarce() && lasting_.used() + 2 * rows * static_cast<size_t>(layout_.bytes(true)) > room() / 100 * 90;
}

// For a push that fills a shelf to the last slot: the lowest of its rows go, a few at a time, as all must be looked at.
void Table::evict_some(Stripe& stripe, bool full) {
  const Shelf& shelf = stripe.shelves[full];
  std::vector<std::pair<uint64_t, uint64_t>> ranks;  // and keys: of two rows of one rank, always the same one
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
