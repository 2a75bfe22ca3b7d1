// Operations on all rows: decay, ageing, eviction.
#include <algorithm>
#include <bit>
#include <cmath>

#include "tiers.h"

namespace clickfleet {

bool Table::publishable(Row row) const {
  return config_.policy.score(row.show(), row.click()) >= config_.policy.base_threshold &&
         row.unseen_days() <= config_.policy.delta_keep_days;
}

bool Table::unpublishable(Row row) const {
  // Consumers have this row, or will have it once the pending changes are committed. They must delete it.
  return (row.flags() & (kListed | kEmitted)) != 0 && !publishable(row);
}

void Table::mark_if_unpublishable(Stripe& stripe, Row row) const {
  if (unpublishable(row)) mark_changed(stripe, row);
}

void Table::record_removal(Stripe& stripe, Row row) {
  if ((row.flags() & kListed) != 0)
    stripe.deleted.push_back(row.key());
  else if ((row.flags() & kEmitted) != 0)
    stripe.deleted_if_committed.push_back(row.key());
}

void Table::remove(Stripe& stripe, Ref ref, Row row) {
  record_removal(stripe, row);
  count_row(ref.kind(), -1);
  stripe.shelves[ref.kind()].erase(ref.slot());
}

void Table::decay(Row row) const {
  row.set_show(row.show() * config_.policy.decay_rate);
  row.set_click(row.click() * config_.policy.decay_rate);
}

bool Table::outlived(Row row) const {
  const Policy& policy = config_.policy;
  return policy.score(row.show(), row.click()) < policy.delete_threshold ||
         row.unseen_days() > policy.delete_after_unseen_days;
}

void Table::grow_older(Row row) {
  if (row.unseen_days() < 0xffff) row.set_unseen_days(row.unseen_days() + 1);
}

uint64_t Table::shrink() {
  uint64_t removed = 0;
  const Gate::Pass pass(gate_, true);
  sweep([&](Stripe& stripe, Ref ref, Row row) {
    touch(stripe, row, ref.kind(), mix64(row.key()));
    decay(row);
    if (outlived(row)) {
      remove(stripe, ref, row);
      ++removed;
    } else {
      mark_if_unpublishable(stripe, row);
    }
  });
  removed += follow({Event::shrink, tracking(), nullptr});
  trim(0);
  shrunk_ += removed;
  return removed;
}

void Table::end_day() {
  const Gate::Pass pass(gate_, true);
  sweep([&](Stripe& stripe, Ref ref, Row row) {
    touch(stripe, row, ref.kind(), mix64(row.key()));
    grow_older(row);
    mark_if_unpublishable(stripe, row);
  });
  follow({Event::end_day, tracking(), nullptr});
}

// Shrinks shelves with many erased rows. For the kinds of rows in the bit mask `tightly`, shrinks whenever it saves
// anything worthwhile.
void Table::trim(uint64_t tightly) {
  for (const auto& stripe : stripes_)
    for (RowKind kind = 0; kind < layout_.kinds(); ++kind) {
      Shelf& shelf = stripe->shelves[kind];
      const uint32_t buckets = shelf.trimmed(), spare = shelf.buckets() - buckets;
      const bool worth = (tightly >> kind & 1) != 0 ? spare > shelf.buckets() / 40 : spare > shelf.buckets() / 8;
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

bool Table::fits(size_t bytes) const {
  return config_.memory_limit == 0 ||
         lasting_.used() + (disk_ == nullptr ? 0 : disk_->scratch().used()) + bytes <= room();
}

bool Table::may_resize(const Stripe& stripe, RowKind kind, uint32_t buckets) const {
  if (config_.memory_limit == 0) return true;
  const Shelf& shelf = stripe.shelves[kind];
  const size_t now = shelf.bytes_if(shelf.buckets()), then = shelf.bytes_if(buckets);
  if (disk_ != nullptr) return stripe.shelf_bytes() + then - now <= shelf_room() && fits(then);
  return lasting_.used() + then - now <= room() / 100 * 97 && fits(then);
}

bool Table::may_grow(const Stripe& stripe, RowKind kind) {
  const Shelf& shelf = stripe.shelves[kind];
  if (may_resize(stripe, kind, shelf.larger(scarce()))) return true;
  if (disk_ == nullptr) crowded_ |= uint64_t{1} << kind;
  return false;
}

void Table::make_room() {
  if (disk_ != nullptr) {
    relieve();
    if (config_.disk_limit == 0 || disk_cost_ <= static_cast<int64_t>(disk_room())) return;
    const Gate::Pass pass(gate_, true);
    if (disk_cost_ > static_cast<int64_t>(disk_room())) evict_from_both(disk_room() / 20);
    return;
  }
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
    touch(stripe, row, ref.kind(), mix64(row.key()));
    remove(stripe, ref, row);
    ++removed;
  });
  evicted_ += removed;
}

// Returns whether this many new rows may bring the table to its limit.
bool Table::may_fill_up(size_t rows) const {
  return scarce() && disk_ == nullptr &&
         lasting_.used() + 2 * rows * static_cast<size_t>(layout_.most_bytes()) > room() / 100 * 90;
}

// For a push that fills a shelf completely: evicts the lowest-ranked rows of the shelf. Every call must examine all
// rows, so it evicts several at a time.
void Table::evict_some(Stripe& stripe, RowKind kind) {
  const Shelf& shelf = stripe.shelves[kind];
  std::vector<std::pair<uint64_t, uint64_t>> ranks;  // with keys, to break ties deterministically
  ranks.reserve(shelf.size());
  for (uint32_t slot = 0; slot < shelf.slots(); ++slot)
    if (shelf.used(slot)) ranks.emplace_back(rank(shelf.row(slot)), shelf.key(slot));
  const size_t some = ranks.size() / 64 + 1;
  std::nth_element(ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(some - 1), ranks.end());
  for (size_t i = 0; i < some; ++i) {
    const uint64_t key = ranks[i].second, hash = mix64(key);
    const Ref ref(kind, shelf.find(hash, key));
    touch(stripe, stripe.row(ref), kind, hash);
    remove(stripe, ref, stripe.row(ref));
    ++evicted_;
  }
}

}  // namespace clickfleet
