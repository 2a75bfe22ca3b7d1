// A consistent cut through a table, read while pushes continue.
//
// Making the cut waits for running pushes and increments the table's epoch; other threads notice nothing else. Every
// row carries the epoch of its last write. The first write to a row after the cut logs the previous image of the row
// (Table::touch). Reading proceeds by hash ranges through the stripes of each file. Rows not written since the cut are
// copied from the table, in memory and on disk, all others from the log.
//
//   snapshot   all rows, for a checkpoint
//   base       all publishable rows, for consumers that have nothing
//   changes    what consumers of the last published state must change: rows to replace, keys to delete
//
// A base and changes stay pending after they are read: `commit` records that consumers have them, `abort` puts
// everything back.
//
// Changes can also be taken at once: read and committed before the constructor returns. This copies what changed, so it
// needs no undo log, and a snapshot may be open meanwhile.
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
  // Rows of one kind, ascending by mix64(key). A published batch has only key, slot, embed_w and embedx, of all rows of
  // one width.
  struct Batch {
    int file = 0;
    RowKind kind = 0;
    bool full = false;
    size_t size = 0;
    std::vector<uint64_t> key;
    std::vector<uint16_t> slot, unseen_days;
    std::vector<double> show, click;
    std::vector<float> delta_score, embed_w, embed_state, embedx, embedx_state;
    std::vector<uint8_t> published;
  };

  Cut(Table& table, Kind kind, int files);  // `files` is a power of two, at most 32
  explicit Cut(Table& table);               // takes the changes at once
  ~Cut();
  Cut(const Cut&) = delete;
  Cut& operator=(const Cut&) = delete;

  // Marks a row that a base contains, or that consumers must delete because it does not.
  static void mark_in_base(Row row, bool publishable);

  static constexpr size_t kLists = 4;  // numbers per stripe, after those of the kinds
  // Memory use at a snapshot. Per stripe: the buckets of every kind of rows, then size and capacity of the lists of
  // changed and of deleted keys. Last: which kinds of rows were crowded. Empty without a memory limit, with a disk
  // tier, and while changes are pending.
  const std::vector<uint64_t>& memory() const { return memory_; }
  Kind kind() const { return kind_; }
  bool tracking() const { return was_tracking_; }  // whether something was published before
  bool next(Batch& batch);                         // returns false after the last batch
  // Valid after the last batch. For a snapshot: the changed keys and the deleted keys at the cut. For a base or
  // changes: the keys to delete.
  const std::vector<uint64_t>& changed_keys() const { return changed_keys_; }
  const std::vector<uint64_t>& deleted_keys() const { return deleted_keys_; }
  void commit();
  void abort();
  void close();  // stops reading

 private:
  friend class Table;
  enum class Fate : uint8_t { nothing, emit, leave, postpone };
  struct ImageEntry {
    uint64_t hash;
    size_t image;
  };

  bool wants(Row row) const { return kind_ != changes || (row.flags() & kChanged) != 0; }
  Fate fate(Row row) const;
  static void mark(Stripe& stripe, Row row, Fate fate);
  static void mark(Row row, Fate fate);
  void take_keys(Stripe& stripe);
  void give_back_keys();
  void find_deleted();
  void start_file();
  void read_range();
  void gather(Stripe& stripe, size_t s, uint32_t first, uint32_t last);
  void gather_changes(Stripe& stripe, size_t s, uint32_t last);
  void take(Stripe& stripe, Row row, RowKind kind);
  void take_undone(Stripe& stripe);
  void take_image(Row row, RowKind kind);
  Row row_of(char* image) const;
  void emit_found();
  template <class Is>
  void emit(RowKind kind, const Is& is);
  void finish();
  void close_locked();
  void settle();

  Table& table_;
  const Kind kind_;
  const int files_;
  bool open_ = true, pending_ = false, was_tracking_ = false;
  std::atomic<bool> dropped_{false};  // rows are no longer logged
  std::atomic<bool> timed_out_{false};
  std::mutex lock_;  // guards next, commit, abort, close

  uint32_t clock_ = 0;  // events that the rows of the cut have followed (history.h)
  bool swept_ = false;  // an event changed all rows since

  std::vector<CountedVector<uint64_t>> changed_, deleted_;  // taken from the stripes
  std::vector<size_t> next_changed_;                        // per stripe: the first entry of changed_ not yet read

  size_t rows_ = 0;  // approximate number of rows at the cut; decides how finely a file is divided
  int file_ = -1;
  uint32_t range_ = 0, ranges_ = 0;
  std::vector<ImageLog> late_;  // images from the undo log, by range of the current file
  std::vector<char> images_;    // images of the range being read
  std::vector<ImageEntry> found_;
  std::deque<Batch> ready_;
  std::vector<uint64_t> changed_keys_, deleted_keys_, left_, reborn_, memory_;
};

}  // namespace clickfleet
