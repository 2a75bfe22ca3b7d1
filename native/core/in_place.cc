#include "in_place.h"

#include "cut.h"
#include "plan.h"
#include "sweep.h"

namespace clickfleet {

InPlace::InPlace(Table& table, const uint64_t* keys, size_t n) : table_(table), keys_(keys, keys + n), rows_(n) {
  if (!table.config_.others.empty()) throw Error("cannot train rows of several widths in place");
  if (table.config_.memory_limit != 0)
    throw Error("cannot train in place with a memory limit, because rows may be evicted");
  if (table.tracking()) throw Error("cannot train in place while the changes of the table are published");
}

InPlace::Held::Held(InPlace& self) : self_(self), pass_(self.table_.gate_, false) {
  Table& table = self.table_;
  if (table.cut_ != nullptr && self.imaged_ != table.epoch_) {
    self.log_images();
    self.imaged_ = table.epoch_;
  }
  for (const auto& stripe : table.stripes_) stripe->lock.lock_shared();
  try {
    self.find_rows();
  } catch (...) {
    for (const auto& stripe : table.stripes_) stripe->lock.unlock_shared();
    throw;
  }
}

InPlace::Held::~Held() {
  for (const auto& stripe : self_.table_.stripes_) stripe->lock.unlock_shared();
}

void InPlace::log_images() {
  Plan plan;
  plan.make(keys_.data(), keys_.size());
  for (int s = 0; s < kStripes; ++s)
    for (uint32_t at = plan.begin[s]; at < plan.end[s]; at += kPiece) {
      const uint32_t to = std::min(plan.end[s], at + kPiece);
      table_.take_undo(to - at);
      {
        Stripe& stripe = *table_.stripes_[s];
        const std::unique_lock guard(stripe.lock);
        for (uint32_t i = at; i < to; ++i)
          if (const Ref ref = stripe.find(plan.hash[i], keys_[plan.where[i]]); ref)
            table_.touch(stripe, stripe.row(ref), ref.kind(), plan.hash[i]);
      }
      table_.give_back_undo(to - at);
    }
}

void InPlace::find_rows() {
  std::vector<uint64_t> now;
  for (const auto& stripe : table_.stripes_)
    for (const Shelf& shelf : stripe->shelves) now.push_back(shelf.version());
  if (now == versions_) return;
  for (size_t i = 0; i < keys_.size(); ++i) {
    const uint64_t hash = mix64(keys_[i]);
    const Stripe& stripe = *table_.stripes_[stripe_of(hash)];
    const Ref ref = stripe.find(hash, keys_[i]);
    if (!ref || !is_full(ref.kind())) throw Error("cannot train in place: a row is missing or has no factors");
    rows_[i] = stripe.row(ref).weights();
  }
  versions_ = std::move(now);
}

}  // namespace clickfleet
