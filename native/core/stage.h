// Rows of one stripe that were read from disk and are expected to be used soon: pulled, then pushed. They are copies;
// the rows are still on disk. A row leaves the stage when its push moves it to memory, or when newer ones need the
// place.
#pragma once
#include <bit>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "hash.h"
#include "layout.h"
#include "memory.h"

namespace clickfleet {

class Stage {
 public:
  enum class State : uint8_t { absent, reading, ready };

  static size_t slot_bytes(const Layout& layout) {
    return static_cast<size_t>(layout.most_bytes()) + sizeof(Slot) + 12;
  }

  void allocate(Budget& budget, const Layout& layout, uint32_t slots) {
    layout_ = &layout;
    stride_ = static_cast<size_t>(layout.most_bytes());
    images_ = std::make_unique<CountedPages<char>>(budget, slots * stride_);
    slots_ = std::make_unique<CountedPages<Slot>>(budget, slots);
    size_ = slots;
    const uint32_t places = std::bit_ceil(slots * 3 / 2);
    map_ = std::make_unique<CountedPages<uint32_t>>(budget, places);
    mask_ = places - 1;
  }
  bool allocated() const { return size_ != 0; }

  // Where a row was when it was read. Whoever removes a row from its segment erases it here, so the row is still there
  // unless the segment was merged.
  struct Origin {
    uint64_t segment = 0;  // its id
    uint32_t position = 0, clock = 0;
    RowKind kind = 0;
  };

  // Copies the image of a row that is ready.
  State copy(uint64_t key, char* image, Origin& origin) const {
    const std::lock_guard guard(lock_);
    const uint32_t slot = find(key);
    if (slot == kNone) return State::absent;
    const Slot& found = (*slots_)[slot];
    if (found.state == State::ready) {
      origin = found.origin;
      std::memcpy(image, &(*images_)[slot * stride_], static_cast<size_t>(layout_->bytes(origin.kind)));
    }
    return found.state;
  }

  bool holds(uint64_t key) const {  // ready or being read
    const std::lock_guard guard(lock_);
    return find(key) != kNone;
  }

  // Takes a place for a row that is about to be read. Fails if the row is here, or if reads have taken every place.
  bool reserve(uint64_t key, uint32_t& slot, uint32_t& ticket) {
    const std::lock_guard guard(lock_);
    if (size_ == 0 || find(key) != kNone) return false;
    for (uint32_t tries = 0;; ++tries) {
      slot = hand_;
      hand_ = hand_ + 1 == size_ ? 0 : hand_ + 1;
      if ((*slots_)[slot].state != State::reading) break;
      if (tries == 8) return false;
    }
    Slot& taken = (*slots_)[slot];
    if (taken.state == State::ready) unlink(slot);
    ticket = ++tickets_;
    taken = {key, {}, ticket, State::reading};
    link(slot);
    return true;
  }

  void fill(uint32_t slot, uint32_t ticket, const char* image, const Origin& origin) {
    const std::lock_guard guard(lock_);
    Slot& taken = (*slots_)[slot];
    if (taken.state != State::reading || taken.ticket != ticket) return;  // the row was moved meanwhile
    std::memcpy(&(*images_)[slot * stride_], image, static_cast<size_t>(layout_->bytes(origin.kind)));
    taken.state = State::ready;
    taken.origin = origin;
    changed_.notify_all();
  }
  void cancel(uint32_t slot, uint32_t ticket) {
    const std::lock_guard guard(lock_);
    const Slot& taken = (*slots_)[slot];
    if (taken.state == State::reading && taken.ticket == ticket) unlink(slot);
    changed_.notify_all();
  }
  void erase(uint64_t key) {
    const std::lock_guard guard(lock_);
    if (size_ == 0) return;
    if (const uint32_t slot = find(key); slot != kNone) unlink(slot);
    changed_.notify_all();
  }
  // Waits until the row is not being read.
  void wait(uint64_t key) const {
    std::unique_lock guard(lock_);
    changed_.wait(guard, [&] {
      const uint32_t slot = find(key);
      return slot == kNone || (*slots_)[slot].state != State::reading;
    });
  }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Slot {
    uint64_t key;
    Origin origin;
    uint32_t ticket;
    State state;
  };

  uint32_t home(uint64_t key) const { return static_cast<uint32_t>(mix64(key) >> 32) & mask_; }
  uint32_t find(uint64_t key) const {
    if (size_ == 0) return kNone;
    for (uint32_t at = home(key); (*map_)[at] != 0; at = (at + 1) & mask_)
      if (const uint32_t slot = (*map_)[at] - 1; (*slots_)[slot].key == key) return slot;
    return kNone;
  }
  void link(uint32_t slot) {
    uint32_t at = home((*slots_)[slot].key);
    while ((*map_)[at] != 0) at = (at + 1) & mask_;
    (*map_)[at] = slot + 1;
  }
  void unlink(uint32_t slot) {
    uint32_t hole = home((*slots_)[slot].key);
    while ((*map_)[hole] != slot + 1) hole = (hole + 1) & mask_;
    for (uint32_t at = (hole + 1) & mask_; (*map_)[at] != 0; at = (at + 1) & mask_) {
      // Move an entry back to the hole unless its home lies behind the hole.
      const uint32_t wanted = home((*slots_)[(*map_)[at] - 1].key);
      if (((at - wanted) & mask_) < ((at - hole) & mask_)) continue;
      (*map_)[hole] = (*map_)[at];
      hole = at;
    }
    (*map_)[hole] = 0;
    (*slots_)[slot].state = State::absent;
  }

  const Layout* layout_ = nullptr;
  size_t stride_ = 0;
  uint32_t size_ = 0, mask_ = 0, hand_ = 0, tickets_ = 0;
  std::unique_ptr<CountedPages<char>> images_;
  std::unique_ptr<CountedPages<Slot>> slots_;
  std::unique_ptr<CountedPages<uint32_t>> map_;  // slot + 1, or 0
  mutable std::mutex lock_;
  mutable std::condition_variable changed_;
};

}  // namespace clickfleet
