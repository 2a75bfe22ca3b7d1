// The sparse table: key -> row. It starts empty, grows, and serves several threads at once.
//
// A call sorts its keys by stripe and locks one stripe after the other, busy ones last. It prefetches entries, then
// rows, well before it needs them. Writers pass the gate, so that a cut contains each push completely or not at all.
// Operations that rewrite the whole table (shrink, end_day, eviction) enter the gate alone.
//
// With a directory, rows beyond the memory limit move to disk instead of being evicted (disk.h).
#pragma once
#include <atomic>
#include <condition_variable>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "config.h"
#include "error.h"
#include "gate.h"
#include "history.h"
#include "stripe.h"

namespace clickfleet {

class Cut;
class Disk;
struct Plan;

// What a push does to a row's weights: take a step of the rule, add the gradient, or overwrite them with it.
enum class Move : uint8_t { train, add, set };

struct Push {
  const uint64_t* keys = nullptr;
  const float* grads = nullptr;    // [size, 1 + widest()]: gradients of the summed loss
  const float* show = nullptr;     // nullptr: 1 for every key
  const float* click = nullptr;    // nullptr: 0 for every key
  const uint16_t* slot = nullptr;  // decides the class of a new row
  size_t size = 0;
  float n = 1;            // sum of the batch's weights, the divisor for Scale::batch
  bool distinct = false;  // the keys are unique: skip merging
  Move move = Move::train;
};

// Rows of one kind as columns: the result of a cut and the input of a load. Absent columns are nullptr.
struct Rows {
  size_t size = 0;
  RowKind kind = 0;
  const uint64_t* key = nullptr;
  const uint16_t* slot = nullptr;
  const double *show = nullptr, *click = nullptr;
  const uint16_t* unseen_days = nullptr;
  const float* delta_score = nullptr;
  const uint8_t* published = nullptr;
  const float *embed_w = nullptr, *embed_state = nullptr, *embedx = nullptr, *embedx_state = nullptr;
};

struct Stats {
  // Rows of one kind: in memory with the bytes that are set aside for them, and on disk with those of their records.
  struct OfKind {
    int factors = 0;
    bool full = false;
    uint64_t rows = 0, bytes = 0, disk_rows = 0, disk_bytes = 0;
  };
  std::vector<OfKind> kinds;
  uint64_t rows = 0, full_rows = 0;
  uint64_t bytes = 0, peak_bytes = 0, own_bytes = 0;
  uint64_t admitted = 0, shrunk = 0, evicted = 0, changed = 0, deleted = 0, undo_waits = 0;
  // With a disk tier: rows on disk, the bytes of their files and of their index in memory; rows moved to disk and back,
  // keys pulled, records read, and those of them that a pull or push had to wait for.
  uint64_t disk_rows = 0, disk_full_rows = 0, disk_bytes = 0, peak_disk_bytes = 0, index_bytes = 0, segments = 0;
  uint64_t spilled = 0, fetched = 0, pulled = 0, disk_reads = 0, disk_waits = 0;
};

class Table {
 public:
  explicit Table(const Config& config);
  ~Table();
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  const Config& config() const { return config_; }
  const Layout& layout() const { return layout_; }
  int widest() const { return layout_.widest(); }  // factors of the widest rows
  int class_of_slot(uint16_t slot) const { return slot < config_.slot_class.size() ? config_.slot_class[slot] : 0; }

  // Rows have 1 + widest() columns: narrower ones end with zeros, but unknown keys have the initial values of all.
  // `slots` of the keys, if they are known, tell the class that a look-up tries first.
  void pull(const uint64_t* keys, size_t n, bool training, float* out, const uint16_t* slots = nullptr) const;
  void push(const Push& push);
  void known(const uint64_t* keys, size_t n, uint8_t* out) const;  // 1 if the key has a row
  // Tells keys that will be pulled soon, so that their rows are read from disk ahead. Returns at once.
  void announce(const uint64_t* keys, size_t n);
  void wait_for_disk();  // for tests: until nothing is being written, merged or read ahead
  uint64_t shrink();     // decays statistics; returns the number of deleted rows
  void end_day();        // ages every row by one day
  // Takes the settings of the rules from `like`. Every class must have rules of the same kinds as before, because rows
  // keep their state.
  void set_rules(const Config& like);
  Stats stats() const;

  // Makes room for this many rows. Call it before restoring saved rows: they come in order of their hashes and would
  // otherwise crowd the low end of every shelf.
  void reserve(const std::vector<uint64_t>& rows);  // by kind
  // Inserts saved rows. The class of their slots must be that of their kind. Rows outside virtual shards [first, last)
  // are skipped.
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
  void pull_piece(const uint64_t* keys, const uint16_t* slots, size_t n, bool training, float* out) const;
  template <class Home, class At>
  void pull_one_class(bool brief, const Home& home, const At& at, const uint64_t* keys, size_t n, bool training,
                      float* out) const;
  template <class Home, class At>
  void pull_any_class(const Home& home, const At& at, const uint64_t* keys, const uint16_t* slots, size_t n,
                      bool training, float* out) const;
  template <bool Brief, class Classes, class Home, class At>
  void pull_keys(const Classes& classes, const Home& home, const At& at, const uint64_t* keys, size_t n, bool training,
                 float* out) const;
  template <class Home, class At>
  void search_keys(const Home& home, const At& at, const uint64_t* keys, size_t n, bool training, float* out) const;
  void copy_row(const char* hot, RowKind kind, float* out) const;
  bool read_one(const Stripe& stripe, uint64_t key, bool training, float* out) const;  // false: it may be on disk
  void initial(uint64_t key, bool training, float* out) const;
  void pull_cold(const uint64_t* keys, const std::vector<uint32_t>& places, bool training, float* out) const;

  // table.cc
  void merge(const Plan& plan, int s, const Push& push, std::vector<Item>& items) const;
  struct Deferred;
  // One class of rows, all in memory: most tables. `Plain` spares them the questions of the others.
  bool plain() const { return classes_.size() == 1 && disk_ == nullptr; }
  template <bool Plain>
  void push_items(Stripe& stripe, const Item* items, size_t size, const Push& push, Deferred* deferred);
  void push_deferred(Deferred& deferred, const Push& push);
  // What to do about a row that may be on disk: move it if it is at hand, read it at once, or take it for a new one.
  enum class Fetch : uint8_t { if_ready, now, never };
  template <bool Plain>
  bool update(Stripe& stripe, const Item& item, Ref guess, const Push& push, Fetch fetch);
  Ref add(Stripe& stripe, RowKind kind, uint64_t hash, uint64_t key);
  Ref create(Stripe& stripe, uint64_t hash, uint64_t key, int row_class);
  void admit(Stripe& stripe, uint64_t hash, Ref ref);
  void restore_row(Stripe& stripe, uint64_t hash, const Rows& rows, size_t i);
  void fill(Row row, const Rows& rows, size_t i) const;
  bool admits(Row row, const Admission& admission, double show) const;
  float factor(Scale scale, double show, float n) const;
  void mark_changed(Stripe& stripe, Row row) const;
  void check_memory(const std::vector<uint64_t>& memory) const;

  // aging.cc
  template <class Visit>
  void sweep(const Visit& visit);  // every row, alone in the gate; visit(stripe, ref, row) may remove that row
  template <class Visit>
  void visit_keys(const std::vector<CountedVector<uint64_t>>& keys, const Visit& visit);  // visit(stripe, row, kind)
  template <class Visit, class Absent>
  void visit_keys(const std::vector<CountedVector<uint64_t>>& keys, const Visit& visit, const Absent& absent);
  void remove(Stripe& stripe, Ref ref, Row row);
  void record_removal(Stripe& stripe, Row row);
  bool publishable(Row row) const;
  bool unpublishable(Row row) const;  // consumers have it and must delete it
  void decay(Row row) const;
  bool outlived(Row row) const;
  static void grow_older(Row row);
  static void list(Row row);
  void mark_if_unpublishable(Stripe& stripe, Row row) const;
  uint64_t follow(const Event& event);  // applies an event to the rows on disk; returns the number of deleted rows
  uint64_t rank(Row row) const;
  size_t room() const { return config_.memory_limit - config_.snapshot_reserve; }  // for everything but the undo log
  bool fits(size_t bytes) const;
  bool may_resize(const Stripe& stripe, RowKind kind, uint32_t buckets) const;
  bool may_grow(const Stripe& stripe, RowKind kind);
  bool scarce() const { return config_.memory_limit != 0; }
  void make_room();
  void trim(uint64_t tightly);
  void evict(size_t bytes);
  void evict_some(Stripe& stripe, RowKind kind);
  bool may_fill_up(size_t rows) const;

  // tiers.cc
  struct ColdRow;
  struct ColdRows;
  size_t warm_room() const;   // for shelves, lists of keys and the index of the rows on disk
  size_t shelf_room() const;  // for the shelves of one stripe
  bool pressed() const;
  uint64_t warmth(const Stripe& stripe, Row row) const;
  void relieve();
  void wait_for_space(size_t bytes);
  void wait_for_merges();
  void spill(Stripe& stripe, uint64_t kinds, int part);
  void make_space(Stripe& stripe, RowKind kind);
  void fit_shelf(Shelf& shelf);
  struct Victim {
    uint64_t hash;
    char *hot, *cold;
  };
  using Victims = std::vector<std::vector<Victim>>;  // by kind
  void write_segment(Stripe& stripe, Victims& rows, uint32_t clock);
  Ref bring(Stripe& stripe, uint64_t hash, uint64_t key, bool wait, bool& later);
  void replay(const History::Events& events, const Stripe& stripe, Row row, uint32_t from, uint32_t to) const;
  void refresh(Stripe& stripe, Row row, RowKind kind, uint32_t clock);
  // Calls found(i, row) or absent(i) for the keys[places[i]], none of which is in memory, outside all locks.
  template <class Found, class Absent>
  void read_keys(const uint64_t* keys, const uint32_t* places, size_t n, bool located, const Found& found,
                 const Absent& absent) const;
  void list_range(const Stripe& stripe, uint32_t first, uint32_t last, ColdRows& rows) const;
  void read_listed(ColdRows& rows) const;
  std::unique_lock<std::shared_mutex> lock_with_range(Stripe& stripe, uint32_t first, uint32_t last, ColdRows& rows);
  template <class Visit, class Absent>
  void visit_cold_keys(Stripe& stripe, const uint64_t* keys, size_t n, const Visit& visit, const Absent& absent);
  template <class Needs, class Visit>
  uint64_t sweep_cold(const Needs& needs, const Visit& visit);
  bool may_remove(const Segment& segment, const Event& event) const;
  void evict_from_both(size_t bytes);
  size_t disk_room() const;  // for all rows, under a disk limit
  void count_row(RowKind kind, int64_t rows);
  void restore_tiered(Stripe& stripe, const Rows& rows, size_t start, const Plan& plan, int s, int first, int last);
  void look_ahead(std::vector<uint64_t>& keys);
  bool merge_one();
  void merge_segments(Stripe& stripe, const std::vector<std::shared_ptr<Segment>>& inputs);

  // cut.cc
  void touch(Stripe& stripe, Row row, RowKind kind, uint64_t hash);  // must precede every write to a row
  void take_undo(size_t images);                                     // waits until this many rows may be logged
  void give_back_undo(size_t images);  // pass the same number: room that was not used becomes free again
  void give_undo(size_t images);

  Config config_;  // only the settings of its rules change
  const Layout layout_;
  // A class of rows, with its rules in the form that a push needs.
  struct OwnClass {
    const RowClass* settings;
    bool at_birth;
    Kernels::Apply apply_embed, apply_embedx;
    const void *embed_rule, *embedx_rule;
    Bounds embed_bounds, embedx_bounds;
    Scale embed_scale, embedx_scale;
  };
  std::vector<OwnClass> classes_;
  bool at_birth_;  // every class: then an unknown key reads the initial values of its factors

  Budget budget_;             // all memory
  Budget lasting_{&budget_};  // without the undo log: evictions must not depend on whether a cut is being read
  Budget shelves_{&lasting_};
  Budget index_{&lasting_};  // of the rows on disk
  std::unique_ptr<Disk> disk_;
  History history_;
  std::vector<std::unique_ptr<Stripe>> stripes_;
  Gate gate_;

  bool restoring_ = false;            // between prepare and settle: shelves already have their final size
  std::atomic<uint64_t> crowded_{0};  // a bit for every kind of rows that needs more memory than it may use
  // With a disk tier:
  std::atomic<uint32_t> unmerged_{0};     // a bit for every stripe with too many segments
  std::atomic<uint32_t> next_stripe_{0};  // the next one to spill if the index needs memory
  std::atomic<int64_t> disk_cost_{0};     // bytes that all rows would take on disk
  std::atomic<bool> starved_{false};      // a merge lacks memory
  double kept_share_ = 1;                 // part of the rows of a checkpoint that memory has room for

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
