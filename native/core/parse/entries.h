// Collects the keys of one line in the order they occur, and writes them in the order of the slots.
#pragma once
#include <algorithm>
#include <vector>

#include "layout.h"

namespace clickfleet::parse {

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

  // Appends a row. A single-valued slot without a value gets the key of the empty value.
  void commit(const Layout& layout, Rows& out) {
    if (filled_ < counts_.size())
      for (size_t s = 0; s < counts_.size(); ++s)
        if (counts_[s] == 0 && !layout.slots[s].multi) add(s, layout.slots[s].missing, 1.0f);
    const size_t n = entries_.size(), base = out.keys.size;
    out.keys.reserve(base + n);
    if (layout.values) out.values.reserve(base + n);
    const bool one_each = filled_ == n && n == counts_.size();
    if (out.one_each && !one_each) {  // the first such row: write the offsets that were implied so far
      out.one_each = false;
      out.offsets.reserve(base + 1);
      for (size_t i = 0; i <= base; ++i) out.offsets.data()[i] = static_cast<int64_t>(i);
      out.offsets.size = base + 1;
    }
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
