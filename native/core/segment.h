// A segment: rows of one stripe on disk, in order of their hashes, written once. The file holds the records of
// one kind of rows after the other, each kind from the next sector on. A record is the image of a row (layout.h: the
// hot part, then the cold one) and a checksum.
//
// The index in memory has a 16-bit tag per row and the position of the first row of each bucket, 2.25 bytes per row.
// The bucket of a row is proportional to its hash, so a look-up compares the tags of one bucket and finds the position
// of the only row that may be the right one; a wrong row turns up once in several thousand look-ups and is told by its
// key. A row that is no longer here has the tag 0.
//
// A new segment is in memory until its file is written; until then rows are read from there. The lock of the stripe
// guards the index. Everything else is safe to use without it.
#pragma once
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "config.h"
#include "file.h"
#include "layout.h"
#include "shelf.h"

namespace clickfleet {

// The tags of the rows of one kind.
class SegmentIndex {
 public:
  static constexpr uint32_t kBucketRows = 16;

  SegmentIndex(Budget& budget, uint32_t rows)
      : rows_(rows),
        live_(rows),
        buckets_(rows / kBucketRows + 1),
        tags_(budget, rows + kPadding),
        starts_(budget, buckets_ + 1) {}

  static size_t bytes(uint32_t rows) {
    return (size_t{rows} + kPadding) * sizeof(uint16_t) + (size_t{rows} / kBucketRows + 2) * sizeof(uint32_t);
  }

  // Adds the next row. Rows come in order of their hashes; `finish` follows the last one.
  void append(uint64_t hash) {
    for (const uint32_t bucket = home(hash); next_bucket_ <= bucket; ++next_bucket_) starts_[next_bucket_] = filled_;
    tags_[filled_++] = Shelf::tag(hash);
  }
  void finish() {
    for (; next_bucket_ <= buckets_; ++next_bucket_) starts_[next_bucket_] = filled_;
  }

  uint32_t rows() const { return rows_; }
  uint32_t live() const { return live_; }
  bool is_live(uint32_t position) const { return tags_[position] != 0; }
  void kill(uint32_t position) {
    tags_[position] = 0;
    --live_;
  }

  // Calls visit(position) for every live row that may have this hash, until it returns true.
  template <class Visit>
  bool find(uint64_t hash, const Visit& visit) const {
    if (live_ == 0) return false;
    const uint32_t bucket = home(hash), end = starts_[bucket + 1];
    const uint16_t wanted = Shelf::tag(hash);
    for (uint32_t at = starts_[bucket]; at < end; at += kPadding) {
      uint32_t mask = match(tags_.data() + at, wanted);
      if (end - at < kPadding) mask &= (1U << (end - at)) - 1;
      for (; mask != 0; mask &= mask - 1)
        if (visit(at + static_cast<uint32_t>(std::countr_zero(mask)))) return true;
    }
    return false;
  }
  void prefetch_start(uint64_t hash) const { prefetch(&starts_[home(hash)]); }
  void prefetch_tags(uint64_t hash) const { prefetch(&tags_[starts_[home(hash)]]); }

  // The positions of all rows with first <= hash >> 32 <= last, and of some rows beyond.
  std::pair<uint32_t, uint32_t> range(uint32_t first, uint32_t last) const {
    return {starts_[home(uint64_t{first} << 32)], starts_[home(uint64_t{last} << 32) + 1]};
  }

 private:
  static constexpr uint32_t kPadding = 16;  // tags that are compared at once

  static uint32_t match(const uint16_t* tags, uint16_t wanted) {
#if defined(__AVX2__)
    const __m256i found = _mm256_cmpeq_epi16(_mm256_set1_epi16(static_cast<short>(wanted)),
                                             _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tags)));
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(found), _mm256_extracti128_si256(found, 1));
    return static_cast<uint32_t>(_mm_movemask_epi8(bytes));
#else
    uint32_t mask = 0;
    for (uint32_t i = 0; i < kPadding; ++i) mask |= static_cast<uint32_t>(tags[i] == wanted) << i;
    return mask;
#endif
  }
  uint32_t home(uint64_t hash) const { return static_cast<uint32_t>(((hash >> 32) * buckets_) >> 32); }

  uint32_t rows_, live_, buckets_, filled_ = 0, next_bucket_ = 0;
  CountedPages<uint16_t> tags_;
  CountedPages<uint32_t> starts_;
};

// What is known of all rows of a segment, so that an event that cannot delete or unpublish any of them skips it.
struct Extremes {
  double least_score = std::numeric_limits<double>::infinity();
  uint16_t most_unseen_days = 0;
  uint8_t flags = 0;  // of any row

  void add(Row row, const Policy& policy) {
    const double score = policy.score(row.show(), row.click());
    least_score = score >= least_score ? least_score : score;  // NaN becomes the least
    most_unseen_days = std::max(most_unseen_days, row.unseen_days());
    flags |= row.flags();
  }
};

using RowCounts = std::vector<uint32_t>;  // by kind

class Segment {
 public:
  static constexpr size_t kChecksum = 4;

  // Rows are up to date with the first `clock` events (history.h).
  Segment(uint64_t id, uint32_t clock, const Layout& layout, Budget& budget, const RowCounts& rows);

  uint64_t id() const { return id_; }
  uint32_t clock() const { return clock_; }
  SegmentIndex& index(RowKind kind) { return *indices_[kind]; }
  const SegmentIndex& index(RowKind kind) const { return *indices_[kind]; }
  Extremes& extremes() { return extremes_; }
  const Extremes& extremes() const { return extremes_; }
  uint32_t rows() const {
    uint32_t rows = 0;
    for (const auto& index : indices_) rows += index->rows();
    return rows;
  }
  uint32_t live() const {
    uint32_t rows = 0;
    for (const auto& index : indices_) rows += index->live();
    return rows;
  }
  size_t record_bytes(RowKind kind) const { return record_size(layout_, kind); }
  uint64_t offset(RowKind kind, uint32_t position) const {
    return start_[kind] + uint64_t{position} * record_bytes(kind);
  }
  uint64_t file_bytes() const { return bytes_; }
  uint64_t live_bytes() const {
    uint64_t bytes = 0;
    for (RowKind kind = 0; kind < layout_.kinds(); ++kind)
      bytes += uint64_t{indices_[kind]->live()} * record_bytes(kind);
    return bytes;
  }
  // The bytes on disk of a segment with these rows.
  static uint64_t file_bytes(const Layout& layout, const RowCounts& rows) {
    uint64_t bytes = 0;
    for (RowKind kind = 0; kind < layout.kinds(); ++kind)
      bytes += whole_sectors(rows[kind] * record_size(layout, kind));
    return bytes;
  }
  static size_t record_size(const Layout& layout, RowKind kind) {
    return static_cast<size_t>(layout.bytes(kind)) + kChecksum;
  }
  static size_t most_record_size(const Layout& layout) { return static_cast<size_t>(layout.most_bytes()) + kChecksum; }

  // Writes the image of a row, with its checksum, to a record in memory.
  void seal(char* record, RowKind kind, uint32_t position) const;
  // Throws Error if the record is not the one that was written there.
  void check(const char* record, RowKind kind, uint32_t position) const;

  // In memory, until the file is written.
  void hold(Budget& budget);
  char* record(RowKind kind, uint32_t position) const { return memory_->data() + offset(kind, position); }
  std::shared_ptr<const Sectors> memory() const {
    const std::lock_guard guard(lock_);
    return memory_;
  }
  void write(std::unique_ptr<File> file);  // writes what is held in memory, then releases it
  void adopt(std::unique_ptr<File> file) { file_ = std::move(file); }  // written by someone else
  const File& file() const { return *file_; }                          // once memory() is empty

  // Copies the image of one row, reading at once if it is on disk. For callers that cannot wait for a queue.
  void copy(RowKind kind, uint32_t position, char* image) const;
  // The records [first, last), checked if they come from disk. `buffer` keeps them.
  char* records(RowKind kind, uint32_t first, uint32_t last, Budget& budget, std::unique_ptr<Sectors>& buffer) const;

 private:
  const uint64_t id_;
  const uint32_t clock_;
  const Layout& layout_;
  std::vector<uint64_t> start_;  // by kind
  const uint64_t bytes_;
  std::vector<std::unique_ptr<SegmentIndex>> indices_;  // by kind
  Extremes extremes_;

  mutable std::mutex lock_;
  std::shared_ptr<Sectors> memory_;
  std::unique_ptr<File> file_;
};

}  // namespace clickfleet
