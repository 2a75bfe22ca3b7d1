// Collects the keys of one line, and writes them in the order of the slots.
#pragma once
#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "layout.h"
#include "scan.h"

namespace clickfleet::parse {

// Offsets are written from the first row on that does not have exactly one key in every slot.
inline void note_row(Rows& out, bool one_each) {
  if (!out.one_each || one_each) return;
  out.one_each = false;
  const size_t base = out.keys.size;
  out.offsets.reserve(base + 1);
  for (size_t i = 0; i <= base; ++i) out.offsets.data()[i] = static_cast<int64_t>(i);
  out.offsets.size = base + 1;
}

// The keys of a line whose slots have one field each.
class Lists {
 public:
  explicit Lists(const Layout& layout) : layout_(layout), singles_(layout.slots.size()), spans_(layout.slots.size()) {
    for (const SlotColumn& slot : layout.slots) lists_ += slot.multi;
  }

  void clear() { keys_.size = 0; }
  uint64_t* singles() { return singles_.data(); }
  void open(size_t slot) { spans_[slot] = {keys_.size, keys_.size}; }
  void add(uint64_t key) { keys_.push(key); }
  void close(size_t slot) { spans_[slot].end = keys_.size; }

  // Adds the keys of the values between separators in [p, end) under the hash64 rule. Eight bytes behind `end` must be
  // readable; `limit` is the end of all that is.
  void add_all(size_t slot, const char* p, const char* end, const char* limit, char separator) {
    open(slot);
    const SlotColumn& column = layout_.slots[slot];
    const uint64_t seed = column.seed;
    if (p == end) return;
    const size_t least = column.history ? 0 : 1;  // bytes of a value
    const char* value = p;
    for (const char* at = p; at < end; at += 64) {
      uint64_t found;
      if (limit - at >= 64) {
        found = match(at, separator);
      } else {
        char last[64] = {};
        std::memcpy(last, at, static_cast<size_t>(limit - at));
        found = match(last, separator);
      }
      if (end - at < 64) found &= (uint64_t{1} << (end - at)) - 1;
      keys_.reserve(keys_.size + 65);
      uint64_t* to = keys_.data() + keys_.size;
      for (; found != 0; found &= found - 1) {
        const char* const stop = at + std::countr_zero(found);
        const auto n = static_cast<size_t>(stop - value);
        *to = hash64<true>(seed, value, n);
        to += n >= least;
        value = stop + 1;
      }
      keys_.size = static_cast<size_t>(to - keys_.data());
    }
    if (const auto n = static_cast<size_t>(end - value); n >= least) keys_.push(hash64<true>(seed, value, n));
    close(slot);
  }

  // Drops the events of a history beyond its limit. Returns false if a column has another length than the first.
  bool keep_events(const History& history, Unequal& unequal) {
    const size_t events = spans_[history.first].size();
    for (size_t s = history.first; s < history.first + history.count; ++s) {
      Span& span = spans_[s];
      if (span.size() != events) {
        unequal = {s, events, span.size()};
        return false;
      }
    }
    if (events <= history.max) return true;
    for (size_t s = history.first; s < history.first + history.count; ++s)
      if (history.last)
        spans_[s].begin = spans_[s].end - history.max;
      else
        spans_[s].end = spans_[s].begin + history.max;
    return true;
  }

  void commit(Rows& out) {
    const size_t slots = layout_.slots.size(), base = out.keys.size;
    size_t n = slots - lists_;
    bool one_each = true;
    for (size_t s = 0; s < slots; ++s)
      if (layout_.slots[s].multi) {
        n += spans_[s].size();
        one_each = one_each && spans_[s].size() == 1;
      }
    note_row(out, one_each);
    out.keys.reserve(base + n);
    if (!out.one_each) out.offsets.reserve(out.offsets.size + slots);
    uint64_t* to = out.keys.data() + base;
    for (size_t s = 0; s < slots; ++s) {
      if (layout_.slots[s].multi) {
        const Span& span = spans_[s];
        if (span.size() != 0) std::memcpy(to, keys_.data() + span.begin, span.size() * sizeof(uint64_t));
        to += span.size();
      } else {
        *to++ = singles_[s];
      }
      if (!out.one_each) out.offsets.data()[out.offsets.size++] = to - out.keys.data();
    }
    out.keys.size += n;
    if (layout_.values) {
      out.values.reserve(base + n);
      std::fill(out.values.data() + base, out.values.data() + base + n, 1.0f);
      out.values.size += n;
    }
  }

 private:
  struct Span {
    size_t begin = 0, end = 0;
    size_t size() const { return end - begin; }
  };

  const Layout& layout_;
  std::vector<uint64_t> singles_;  // [slots]; the key of a single-valued slot
  std::vector<Span> spans_;        // [slots]; the keys of a multi-valued slot
  Column<uint64_t> keys_;
  size_t lists_ = 0;
};

// The keys of a line in any order, each with a value.
class Entries {
 public:
  explicit Entries(size_t slots) : counts_(slots), next_(slots) {}

  void clear() {
    entries_.clear();
    std::fill(counts_.begin(), counts_.end(), 0);
    filled_ = 0;
    sorted_ = true;
  }

  int count(size_t slot) const { return counts_[slot]; }

  void add(size_t slot, uint64_t key, float value) {
    sorted_ = sorted_ && (entries_.empty() || entries_.back().slot <= slot);
    entries_.push_back({key, static_cast<uint32_t>(slot), value});
    filled_ += counts_[slot]++ == 0;
  }

  bool keep_events(const History& history, Unequal& unequal) {
    const auto events = static_cast<size_t>(counts_[history.first]);
    for (size_t s = history.first; s < history.first + history.count; ++s)
      if (static_cast<size_t>(counts_[s]) != events) {
        unequal = {s, events, static_cast<size_t>(counts_[s])};
        return false;
      }
    if (events <= history.max) return true;
    const size_t begin = history.last ? events - history.max : 0, end = begin + history.max;
    const auto mine = [&](size_t slot) { return slot - history.first < history.count; };
    for (size_t c = 0; c < history.count; ++c) counts_[history.first + c] = 0;
    std::erase_if(entries_, [&](const Entry& entry) {
      if (!mine(entry.slot)) return false;
      const auto event = static_cast<size_t>(counts_[entry.slot]++);
      return event < begin || event >= end;
    });
    for (size_t c = 0; c < history.count; ++c) counts_[history.first + c] = static_cast<int>(history.max);
    return true;
  }

  // Appends a row. A single-valued slot without a value gets the key of the empty value.
  void commit(const Layout& layout, Rows& out) {
    if (filled_ < counts_.size())
      for (size_t s = 0; s < counts_.size(); ++s)
        if (counts_[s] == 0 && !layout.slots[s].multi) add(s, layout.slots[s].missing, 1.0f);
    const size_t n = entries_.size(), base = out.keys.size;
    out.keys.reserve(base + n);
    if (layout.values) out.values.reserve(base + n);
    note_row(out, filled_ == n && n == counts_.size());
    if (!out.one_each || !sorted_) place(out, base);
    uint64_t* const keys = out.keys.data();
    float* const values = layout.values ? out.values.data() : nullptr;
    for (size_t i = 0; i < n; ++i) {
      const size_t at = sorted_ ? base + i : static_cast<size_t>(next_[entries_[i].slot]++);
      keys[at] = entries_[i].key;
      if (values != nullptr) values[at] = entries_[i].value;
    }
    out.keys.size += n;
    if (layout.values) out.values.size += n;
  }

 private:
  // Computes where the keys of each slot begin, and appends the row's offsets if they are needed.
  void place(Rows& out, size_t base) {
    if (!out.one_each) out.offsets.reserve(out.offsets.size + counts_.size());
    auto position = static_cast<int64_t>(base);
    for (size_t s = 0; s < counts_.size(); ++s) {
      next_[s] = position;
      position += counts_[s];
      if (!out.one_each) out.offsets.data()[out.offsets.size++] = position;
    }
  }

  struct Entry {
    uint64_t key;
    uint32_t slot;
    float value;
  };
  std::vector<Entry> entries_;
  std::vector<int> counts_;
  std::vector<int64_t> next_;
  size_t filled_ = 0;  // slots with at least one key
  bool sorted_ = true;
};

}  // namespace clickfleet::parse
