// The sparse table: key -> row. It starts empty, grows, and serves several threads at once.
//
// A call sorts its keys by stripe and locks one stripe after the other, busy ones last. It prefetches entries, then
// rows, well before it needs them. Writers pass the gate, so that a cut contains each push completely or not at all.
// Operations that rewrite the whole table (shrink, end_day, eviction) enter the gate alone.
#pragma once
#include <atomic>
#include <condition_variable>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "config.h"
#include "gate.h"
#include "stripe.h"

namespace clickfleet {

class Cut;
struct Plan;

struct Error : std::runtime_error {  // a user error; becomes TableError in Python
  using std::runtime_error::runtime_error;
};

// What a push does to a row's weights: take a step of the rule, add the gradient, or overwrite them with it.
enum class Move : uint8_t { train, add, set };

struct Push {
  const uint64_t* keys = nullptr;
  const float* grads = nullptr;  // [size, 1 + factors]: gradients of the summed loss
  const float* show = nullptr;   // nullptr: 1 for every key
  const float* click = nullptr;  // nullptr: 0 for every key
  const uint16_t* slot = nullptr;
  size_t size = 0;
  float n = 1;            // sum of the batch's weights, the divisor for Scale::batch
  bool distinct = false;  // the keys are unique: skip merging
  Move move = Move::train;
};

// Rows of one kind as columns: the result of a cut and the input of a load. Absent columns are nullptr.
struct Rows {
  size_t size = 0;
  bool full = false;
  const uint64_t* key = nullptr;
  const uint16_t* slot = nullptr;
  const double *show = nullptr, *click = nullptr;
  const uint16_t* unseen_days = nullptr;
  const float* delta_score = nullptr;
  const uint8_t* published = nullptr;
  const float *embed_w = nullptr, *embed_state = nullptr, *embedx = nullptr, *embedx_state = nullptr;
};

struct Stats {
  uint64_t rows = 0, full_rows = 0;
  uint64_t bytes = 0, peak_bytes = 0, own_bytes = 0;
  uint64_t admitted = 0, shrunk = 0, evicted = 0, changed = 0, deleted = 0, undo_waits = 0;
};

class Table {
 public:
  explicit Table(const Config& config);
  ~Table();
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  const Config& config() const { return config_; }
  const Layout& layout() const { return layout_; }

  void pull(const uint64_t* keys, size_t n, bool training, float* out) const;
  void push(const Push& push);
  void known(const uint64_t* keys, size_t n, uint8_t* out) const;  // 1 if the key has a row
  uint64_t shrink();  // decays statistics; returns the number of deleted rows
  void end_day();     // ages every row by one day
  Stats stats() const;

  // Makes room for this many rows. Call it before restoring saved rows: they come in order of their hashes and would
  // otherwise crowd the low end of every shelf.
  void reserve(uint64_t short_rows, uint64_t full_rows);
  // Inserts saved rows. Rows outside virtual shards [first, last) are skipped.
  void restore(const Rows& rows, int first, int last);
  // Restores the memory layout of a table with a memory limit. The layout depends on the table's history and decides
  // when the table grows and evicts. `memory` comes from Cut::memory. Call `prepare` on an empty table, restore the
  // rows and their changes, then call `settle`.
  void prepare(const std::vector<uint64_t>& memory);
  void settle(const std::vector<uint64_t>& memory);
  // Continues a published log: the next changes include the `changed` rows and the `deleted` keys.
  void restore_changes(const uint64_t* changed, size_t n_changed, const uint64_t* deleted, size_t n_deleted);
  // Marks keys whose published rows differ from this table: the next changes set or delete each of them.
  void restore_readers(const uint64_t* keys, size_t n);
  bool tracking() const { return tracking_.load(std::memory_order_relaxed); }

 private:
  friend class Cut;
  friend class InPlace;
  struct Item;

  // pull.cc
  struct View;
  void pull_piece(const uint64_t* keys, size_t n, bool training, float* out) const;
  template <bool Brief, class Home, class At>
  void pull_keys(const Home& home, const At& at, const uint64_t* keys, size_t n, bool training, float* out) const;
  void read_one(const Stripe& stripe, uint64_t key, bool training, float* out) const;

  // table.cc
  void merge(const Plan& plan, int s, const Push& push, std::vector<Item>& items) const;
  void push_items(Stripe& stripe, const Item* items, size_t size, const Push& push);
  void update(Stripe& stripe, const Item& item, Ref guess, const Push& push);
  Ref add(Stripe& stripe, bool full, uint64_t hash, uint64_t key);
  Ref create(Stripe& stripe, uint64_t hash, uint64_t key);
  void admit(Stripe& stripe, uint64_t hash, Ref ref);
  void restore_row(Stripe& stripe, uint64_t hash, const Rows& rows, size_t i);
  bool admits(Row row, double show) const;
  float factor(Scale scale, double show, float n) const;
  void mark_changed(Stripe& stripe, Row row) const;
  void check_memory(const std::vector<uint64_t>& memory) const;

  // aging.cc
  template <class Visit>
  void sweep(const Visit& visit);  // every row, alone in the gate; visit(stripe, ref, row) may remove that row
  template <class Visit>
  void visit_keys(const std::vector<CountedVector<uint64_t>>& keys, const Visit& visit);
  void remove(Stripe& stripe, Ref ref, Row row);
  bool publishable(Row row) const;
  void mark_if_unpublishable(Stripe& stripe, Row row) const;
  uint64_t rank(Row row) const;
  size_t room() const { return config_.memory_limit - config_.snapshot_reserve; }  // for everything but the undo log
  bool fits(size_t bytes) const;
  bool may_resize(const Shelf& shelf, uint32_t buckets) const;
  bool may_grow(const Shelf& shelf, bool full);
  bool scarce() const { return config_.memory_limit != 0; }
  void make_room();
  void trim(int tightly);
  void evict(size_t bytes);
  void evict_some(Stripe& stripe, bool full);
  bool may_fill_up(size_t rows) const;

  // cut.cc
  void touch(Stripe& stripe, Row row, bool full, uint64_t hash);  // must precede every write to a row
  void take_undo(size_t images);                                  // waits until this many rows may be logged
  void give_back_undo(size_t images);  // pass the same number: room that was not used becomes free again
  void give_undo(size_t images);

  const Config config_;
  const Layout layout_;
  const bool at_birth_;
  const Kernels::Apply apply_embed_, apply_embedx_;
  const void *embed_rule_, *embedx_rule_;

  Budget budget_;             // all memory
  Budget lasting_{&budget_};  // without the undo log: evictions must not depend on whether a cut is being read
  std::vector<std::unique_ptr<Stripe>> stripes_;
  Gate gate_;

  bool restoring_ = false;       // between prepare and settle: shelves already have their final size
  std::atomic<int> crowded_{0};  // kinds of rows that need more memory than they may use: 1 short, 2 full

  Cut* cut_ = nullptr;      // the cut being read; changed only by a caller that is alone in the gate
  Cut* pending_ = nullptr;  // changes that are neither committed nor aborted
  uint8_t epoch_ = 0;
  std::atomic<bool> tracking_{false};  // something was published, so later changes are recorded
  std::mutex undo_lock_;
  std::condition_variable undo_changed_;
  int64_t undo_room_ = 0;  // number of images that may still be logged

  std::atomic<uint64_t> admitted_{0}, shrunk_{0}, evicted_{0}, undo_waits_{0};
};

}  // namespace clickfleet
