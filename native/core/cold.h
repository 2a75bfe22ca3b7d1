// The rows of one stripe that are on disk.
#pragma once
#include <memory>
#include <vector>

#include "segment.h"
#include "stage.h"

namespace clickfleet {

// The lock of the stripe guards the segments; the stage has its own.
struct Cold {
  std::vector<std::shared_ptr<Segment>> segments;
  Stage stage;
  uint64_t version = 0;  // changes with the list of segments
  const RowKind kinds;
  std::vector<uint64_t> rows;  // live rows, by kind

  explicit Cold(RowKind of_rows) : kinds(of_rows), rows(of_rows) {}

  // Calls visit(segment, kind, position) for every live row that may have this hash, until it returns true.
  template <class Visit>
  bool find(uint64_t hash, const Visit& visit) const {
    for (const auto& segment : segments)
      for (RowKind kind = kinds; kind-- > 0;)  // full rows first
        if (segment->index(kind).find(hash, [&](uint32_t position) { return visit(segment, kind, position); }))
          return true;
    return false;
  }
  bool may_hold(uint64_t hash) const {
    return find(hash, [](const auto&, RowKind, uint32_t) { return true; });
  }
  void prefetch(uint64_t hash, bool tags) const {
    for (const auto& segment : segments)
      for (RowKind kind = 0; kind < kinds; ++kind)
        if (const SegmentIndex& index = segment->index(kind); index.live() != 0)
          tags ? index.prefetch_tags(hash) : index.prefetch_start(hash);
  }
  // The segment with this id, unless it was merged.
  Segment* segment(uint64_t id) const {
    for (const auto& one : segments)
      if (one->id() == id) return one.get();
    return nullptr;
  }
  bool has(const Segment* wanted) const {
    for (const auto& segment : segments)
      if (segment.get() == wanted) return true;
    return false;
  }
  void add(std::shared_ptr<Segment> segment) {
    for (RowKind kind = 0; kind < kinds; ++kind) rows[kind] += segment->index(kind).live();
    segments.push_back(std::move(segment));
    ++version;
  }
  void kill(Segment& segment, RowKind kind, uint32_t position) {
    segment.index(kind).kill(position);
    --rows[kind];
  }
};

}  // namespace clickfleet
