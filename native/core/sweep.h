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
    for (const bool full : {false, true}) {
      const Shelf& shelf = stripe->shelves[full];
      for (uint32_t at = 0; at < shelf.slots(); at += kPiece) {
        const uint32_t n = std::min(shelf.slots() - at, kPiece);
        take_undo(n);
        {
          const std::unique_lock guard(stripe->lock);
          for (uint32_t slot = at; slot < at + n; ++slot)
            if (shelf.used(slot)) visit(*stripe, Ref(full, slot), shelf.row(slot));
        }
        give_back_undo(n);
      }
    }
}

template <class Visit>
void Table::visit_keys(const std::vector<CountedVector<uint64_t>>& keys, const Visit& visit) {
  for (size_t s = 0; s < kStripes; ++s)
    for (size_t at = 0; at < keys[s].size(); at += kPiece) {
      const size_t n = std::min<size_t>(kPiece, keys[s].size() - at);
      take_undo(n);
      {
        Stripe& stripe = *stripes_[s];
        const std::unique_lock guard(stripe.lock);
        for (size_t i = at; i < at + n; ++i) {
          const uint64_t hash = mix64(keys[s][i]);
          const Ref ref = stripe.find(hash, keys[s][i]);
          if (!ref) continue;
          touch(stripe, stripe.row(ref), ref.full(), hash);
          visit(stripe, stripe.row(ref));
        }
      }
      give_back_undo(n);
    }
}

}  // namespace clickfleet
