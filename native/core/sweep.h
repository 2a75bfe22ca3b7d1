// Walks over rows for a caller that is alone in the gate. The walk releases the lock after every piece, so that readers
// proceed and the undo log of an open cut can drain.
#pragma once
#include <algorithm>

#include "table.h"

namespace clickfleet {

inline constexpr uint32_t kPiece = 256;

template <class Visit>
void Table::sweep(const Visit& visit) {
  for (const auto& stripe : stripes_)
    for (RowKind kind = 0; kind < layout_.kinds(); ++kind) {
      const Shelf& shelf = stripe->shelves[kind];
      for (uint32_t at = 0; at < shelf.slots(); at += kPiece) {
        const uint32_t n = std::min(shelf.slots() - at, kPiece);
        take_undo(n);
        {
          const std::unique_lock guard(stripe->lock);
          for (uint32_t slot = at; slot < at + n; ++slot)
            if (shelf.used(slot)) visit(*stripe, Ref(kind, slot), shelf.row(slot));
        }
        give_back_undo(n);
      }
    }
}

template <class Visit>
void Table::visit_keys(const std::vector<CountedVector<uint64_t>>& keys, const Visit& visit) {
  visit_keys(keys, visit, [](Stripe&, uint64_t) {});
}

// Calls visit(stripe, row, kind) for the rows of the keys, by stripe, and absent(stripe, key) for keys without one.
template <class Visit, class Absent>
void Table::visit_keys(const std::vector<CountedVector<uint64_t>>& keys, const Visit& visit, const Absent& absent) {
  const size_t piece = disk_ == nullptr ? kPiece : 4 * kPiece;
  std::vector<uint64_t> cold;  // keys that may be on disk
  for (size_t s = 0; s < kStripes; ++s)
    for (size_t at = 0; at < keys[s].size(); at += piece) {
      const size_t n = std::min(piece, keys[s].size() - at);
      Stripe& stripe = *stripes_[s];
      take_undo(n);
      {
        const std::unique_lock guard(stripe.lock);
        for (size_t i = at; i < at + n; ++i) {
          const uint64_t key = keys[s][i], hash = mix64(key);
          if (const Ref ref = stripe.find(hash, key); ref) {
            touch(stripe, stripe.row(ref), ref.kind(), hash);
            visit(stripe, stripe.row(ref), ref.kind());
          } else if (stripe.cold != nullptr && stripe.cold->may_hold(hash)) {
            cold.push_back(key);
          } else {
            absent(stripe, key);
          }
        }
      }
      give_back_undo(n);
      if (cold.empty()) continue;
      visit_cold_keys(stripe, cold.data(), cold.size(), visit, absent);
      cold.clear();
    }
}

}  // namespace clickfleet
