// Walking over rows on behalf of who is alone in the gate. In pieces: between two of them readers get the lock, and the
// undo log of a cut that is being read may empty.
#pragma once
#include <algorithm>

#include "table.h"

namespace clickfleet {

inline constexpr uint32_t kPiece = 256;

inline void Table::touch(Stripe& stripe, Ref ref, Row row) { touch(stripe, row, ref.full(), tag_of(mix64(row.key()))); }

template <class Visit>
void Table::sweep(const Visit& visit) {
  for (const auto& stripe : stripes_)
    for (const bool full : {false, true})
      // From the last row down, because a removed row is replaced by the last.
      for (uint32_t left = stripe->arenas[full].size(); left > 0;) {
        const uint32_t n = std::min(left, kPiece);
        take_undo(n);
        {
          const std::unique_lock guard(stripe->lock);
          for (uint32_t i = 0; i < n; ++i) {
            const Ref ref = Ref::of(full, --left);
            const Row row = stripe->row(ref);
            visit(*stripe, ref, row);
          }
        }
        give_back_undo(n);
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
          const Index::Entry* entry = stripe.find(hash, keys[s][i]);
          if (entry == nullptr) continue;
          const Row row = stripe.row(entry->ref);
          touch(stripe, row, entry->ref.full(), tag_of(hash));
          visit(stripe, row);
        }
      }
      give_back_undo(n);
    }
}

}  // namespace clickfleet
