// Events that concern every row of a table: shrink, the end of a day, the publication of a base.
//
// Rows in memory follow an event at once. Rows on disk follow when they are next needed: each segment knows how many
// events its rows have followed (its clock), and the rest is applied to a row when it is read. What an event does to a
// row depends on the row alone, so both ways give the same bits.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "stripe.h"

namespace clickfleet {

struct Event {
  enum Kind : uint8_t {
    shrink,
    end_day,
    mark_base,    // a base is cut: its rows are marked
    list_base,    // and committed: consumers have them
    unmark_base,  // or aborted: the marks go
    forget_base,  // or aborted, and nothing was published before: all flags for publishing go
    reset_epochs,
  };
  using Bounds = std::array<uint64_t, kStripes>;

  Kind kind = shrink;
  bool tracking = false;  // changes were recorded at that moment
  // mark_base: what was marked of each stripe, the rows with a smaller hash >> 32. Absent while the base is being read.
  std::shared_ptr<const Bounds> marked;
};

class History {
 public:
  using Events = std::vector<Event>;

  std::shared_ptr<const Events> events() const {
    const std::lock_guard guard(lock_);
    return events_;
  }
  uint32_t now() const { return static_cast<uint32_t>(events()->size()); }
  void add(const Event& event) {
    const std::lock_guard guard(lock_);
    auto longer = std::make_shared<Events>(*events_);
    longer->push_back(event);
    events_ = std::move(longer);
  }
  void settle(uint32_t at, const Event::Bounds& marked) {
    const std::lock_guard guard(lock_);
    auto settled = std::make_shared<Events>(*events_);
    (*settled)[at].marked = std::make_shared<const Event::Bounds>(marked);
    events_ = std::move(settled);
  }
  // While a cut is open, its moment must be recoverable from disk: rows are not brought further than that.
  void pin(uint32_t clock) {
    const std::lock_guard guard(lock_);
    pinned_ = clock;
  }
  void unpin() { pin(UINT32_MAX); }
  // The events up to the moment to which segments may be brought now.
  std::pair<std::shared_ptr<const Events>, uint32_t> reachable() const {
    const std::lock_guard guard(lock_);
    return {events_, std::min(pinned_, static_cast<uint32_t>(events_->size()))};
  }

 private:
  mutable std::mutex lock_;
  std::shared_ptr<const Events> events_ = std::make_shared<const Events>();
  uint32_t pinned_ = UINT32_MAX;
};

}  // namespace clickfleet
