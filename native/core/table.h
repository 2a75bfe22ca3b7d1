// The sparse table: key -> row, growing from nothing, used by several threads at once.
//
// A call sorts its keys by stripe, locks one stripe after the other (busy ones last) and prefetches entries, then rows,
// well before it needs them. Writers pass the gate, so that a cut sees each push wholly or not at all; whatever
// rewrites the whole table (shrink, end_day, eviction) passes it alone.
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

struct Error : std::runtime_error {  // a user's error: becomes TableError in Python
  using std::runtime_error::runtime_error;
};

// What becomes of a row's weights: a step of the rule, the gradient added to them, or put in their place.
enum class Move : uint8_t { train, add, set };

struct Push {
  const uint64_t* keys = nullptr;
  const float* grads = nullptr;  // [size, 1 + factors]: of the sum of losses
  const float* show = nullptr;   // nullptr: 1 each
  const float* click = nullptr;  // nullptr: 0 each
  const uint16_t* slot = nullptr;
  size_t size = 0;
  float n = 1;            // sum of the batch's weights, the divisor of Scale::batch
  bool distinct = false;  // no key stands twice: nothing to merge
  Move move = Move::train;
};

// Rows of one kind as columns: what a cut gives and what a load takes. Absent columns are nullptr.
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
  void known(const uint64_t* keys, size_t n, uint8_t* out) const;  // 1 where there is a row
  uint64_t shrink();                                               // decays statistics; the number of rows it deleted
  void end_day();                                                  // every row is one day older
  Stats stats() const;

  // Room for so many rows. Saved rows come in order of their hashes: without it they would crowd the low end of every
  // shelf.
  void reserve(uint64_t short_rows, uint64_t full_rows);
  // Puts saved rows in; those outside virtual shards [first, last) are left out.
  void restore(const Rows& rows, int first, int last);
  // How a table with a memory limit uses its memory, which decides when it grows and evicts and depends on its past:
  // numbers that a cut gives. `prepare` an empty table for saved rows, put them and their changes in, then `settle`.
  void prepare(const std::vector<uint64_t>& memory);
  void settle(const std::vector<uint64_t>& memory);
  // Continues a published log: `changed` rows and `deleted` keys are part of the next changes.
  void restore_changes(const uint64_t* changed, size_t n_changed, const uint64_t* deleted, size_t n_deleted);
  // Readers have other rows of these keys than are here, or none: the next changes set or delete each of them.
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
  void sweep(const Visit& visit);  // every row, alone; visit(stripe, ref, row) may remove that row
  template <class Visit>
  void visit_keys(const std::vector<CountedVector<uint64_t>>& keys, const Visit& visit);
  void remove(Stripe& stripe, Ref ref, Row row);
  bool publishable(Row row) const;
  void mark_if_left(Stripe& stripe, Row row) const;
  uint64_t rank(Row row) const;
  size_t room() const { return config_.memory_limit - config_.snapshot_reserve; }  // for what lasts
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
  void touch(Stripe& stripe, Row row, bool full, uint64_t hash);  // before a row is written
  void take_undo(size_t images);                                  // waits until so many rows may be logged
  void give_back_undo(size_t images);                             // the same number: what was not logged is room again
  void give_undo(size_t images);

  const Config config_;
  const Layout layout_;
  const bool at_birth_;
  const Kernels::Apply apply_embed_, apply_embedx_;
  const void *embed_rule_, *embedx_rule_;

  Budget budget_;             // all
  Budget lasting_{&budget_};  // without the undo log: what decides about eviction must not depend on who reads a cut
  std::vector<std::unique_ptr<Stripe>> stripes_;
  Gate gate_;

  bool restoring_ = false;       // between prepare and settle: shelves have their size
  std::atomic<int> crowded_{0};  // rows want more memory than they may have: 1 short ones, 2 full ones

  Cut* cut_ = nullptr;      // being read; changed only by who is alone in the gate
  Cut* pending_ = nullptr;  // changes that are neither committed nor aborted
  uint8_t epoch_ = 0;
  std::atomic<bool> tracking_{false};  // something was published: changes since then are recorded
  std::mutex undo_lock_;
  std::condition_variable undo_changed_;
  int64_t undo_room_ = 0;  // images that may still be logged

  std::atomic<uint64_t> admitted_{0}, shrunk_{0}, evicted_{0}, undo_waits_{0};
};

}  // namespace clickfleet
