#include "cut.h"

#include <algorithm>
#include <chrono>

#include "tiers.h"

namespace clickfleet {
namespace {

constexpr size_t kBatchRows = 32768;
constexpr auto kPatience = std::chrono::seconds(60);

thread_local size_t logged = 0;  // images this thread logged since it reserved room for them

bool by_hash(uint64_t a, uint64_t b) { return mix64(a) < mix64(b); }

template <class Keys>
void sort_unique(Keys& keys) {
  std::sort(keys.begin(), keys.end(), by_hash);
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
}

uint32_t range_start(uint32_t range, uint32_t ranges) {
  return static_cast<uint32_t>((uint64_t{range} << 32) / ranges);
}
uint32_t range_last(uint32_t range, uint32_t ranges) {
  return static_cast<uint32_t>((uint64_t{range + 1} << 32) / ranges - 1);
}

}  // namespace

// ---- the undo log ----

void Table::touch(Stripe& stripe, Row row, RowKind kind, uint64_t hash) {
  if (cut_ == nullptr || row.epoch() == epoch_) return;
  row.epoch() = epoch_;
  if (upper(hash) < stripe.read_below || cut_->dropped_ || !cut_->wants(row)) return;
  ++logged;
  stripe.undo.append(row, kind);
  if (cut_->kind_ != Cut::snapshot) cut_->mark(stripe, row, cut_->fate(row));
}

void Table::take_undo(size_t images) {
  logged = 0;
  if (cut_ == nullptr) return;  // cut_ cannot change while this thread is inside the gate
  std::unique_lock guard(undo_lock_);
  if (!cut_->dropped_ && undo_room_ < static_cast<int64_t>(images)) {
    ++undo_waits_;
    int64_t seen = undo_room_;
    const auto enough = [&] { return cut_->dropped_ || undo_room_ >= static_cast<int64_t>(images); };
    while (!undo_changed_.wait_for(guard, kPatience, enough)) {
      if (undo_room_ == seen)
        cut_->dropped_ = cut_->timed_out_ = true;  // the cut is not being read: continue training without it
      seen = undo_room_;
    }
  }
  undo_room_ -= static_cast<int64_t>(images);
}

void Table::give_back_undo(size_t images) {
  if (cut_ != nullptr) give_undo(images - logged);
}

void Table::give_undo(size_t images) {
  const std::lock_guard guard(undo_lock_);
  undo_room_ += static_cast<int64_t>(images);
  undo_changed_.notify_all();
}

// ---- making and ending a cut ----

Cut::Cut(Table& table, Kind kind, int files) : table_(table), kind_(kind), files_(files) {
  const Gate::Pass pass(table.gate_, true);
  if (table.cut_ != nullptr)
    throw Error("another snapshot of this table is still open; only one can be open at a time");
  if (kind != snapshot && table.pending_ != nullptr)
    throw Error("earlier changes are still pending; commit or abort them first");
  if (table.epoch_ == 255) {  // restart the count: no row may carry an epoch that will be reused
    table.sweep([](Stripe&, Ref, Row row) { row.epoch() = 0; });
    table.follow({Event::reset_epochs, false, nullptr});
    table.epoch_ = 0;
  }
  ++table.epoch_;
  // Without a memory limit no push ever waits: a row is logged at most once.
  const size_t image = static_cast<size_t>(table.layout_.most_bytes()) + 1;
  table.undo_room_ = table.config_.memory_limit == 0
                         ? INT64_MAX / 2
                         : static_cast<int64_t>((table.config_.snapshot_reserve - kStripes * ImageLog::kBlock) / image);
  was_tracking_ = table.pending_ == nullptr ? table.tracking() : table.pending_->was_tracking_;
  for (const auto& stripe : table.stripes_) {
    const std::unique_lock guard(stripe->lock);
    stripe->read_below = 0;
    rows_ += kind == changes ? stripe->changed.size() : stripe->rows() + stripe->rows_on_disk();
    if (kind == snapshot && table.scarce() && table.disk_ == nullptr && table.pending_ == nullptr) {
      for (RowKind k = 0; k < stripe->kinds; ++k) memory_.push_back(stripe->shelves[k].buckets());
      for (const size_t number :
           {stripe->changed.size(), stripe->changed.capacity(), stripe->deleted.size(), stripe->deleted.capacity()})
        memory_.push_back(number);
    }
    if (kind == snapshot) {
      deleted_keys_.insert(deleted_keys_.end(), stripe->deleted.begin(), stripe->deleted.end());
      continue;
    }
    take_keys(*stripe);
  }
  if (!memory_.empty()) memory_.push_back(table.crowded_);
  if (kind == snapshot && table.pending_ != nullptr) {  // save pending changes as if they were aborted
    for (const auto& keys : table.pending_->deleted_)
      deleted_keys_.insert(deleted_keys_.end(), keys.begin(), keys.end());
    for (const auto& keys : table.pending_->changed_)
      changed_keys_.insert(changed_keys_.end(), keys.begin(), keys.end());
  }
  clock_ = table.history_.now();
  table.history_.pin(clock_);
  if (kind == base) table.follow({Event::mark_base, false, nullptr});
  if (kind != snapshot) {
    pending_ = true;
    table.pending_ = this;
    table.tracking_ = true;
  }
  table.cut_ = this;
}

Cut::Cut(Table& table) : table_(table), kind_(changes), files_(1), open_(false), was_tracking_(true), file_(0) {
  const Gate::Pass pass(table.gate_, true);
  if (table.pending_ != nullptr) throw Error("earlier changes are still pending; commit or abort them first");
  if (!table.tracking()) throw Error("nothing was published yet; publish a base before changes");
  for (const auto& stripe : table.stripes_) {
    const std::unique_lock guard(stripe->lock);
    take_keys(*stripe);
  }
  try {
    for (auto& keys : changed_) sort_unique(keys);
    for (auto& keys : deleted_) sort_unique(keys);
    table.visit_keys(changed_, [&](Stripe&, Row row, RowKind kind) {
      const Fate what = fate(row);
      if (what == Fate::emit)
        take_image(row, kind);
      else if (what == Fate::leave)
        left_.push_back(row.key());
    });
    std::sort(found_.begin(), found_.end(), [](const ImageEntry& a, const ImageEntry& b) { return a.hash < b.hash; });
    emit_found();
    find_deleted();
  } catch (...) {  // no memory: nothing was marked yet
    give_back_keys();
    throw;
  }
  table.visit_keys(changed_, [&](Stripe& stripe, Row row, RowKind) {
    mark(stripe, row, fate(row));
    Table::list(row);
  });
  images_ = {};
  found_ = {};
  changed_.clear();
  deleted_.clear();
}

void Cut::take_keys(Stripe& stripe) {
  changed_.push_back(std::move(stripe.changed));
  deleted_.push_back(std::move(stripe.deleted));
  stripe.changed.clear();
  stripe.deleted.clear();
}

void Cut::give_back_keys() {
  for (size_t s = 0; s < kStripes; ++s) {
    const std::unique_lock guard(table_.stripes_[s]->lock);
    table_.stripes_[s]->changed = std::move(changed_[s]);
    table_.stripes_[s]->deleted = std::move(deleted_[s]);
  }
}

Cut::~Cut() {
  if (pending_)
    abort();
  else
    close();
}

void Cut::close() {
  const std::lock_guard guard(lock_);
  close_locked();
}

void Cut::close_locked() {
  if (!open_) return;
  open_ = false;
  {
    const std::lock_guard guard(table_.undo_lock_);
    dropped_ = true;  // releases threads that wait for room in the log
    table_.undo_changed_.notify_all();
  }
  const Gate::Pass pass(table_.gate_, true);
  table_.cut_ = nullptr;
  Event::Bounds marked{};
  for (const auto& stripe : table_.stripes_) {
    const std::unique_lock guard(stripe->lock);
    stripe->undo.clear();
    marked[static_cast<size_t>(stripe->number)] = swept_ ? UINT64_MAX : stripe->read_below;
  }
  if (kind_ == base && table_.disk_ != nullptr) table_.history_.settle(clock_, marked);
  table_.history_.unpin();
  late_.clear();
}

// ---- publishing ----

Cut::Fate Cut::fate(Row row) const {
  if (!wants(row)) return Fate::nothing;
  if (table_.publishable(row))
    return kind_ == base || row.delta_score() >= static_cast<float>(table_.config_.policy.delta_threshold)
               ? Fate::emit
               : Fate::postpone;
  return (row.flags() & kListed) != 0 ? Fate::leave : Fate::nothing;
}

void Cut::mark(Stripe& stripe, Row row, Fate fate) {
  if (fate == Fate::postpone)
    stripe.changed.push_back(row.key());
  else
    mark(row, fate);
}

void Cut::mark(Row row, Fate fate) {
  row.flags() &= static_cast<uint8_t>(~kChanged);
  if (fate == Fate::emit) {
    row.flags() |= kPending | kEmitted;
    row.set_delta_score(0);
  } else if (fate == Fate::leave) {
    row.flags() |= kPending;
  }
}

void Cut::mark_in_base(Row row, bool publishable) {
  mark(row, publishable ? Fate::emit : (row.flags() & kListed) != 0 ? Fate::leave : Fate::nothing);
}

void Cut::settle() {
  pending_ = false;
  table_.pending_ = nullptr;
  changed_.clear();
  deleted_.clear();
}

void Table::list(Row row) {
  if ((row.flags() & kPending) == 0) return;
  const uint8_t listed = (row.flags() & kEmitted) != 0 ? kListed : 0;
  row.flags() = static_cast<uint8_t>((row.flags() & ~(kPending | kEmitted | kListed)) | listed);
}

void Cut::commit() {
  const std::lock_guard guard(lock_);
  if (!pending_) throw Error("these changes were already committed or aborted");
  if (open_) throw Error("these changes were not read to the end; read them completely before committing");
  const Gate::Pass pass(table_.gate_, true);
  if (kind_ == base) {
    table_.sweep([&](Stripe& stripe, Ref ref, Row row) {
      table_.touch(stripe, row, ref.kind(), mix64(row.key()));
      Table::list(row);
    });
    table_.follow({Event::list_base, false, nullptr});
  } else {
    table_.visit_keys(changed_, [&](Stripe&, Row row, RowKind) { Table::list(row); });
  }
  for (const auto& stripe : table_.stripes_) {
    const std::unique_lock alone(stripe->lock);
    stripe->deleted.insert(stripe->deleted.end(), stripe->deleted_if_committed.begin(),
                           stripe->deleted_if_committed.end());
    stripe->deleted_if_committed.clear();
  }
  settle();
}

void Cut::abort() {
  const std::lock_guard guard(lock_);
  if (!pending_) throw Error("these changes were already committed or aborted");
  close_locked();
  const Gate::Pass pass(table_.gate_, true);
  const auto clear = [](Row row, int flags) { row.flags() &= static_cast<uint8_t>(~flags); };
  if (!was_tracking_) {  // nothing is published: everything counts as a change again, and changes are not recorded
    table_.sweep([&](Stripe& stripe, Ref ref, Row row) {
      table_.touch(stripe, row, ref.kind(), mix64(row.key()));
      clear(row, kChanged | kPending | kEmitted);
    });
    table_.follow({Event::forget_base, false, nullptr});
    table_.tracking_ = false;
  } else {
    const auto owed = static_cast<float>(table_.config_.policy.delta_threshold);
    table_.visit_keys(changed_, [&](Stripe& stripe, Row row, RowKind) {
      if ((row.flags() & (kPending | kChanged)) == 0) return;
      row.set_delta_score(std::max(row.delta_score(), owed));  // it must not be postponed again
      row.flags() |= kChanged;
      clear(row, kPending | kEmitted);
      stripe.changed.push_back(row.key());
    });
    if (kind_ == base) {
      table_.sweep([&](Stripe& stripe, Ref ref, Row row) {
        if ((row.flags() & kPending) == 0) return;
        table_.touch(stripe, row, ref.kind(), mix64(row.key()));
        clear(row, kPending | kEmitted);
      });
      table_.follow({Event::unmark_base, false, nullptr});
    }
  }
  for (size_t s = 0; s < kStripes; ++s) {
    Stripe& stripe = *table_.stripes_[s];
    const std::unique_lock alone(stripe.lock);
    stripe.deleted_if_committed.clear();
    if (!was_tracking_) {
      stripe.changed.clear();
      stripe.deleted.clear();
    } else {
      stripe.deleted.insert(stripe.deleted.end(), deleted_[s].begin(), deleted_[s].end());
    }
  }
  settle();
}

// ---- reading ----

bool Cut::next(Batch& batch) {
  const std::lock_guard guard(lock_);
  while (ready_.empty()) {
    if (!open_) return false;
    if (range_ == ranges_) {
      if (++file_ == files_) {
        finish();
        return false;
      }
      start_file();
    }
    read_range();
  }
  batch = std::move(ready_.front());
  ready_.pop_front();
  return true;
}

void Cut::start_file() {
  if (file_ == 0 && kind_ != snapshot) {
    next_changed_.assign(kStripes, 0);
    for (auto& keys : changed_) sort_unique(keys);
    for (auto& keys : deleted_) sort_unique(keys);
  }
  range_ = 0;
  ranges_ = static_cast<uint32_t>(rows_ / static_cast<size_t>(files_) / kBatchRows + 1);
  late_.clear();
  for (uint32_t i = 0; i < ranges_; ++i) late_.emplace_back(table_.budget_, table_.layout_);
}

void Cut::read_range() {
  const uint32_t first = range_start(range_, ranges_), last = range_last(range_, ranges_);
  images_.clear();
  found_.clear();
  const int begin = file_ * kStripes / files_, end = (file_ + 1) * kStripes / files_;
  for (int s = begin; s < end; ++s)
    gather(*table_.stripes_[static_cast<size_t>(s)], static_cast<size_t>(s), first, last);
  if (timed_out_) throw Error("the snapshot was dropped: nothing read it for 60 s while pushes waited for it");
  ImageLog& late = late_[range_];
  late.each([&](Row row, RowKind kind) {
    if (kind_ == snapshot || fate(row) == Fate::emit)
      take_image(row, kind);
    else if (fate(row) == Fate::leave)
      left_.push_back(row.key());
  });
  table_.give_undo(late.size());
  late.clear();
  ++range_;
  std::sort(found_.begin(), found_.end(), [](const ImageEntry& a, const ImageEntry& b) { return a.hash < b.hash; });
  emit_found();
}

void Cut::take(Stripe& stripe, Row row, RowKind kind) {
  if (row.epoch() == table_.epoch_) return;  // written or created after the cut: its image is in the log
  const Fate what = kind_ == snapshot ? Fate::emit : fate(row);
  if (what == Fate::emit)
    take_image(row, kind);
  else if (what == Fate::leave)
    left_.push_back(row.key());
  if (kind_ != snapshot) mark(stripe, row, what);
}

void Cut::take_undone(Stripe& stripe) {
  stripe.undo.each([&](Row row, RowKind kind) { late_[((mix64(row.key()) >> 32) * ranges_) >> 32].append(row, kind); });
  stripe.undo.clear();
}

void Cut::gather(Stripe& stripe, size_t s, uint32_t first, uint32_t last) {
  if (kind_ == changes) {
    gather_changes(stripe, s, last);
    return;
  }
  Table::ColdRows cold;
  const auto guard = table_.lock_with_range(stripe, first, last, cold);
  take_undone(stripe);
  for (RowKind kind = 0; kind < stripe.kinds; ++kind)
    stripe.shelves[kind].scan(first, last, [&](uint32_t slot) {
      const Row row = stripe.shelves[kind].row(slot);
      if (const uint32_t at = upper(mix64(row.key())); at >= first && at <= last) take(stripe, row, kind);
    });
  const auto events = table_.history_.events();
  for (const Table::ColdRow& one : cold.rows) {
    if (!one.segment->index(one.kind).is_live(one.position)) continue;
    const Row row = one.row(table_.layout_);  // a copy: the history marks the row itself
    table_.replay(*events, stripe, row, one.clock, std::max(one.clock, clock_));
    take(stripe, row, one.kind);
  }
  stripe.read_below = uint64_t{last} + 1;
}

// Rows on disk are read before the lock is taken. They change, so they are written to a new segment.
void Cut::gather_changes(Stripe& stripe, size_t s, uint32_t last) {
  const auto& keys = changed_[s];
  const size_t begin = next_changed_[s];
  size_t end = begin;
  while (end < keys.size() && upper(mix64(keys[end])) <= last) ++end;
  const Layout& layout = table_.layout_;
  const auto stride = static_cast<size_t>(layout.most_bytes());
  std::vector<uint32_t> places;
  std::vector<char> images;
  std::vector<std::pair<uint64_t, Table::ColdRow>> cold;
  if (table_.disk_ != nullptr) {
    {
      const std::shared_lock guard(stripe.lock);
      for (size_t i = begin; i < end; ++i)
        if (const uint64_t hash = mix64(keys[i]); !stripe.find(hash, keys[i]) && stripe.cold->may_hold(hash))
          places.push_back(static_cast<uint32_t>(i - begin));
    }
    table_.read_keys(
        keys.data() + begin, places.data(), places.size(), true,
        [&](uint32_t i, const Table::ColdRow& row) {
          cold.emplace_back(keys[begin + places[i]], row);
          images.insert(images.end(), row.image, row.image + stride);
        },
        [](uint32_t) {});
    table_.disk_->wait_for_room(cold.size() * Segment::most_record_size(layout));
    for (size_t i = 0; i < cold.size(); ++i) cold[i].second.image = images.data() + i * stride;
    std::sort(cold.begin(), cold.end(), [](const auto& a, const auto& b) { return by_hash(a.first, b.first); });
  }
  const std::unique_lock guard(stripe.lock);
  take_undone(stripe);
  const auto events = table_.history_.events();
  Table::Victims rewritten(layout.kinds());
  std::vector<std::vector<char>> moved;
  for (size_t& i = next_changed_[s]; i < end; ++i) {
    const uint64_t key = keys[i], hash = mix64(key);
    if (const Ref ref = stripe.find(hash, key); ref) {
      take(stripe, stripe.row(ref), ref.kind());
      continue;
    }
    if (stripe.cold == nullptr) continue;
    Table::ColdRow found;
    const auto at = std::lower_bound(cold.begin(), cold.end(), key,
                                     [](const auto& one, uint64_t wanted) { return by_hash(one.first, wanted); });
    if (at != cold.end() && at->first == key && stripe.cold->has(at->second.segment.get()) &&
        at->second.segment->index(at->second.kind).is_live(at->second.position)) {
      found = at->second;
    } else {  // it was spilled or merged since
      stripe.cold->find(hash, [&](const auto& segment, RowKind kind, uint32_t position) {
        std::vector<char>& image = moved.emplace_back(stride);
        segment->copy(kind, position, image.data());
        if (load<uint64_t>(image.data()) != key) return false;
        found = {segment, position, segment->clock(), kind, image.data()};
        return true;
      });
    }
    if (found.segment == nullptr) continue;
    const Row row = found.row(layout);
    table_.replay(*events, stripe, row, found.clock, std::max(found.clock, clock_));
    if (row.epoch() == table_.epoch_) continue;
    const bool stays = !wants(row) || fate(row) == Fate::postpone;
    take(stripe, row, found.kind);
    if (stays) continue;
    stripe.cold->kill(*found.segment, found.kind, found.position);
    stripe.cold->stage.erase(key);
    rewritten[found.kind].push_back({hash, row.hot, row.cold});
  }
  table_.write_segment(stripe, rewritten, clock_);
  stripe.read_below = uint64_t{last} + 1;
}

Row Cut::row_of(char* image) const {
  return {image + 1, image + 1 + table_.layout_.hot_bytes(static_cast<RowKind>(*image))};
}

void Cut::take_image(Row row, RowKind kind) {
  found_.push_back({mix64(row.key()), images_.size()});
  images_.push_back(static_cast<char>(kind));
  images_.insert(images_.end(), row.hot, row.hot + table_.layout_.hot_bytes(kind));
  images_.insert(images_.end(), row.cold, row.cold + table_.layout_.cold_bytes(kind));
}

// A snapshot has a batch for every kind of rows. Consumers know only widths: a batch to publish has all rows of one
// width.
void Cut::emit_found() {
  const Layout& layout = table_.layout_;
  for (RowKind kind = 0; kind < layout.kinds(); ++kind) {
    if (kind_ == snapshot) {
      emit(kind, [kind](RowKind of) { return of == kind; });
      continue;
    }
    bool seen = false;
    const auto same = [&](RowKind of) {
      return layout.factors(of) == layout.factors(kind) && (layout.widest() > 0 || of == kind);
    };
    for (RowKind before = 0; before < kind; ++before) seen = seen || same(before);
    if (!seen) emit(kind, same);
  }
}

// Emits the rows whose kind `is` accepts; all of them have the width of `kind`.
template <class Is>
void Cut::emit(RowKind kind, const Is& is) {
  const Layout& layout = table_.layout_;
  size_t n = 0;
  const auto wanted = [&](const ImageEntry& found) { return is(static_cast<RowKind>(images_[found.image])); };
  for (const ImageEntry& found : found_) n += static_cast<size_t>(wanted(found));
  if (n == 0) return;
  const bool full = is_full(kind);
  const auto e = static_cast<size_t>(layout.embed_state(kind)), d = static_cast<size_t>(layout.factors(kind)),
             x = static_cast<size_t>(layout.embedx_state(kind));
  Batch batch;
  batch.file = file_;
  batch.kind = kind;
  batch.full = full;
  batch.size = n;
  batch.key.resize(n);
  batch.slot.resize(n);
  batch.embed_w.resize(n);
  batch.embedx.resize(n * d);
  if (kind_ == snapshot) {
    batch.show.resize(n);
    batch.click.resize(n);
    batch.unseen_days.resize(n);
    batch.delta_score.resize(n);
    batch.published.resize(n);
    batch.embed_state.resize(n * e);
    batch.embedx_state.resize(n * x);
  }
  size_t i = 0;
  for (const ImageEntry& found : found_) {
    if (!wanted(found)) continue;
    const Row row = row_of(images_.data() + found.image);
    // Images are not aligned, so copy bytes.
    const auto weights = [&](size_t first, size_t count, float* to) {
      std::memcpy(to, row.hot + Row::kWeights + 4 * first, 4 * count);
    };
    const auto state = [&](size_t first, size_t count, float* to) {
      std::memcpy(to, row.cold + Row::kState + 4 * first, 4 * count);
    };
    batch.key[i] = row.key();
    batch.slot[i] = row.slot();
    weights(0, 1, &batch.embed_w[i]);
    if (d > 0) weights(1, d, &batch.embedx[i * d]);
    if (kind_ == snapshot) {
      batch.show[i] = row.show();
      batch.click[i] = row.click();
      batch.unseen_days[i] = row.unseen_days();
      batch.delta_score[i] = row.delta_score();
      batch.published[i] = static_cast<uint8_t>((row.flags() & kListed) != 0);
      if (e > 0) state(0, e, &batch.embed_state[i * e]);
      if (x > 0) state(e, x, &batch.embedx_state[i * x]);
      if (was_tracking_ && (row.flags() & kChanged) != 0) changed_keys_.push_back(row.key());
    }
    ++i;
  }
  if (kind_ == changes)  // a key that was deleted and created again is not deleted: its new row is emitted
    for (const uint64_t key : batch.key) {
      const auto& deleted = deleted_[static_cast<size_t>(stripe_of(mix64(key)))];
      if (std::binary_search(deleted.begin(), deleted.end(), key, by_hash)) reborn_.push_back(key);
    }
  ready_.push_back(std::move(batch));
}

void Cut::finish() {
  close_locked();
  sort_unique(changed_keys_);
  if (kind_ == changes)
    find_deleted();
  else
    sort_unique(deleted_keys_);
}

void Cut::find_deleted() {
  for (const auto& keys : deleted_) left_.insert(left_.end(), keys.begin(), keys.end());
  sort_unique(left_);
  sort_unique(reborn_);
  std::set_difference(left_.begin(), left_.end(), reborn_.begin(), reborn_.end(), std::back_inserter(deleted_keys_),
                      by_hash);
}

}  // namespace clickfleet
