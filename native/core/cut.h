// A consistent cut through a table, read while pushes go on.
//
// Making the cut waits for pushes under way and raises the table's epoch; that is all the others notice. A row carries
// the epoch of its last write: its first write after the cut logs the row as it was (Table::touch). Reading goes by
// ranges of hashes through the files' stripes: a row not written since is copied from its place, any other from the
// log.
//
//   snapshot   every row, for a checkpoint
//   base       every row that may be published, for readers that have nothing
//   changes    what readers of the last published state must change: rows to replace, keys to delete
//
// The latter two stay pending after they are read: `commit` says that readers have them, `abort` puts everything back.
#pragma once
#include <atomic>
#include <deque>
#include <mutex>
#include <vector>

#include "table.h"

namespace clickfleet {

class Cut {
 public:
  enum Kind : uint8_t { snapshot, base, changes };
  struct Batch {  // rows of one kind, ascending by mix64(key); a published batch has only key, slot, embed_w, embedx
    int file = 0;
    bool full = false;
    size_t size = 0;
    std::vector<uint64_t> key;
    std::vector<uint16_t> slot, unseen_days;
    std::vector<double> show, click;
    std::vector<float> delta_score, embed_w, embed_state, embedx, embedx_state;
    std::vector<uint8_t> published;
  };

  Cut(Table& table, Kind kind, int files);  // `files`: a power of two up to 32
  ~Cut();
  Cut(const Cut&) = delete;
  Cut& operator=(const Cut&) = delete;

  static constexpr size_t kNumbers = 6;  // of each stripe
  // Of a snapshot: per stripe the buckets of short and of full rows, sizes and room of the lists of changed and of
  // deleted keys; then which rows were crowded. Empty without a memory limit, and while changes are pending.
  const std::vector<uint64_t>& memory() const { return memory_; }
  Kind kind() const { return kind_; }
  bool tracking() const { return was_tracking_; }  // something was published before
  bool next(Batch& batch);                         // false after the last
  // After the last batch: of a snapshot, the changed keys and the deleted keys at the cut; of the others, keys to
  // delete.
  const std::vector<uint64_t>& changed_keys() const { return changed_keys_; }
  const std::vector<uint64_t>& deleted_keys() const { return deleted_keys_; }
  void commit();
  void abort();
  void close();  // stop reading

 private:
  friend class Table;
  enum class Fate : uint8_t { nothing, emit, leave, postpone };
  struct Found {
    uint64_t hash;
    size_t image;
  };

  bool wants(Row row) const { return kind_ != changes || (row.flags() & kChanged) != 0; }
  Fate fate(Row row) const;
  void mark(Stripe& stripe, Row row, Fate fate) const;
  void start_file();
  void read_range();
  void gather(Stripe& stripe, size_t s, uint32_t first, uint32_t last);
  void take_image(Row row, bool full);
  Row row_of(char* image, bool full) const;
  void emit(bool full);
  void finish();
  void close_locked();
  void settle();

  Table& table_;
  const Kind kind_;
  const int files_;
  bool open_ = true, pending_ = false, was_tracking_ = false;
  std::atomic<bool> dropped_{false};  // nothing is logged any more
  std::atomic<bool> timed_out_{false};
  std::mutex lock_;  // of next, commit, abort, close

  std::vector<CountedVector<uint64_t>> changed_, deleted_;  // taken from the stripes
  std::vector<size_t> next_changed_;                        // first of changed_ not yet read

  size_t rows_ = 0;  // at the cut, about: how finely a file is divided
  int file_ = -1;
  uint32_t range_ = 0, ranges_ = 0;
  std::vector<ImageLog> late_;  // from the undo log, by range of this file
  std::vector<char> images_;    // of the range being read
  std::vector<Found> found_;
  std::deque<Batch> ready_;
  std::vector<uint64_t> changed_keys_, deleted_keys_, left_, reborn_, memory_;
};

}  // namespace clickfleet
