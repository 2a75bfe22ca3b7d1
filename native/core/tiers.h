// Rows that are read from the disk tier (disk.h), for the parts of the table that work on rows of both tiers.
#pragma once
#include <algorithm>

#include "cut.h"
#include "disk.h"
#include "sweep.h"

namespace clickfleet {

// The image of a row on disk, in memory that the caller owns.
struct Table::ColdRow {
  std::shared_ptr<Segment> segment;  // where it is; absent if it came from the stage or from a shelf
  uint32_t position = 0, clock = 0;
  RowKind kind = 0;
  char* image = nullptr;

  Row row(const Layout& layout) const { return {image, image + layout.hot_bytes(kind)}; }
};

// The live rows of a stripe in a range of hashes.
struct Table::ColdRows {
  struct Piece {  // adjacent records of one segment
    std::shared_ptr<Segment> segment;
    RowKind kind;
    uint32_t first;
    std::vector<bool> live;
  };
  uint32_t first = 0, last = 0;
  uint64_t version = 0;
  std::vector<Piece> pieces;
  std::vector<std::unique_ptr<Sectors>> buffers;
  std::vector<ColdRow> rows;
};

template <class Found, class Absent>
void Table::read_keys(const uint64_t* keys, const uint32_t* places, size_t n, bool located, const Found& found,
                      const Absent& absent) const {
  struct Want {
    uint32_t i;
    uint64_t hash;
  };
  struct Pending {
    Want want;
    size_t first, last;  // of the reads
  };
  const auto key_of = [&](const Want& want) { return keys[places[want.i]]; };
  const auto stride = static_cast<size_t>(layout_.most_bytes());
  std::vector<Want> wants(n);
  for (uint32_t i = 0; i < n; ++i) wants[i] = {i, mix64(keys[places[i]])};
  std::sort(wants.begin(), wants.end(),
            [](const Want& a, const Want& b) { return stripe_of(a.hash) < stripe_of(b.hash); });
  std::vector<char> image(stride);
  std::vector<Want> missing;  // of one stripe: neither in memory nor staged
  while (!wants.empty()) {
    std::vector<Read> reads;
    std::vector<Pending> pending;
    std::vector<Want> busy;  // someone else is reading them
    for (size_t at = 0; at < wants.size();) {
      const int s = stripe_of(wants[at].hash);
      const Stripe& stripe = *stripes_[static_cast<size_t>(s)];
      const std::shared_lock guard(stripe.lock);
      size_t end = at;
      while (end < wants.size() && stripe_of(wants[end].hash) == s) ++end;
      missing.clear();
      for (; at < end; ++at) {
        const Want want = wants[at];
        const uint64_t key = key_of(want);
        ColdRow row;
        row.image = image.data();
        if (const Ref ref = stripe.find(want.hash, key); ref) {  // it has moved to memory meanwhile
          row.kind = ref.kind();
          row.image = stripe.row(ref).hot;
          if (!located) found(want.i, row);
          continue;
        }
        if (!located) {
          Stage::Origin origin;
          const Stage::State state = stripe.cold->stage.copy(key, row.image, origin);
          row.kind = origin.kind;
          row.clock = origin.clock;
          if (state == Stage::State::ready) found(want.i, row);
          if (state == Stage::State::reading) busy.push_back(want);
          if (state != Stage::State::absent) continue;
        }
        stripe.cold->prefetch(want.hash, false);
        missing.push_back(want);
      }
      for (const Want& want : missing) stripe.cold->prefetch(want.hash, true);
      for (const Want& want : missing) {
        const uint64_t key = key_of(want);
        ColdRow row;
        row.image = image.data();
        const size_t first = reads.size();
        const bool in_memory = stripe.cold->find(want.hash, [&](const auto& segment, RowKind kind, uint32_t position) {
          if (const auto held = segment->memory(); held != nullptr) {
            const char* const record = held->data() + segment->offset(kind, position);
            if (load<uint64_t>(record) != key) return false;
            std::memcpy(row.image, record, static_cast<size_t>(layout_.bytes(kind)));
            row.segment = segment;
            row.position = position;
            row.clock = segment->clock();
            row.kind = kind;
            return true;
          }
          Read read;
          read.segment = segment;
          read.key = key;
          read.position = position;
          read.kind = kind;
          reads.push_back(std::move(read));
          return false;
        });
        if (in_memory) {
          reads.resize(first);
          found(want.i, row);
        } else if (reads.size() == first) {
          absent(want.i);
        } else {
          // A wrong row must not free the place of the right one.
          Read& read = reads[first];
          if (reads.size() == first + 1 && stripe.cold->stage.reserve(key, read.slot, read.ticket))
            read.stage = &stripe.cold->stage;
          pending.push_back({want, first, reads.size()});
        }
      }
    }
    // The stage keeps a row for a push, or for the next pull; this caller has a copy of its own.
    std::vector<char> images(reads.size() * stride);
    const auto matches = std::make_unique<bool[]>(reads.size() + 1);
    std::vector<ColdRow> rows(reads.size());
    ReadGroup group;
    group.add(reads.size());
    for (size_t i = 0; i < reads.size(); ++i) {
      Read& read = reads[i];
      read.to = images.data() + i * stride;
      read.found = &matches[i];
      read.group = &group;
      rows[i] = {std::const_pointer_cast<Segment>(read.segment), read.position, read.segment->clock(), read.kind,
                 read.to};
    }
    disk_->reads_waited += reads.size();
    disk_->reads().add(std::move(reads), true);
    group.wait();
    for (const Pending& one : pending) {
      size_t i = one.first;
      while (i < one.last && !matches[i]) ++i;
      if (i < one.last)
        found(one.want.i, rows[i]);
      else
        absent(one.want.i);
    }
    for (const Want& want : busy) stripes_[static_cast<size_t>(stripe_of(want.hash))]->cold->stage.wait(key_of(want));
    wants = std::move(busy);
  }
}

// Calls visit(stripe, row, kind) for those of the keys that are on disk, none of which is in memory, and writes the
// rows to a new segment. Calls absent(stripe, key) for the others. The caller is alone in the gate.
template <class Visit, class Absent>
void Table::visit_cold_keys(Stripe& stripe, const uint64_t* keys, size_t n, const Visit& visit, const Absent& absent) {
  std::vector<uint32_t> places(n);
  for (uint32_t i = 0; i < n; ++i) places[i] = i;
  const auto stride = static_cast<size_t>(layout_.most_bytes());
  std::vector<char> images;
  std::vector<uint64_t> missing;
  std::vector<std::pair<uint32_t, ColdRow>> rows;
  read_keys(
      keys, places.data(), n, true,
      [&](uint32_t i, const ColdRow& row) {
        rows.emplace_back(i, row);
        images.insert(images.end(), row.image, row.image + stride);
      },
      [&](uint32_t i) { missing.push_back(keys[i]); });
  disk_->wait_for_room(rows.size() * Segment::most_record_size(layout_));
  take_undo(rows.size());
  {
    const std::unique_lock guard(stripe.lock);
    for (const uint64_t key : missing) absent(stripe, key);
    Victims changed(layout_.kinds());
    for (size_t at = 0; at < rows.size(); ++at) {
      auto& [i, row] = rows[at];
      row.image = images.data() + at * stride;
      // A merge may have moved it. Its image is still right: only this thread changes rows.
      const uint64_t hash = mix64(keys[i]);
      if (!stripe.cold->has(row.segment.get()) || !row.segment->index(row.kind).is_live(row.position)) {
        const bool moved = stripe.cold->find(hash, [&](const auto& segment, RowKind kind, uint32_t position) {
          std::vector<char> image(stride);
          segment->copy(kind, position, image.data());
          if (load<uint64_t>(image.data()) != keys[i]) return false;
          std::memcpy(row.image, image.data(), stride);
          row.segment = segment;
          row.position = position;
          row.clock = segment->clock();
          return true;
        });
        if (!moved) continue;
      }
      const Row view = row.row(layout_);
      refresh(stripe, view, row.kind, row.clock);
      touch(stripe, view, row.kind, hash);
      visit(stripe, view, row.kind);
      stripe.cold->kill(*row.segment, row.kind, row.position);
      stripe.cold->stage.erase(keys[i]);
      changed[row.kind].push_back({hash, view.hot, view.cold});
    }
    write_segment(stripe, changed, history_.now());
  }
  give_back_undo(rows.size());
}

}  // namespace clickfleet
