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
  stripe.index.erase(stripe.find(mix64(key), key));
  stripe.close_gap(ref);
}

uint64_t Table::shrink() {
  const Policy& policy = config_.policy;
  uint64_t removed = 0;
  const Gate::Pass pass(gate_, true);
  sweep([&](Stripe& stripe, Ref ref, Row row) {
    touch(stripe, ref, row);
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
  for (const auto& stripe : stripes_) {
    const std::unique_lock guard(stripe->lock);
    stripe->index.trim();
  }
  shrunk_ += removed;
  return removed;
}

void Table::end_day() {
  const Gate::Pass pass(gate_, true);
  sweep([&](Stripe& stripe, Ref ref, Row row) {
    touch(stripe, ref, row);
    if (row.unseen_days() < 0xffff) row.set_unseen_days(row.unseen_days() + 1);
    mark_if_left(stripe, row);
  });
}

// ---- the memory limit ----

size_t Table::need(size_t keys) const {
  return keys * (static_cast<size_t>(layout_.bytes(true)) + 2 * sizeof(uint64_t)) +
         kStripes * (pools_.short_pool.chunk_bytes() + pools_.full_pool.chunk_bytes());
}

size_t Table::spare() const {
  if (config_.memory_limit == 0) return SIZE_MAX;
  const size_t limit = config_.memory_limit - config_.snapshot_reserve, used = budget_.used();
  return used < limit ? limit - used : 0;
}

Table::Room::Room(Table& t, size_t keys) : table(t), bytes(t.config_.memory_limit == 0 ? 0 : t.need(keys)) {
  if (bytes == 0) return;
  const size_t limit = table.config_.memory_limit - table.config_.snapshot_reserve, high = limit / 100 * 97;
  if (bytes > limit / 2)
    throw Error("a push of " + std::to_string(keys) + " keys may need " + std::to_string(bytes) +
                " bytes and the table may hold " + std::to_string(limit) +
                ": use smaller batches or a larger memory_limit");
  for (;;) {
    {
      const std::lock_guard guard(table.room_lock_);
      if (table.budget_.used() + table.promised_ + bytes <= high) {
        table.promised_ += bytes;
        return;
      }
    }
    table.evict_to(limit / 100 * 92 - bytes);
  }
}

Table::Room::~Room() {
  if (bytes == 0) return;
  const std::lock_guard guard(table.room_lock_);
  table.promised_ -= bytes;
}

void Table::evict_to(size_t target) {
  const Gate::Pass pass(gate_,
                        true);  // so nothing is promised to a push under way, but for those that wait at the gate
  size_t promised = 0;
  {
    const std::lock_guard guard(room_lock_);
    promised = promised_;
  }
  target -= std::min(promised, target / 2);
  // Freed rows leave partly used chunks behind: go on until the bytes are really there.
  for (size_t used = budget_.used(); used > target; used = budget_.used()) {
    const uint64_t before = evicted_;
    evict(used - target);
    if (evicted_ == before)
      throw Error(
          "memory_limit is taken up by what is not rows (index, changed and deleted keys): raise it or publish");
  }
}

namespace {

// What rows are evicted by, lowest first: the score, then a hash of the key. Not mix64 itself: the index is ordered by
// that, and would fill up at one end if rows of equal score always went from the other.
uint64_t rank_of(double score, uint64_t key) {
  const auto bits = std::bit_cast<uint32_t>(static_cast<float>(score));
  const uint32_t ordered = (bits >> 31) != 0 ? ~bits : bits | 0x80000000U;  // floats in the order of integers
  return uint64_t{ordered} << 32 | mix64(mix64(key)) >> 32;
}

}  // namespace

void Table::evict(size_t bytes) {
  // Digit by digit from the top, find the rank up to which rows must go to free just enough.
  constexpr int kBits = 12;
  const auto rank = [&](Row row) { return rank_of(config_.policy.score(row.show(), row.click()), row.key()); };
  uint64_t found = 0;  // the digits known so far
  int known = 0;       // and their bits
  size_t left = bytes;
  while (known < 64) {
    const int bits = std::min(kBits, 64 - known), low = 64 - known - bits;
    size_t freed[1 << kBits] = {};
    for (const auto& stripe : stripes_)
      for (const Arena& arena : stripe->arenas)
        for (uint32_t i = 0; i < arena.size(); ++i) {
          const uint64_t r = rank(Row{arena.at(i)}) >> low;
          if (r >> bits == found) freed[r & ((1U << bits) - 1)] += static_cast<size_t>(arena.row_bytes());
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
    touch(stripe, ref, row);
    remove(stripe, ref, row);
    ++removed;
  });
  evicted_ += removed;
}

}  // namespace clickfleet
